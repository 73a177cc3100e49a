"""uvicorn behind our quotas and with deadlines.

Each connection is judged when it is accepted: who says nothing never reaches an application. A request has to have
arrived, headers and body, within `request_timeout`; a connection rests between requests for `idle_timeout` at most; an
answer has to be read. Whoever is refused or cut off gets the reason, as the API's errors are (RFC 9457).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import time
from email.utils import formatdate
from typing import Any, Protocol

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from xmigd.connections.acceptor import Acceptor
from xmigd.connections.answers import problem
from xmigd.connections.peers import who_is
from xmigd.connections.quotas import Place, Quotas
from xmigd.errors import RequestTimeout, XmigError

HEALTH = frozenset({"/healthz", "/readyz"})
LOBBY_TIMEOUT = 1.0  # seconds for a request of somebody who has no place
UNREAD_TIMEOUT = 60.0  # seconds in which nothing of an answer is read
CLOSING_TIMEOUT = 5.0  # seconds for the rest of an answer to be read, on a connection that ends
LOOK_EVERY = 0.25  # seconds; deadlines are as exact as that
FOREVER = float("inf")


class Times(Protocol):
    """Of the settings of both programs."""

    @property
    def request_timeout(self) -> float: ...
    @property
    def idle_timeout(self) -> int: ...


class GuardedProtocol(H11Protocol):
    """HTTP/1.1 in a place, with a deadline for whatever the peer has to do next."""

    def __init__(self, server: HttpServer, place: Place, state: dict[str, Any]) -> None:
        super().__init__(server.config, server.server_state, {**server.lifespan.state, **state, "place": place})
        self._server = server
        self._place = place
        if place.refusal is not None:
            self.app = _only_health(self.app, place.refusal)
        timeout = server.times.request_timeout
        self._patience = timeout if place.refusal is None else min(timeout, LOBBY_TIMEOUT)
        self._deadline = FOREVER

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline = self.loop.time() + self._patience
        self._server.watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._place.leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deadline == FOREVER and self._awaits_request():
            self._deadline = self.loop.time() + self._patience
        self._server.tell_time()
        super().data_received(data)
        if self._deadline != FOREVER and not self._awaits_request():
            self._deadline = FOREVER  # the request is whole: the next move is ours

    def on_response_complete(self) -> None:
        self._place.listened()
        self._server.tell_time()  # the next request may be here already
        super().on_response_complete()
        if self._place.refusal is not None:
            self.transport.close()
        elif self._deadline == FOREVER and (self.conn.their_state is h11.SEND_BODY or self.conn.trailing_data[0]):
            self._deadline = self.loop.time() + self._patience  # a part of the next request is there already

    def pause_writing(self) -> None:
        super().pause_writing()
        self._deadline = self.loop.time() + UNREAD_TIMEOUT

    def resume_writing(self) -> None:
        super().resume_writing()
        self._deadline = FOREVER

    def look(self, now: float) -> None:
        """Is it late?"""
        if self.transport.is_closing():
            if self._deadline == FOREVER:
                self._deadline = now + CLOSING_TIMEOUT
            elif now >= self._deadline:
                self.transport.abort()
        elif now >= self._deadline:
            self._end()

    def _awaits_request(self) -> bool:
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def _end(self) -> None:
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()  # it does not read, and nothing can be put between what it has not read
            return
        answered = self.cycle is not None and self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete
        if not answered:
            seconds = self._patience
            late = RequestTimeout(
                f"the request was not here within {seconds:g} s", hint="send headers and body without a pause"
            )
            self.transport.write(packed(self._place.refusal or late))
        self._deadline = self.loop.time() + CLOSING_TIMEOUT
        self.transport.close()


class HttpServer(uvicorn.Server):
    """`quotas` may be shared by several servers."""

    def __init__(self, config: uvicorn.Config, quotas: Quotas, times: Times) -> None:
        super().__init__(config)
        self.quotas = quotas
        self.times = times
        self._looks: asyncio.TimerHandle | None = None
        self._reported_time = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._leaving = asyncio.Event()
        self._connecting: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        self.servers = [Acceptor(sock, str(sock.getsockname()), self._accepted) for sock in sockets or ()]  # type: ignore[misc]
        self._loop = asyncio.get_running_loop()
        self.started = True

    async def main_loop(self) -> None:
        """uvicorn's own wakes ten times a second, to look whether it is to end and what time it is."""
        if not self.should_exit:
            await self._leaving.wait()

    def leave(self) -> None:
        """`serve` ends. Also for a signal's handler."""
        self.should_exit = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._leaving.set)

    def tell_time(self) -> None:
        """In every answer."""
        now = int(time.time())
        if now != self._reported_time:
            self._reported_time = now
            date = (b"date", formatdate(now, usegmt=True).encode())
            self.server_state.default_headers = [date, *self.config.encoded_headers]

    def state_of(self, sock: socket.socket) -> dict[str, Any]:
        """What requests of this connection have in their `state`."""
        return {}

    def watch(self) -> None:
        """Look at every connection's deadline now and then, as long as there are any."""
        if self._looks is None:
            self._looks = asyncio.get_running_loop().call_later(LOOK_EVERY, self._look)

    def _look(self) -> None:
        self._looks = None
        connections = [each for each in self.server_state.connections if isinstance(each, GuardedProtocol)]
        if connections:
            self.watch()
        now = asyncio.get_running_loop().time()
        for each in connections:
            each.look(now)

    def _accepted(self, sock: socket.socket) -> None:
        try:
            place = self.quotas.admit(who_is(sock))
        except XmigError as refusal:
            turn_away(sock, refusal, readable=self.config.ssl is None)
            return
        except OSError:  # it has gone already
            sock.close()
            return
        task = asyncio.get_running_loop().create_task(self._connect(sock, place))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, sock: socket.socket, place: Place) -> None:
        try:
            protocol = GuardedProtocol(self, place, self.state_of(sock))
            secure: dict[str, Any] = {}
            if self.config.ssl is not None:
                secure = {"ssl": self.config.ssl, "ssl_handshake_timeout": self.times.request_timeout,
                          "ssl_shutdown_timeout": CLOSING_TIMEOUT}  # fmt: skip
            await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, sock, **secure)
        except BaseException as error:
            place.leave()
            sock.close()
            if not isinstance(error, OSError):  # TLS's are, too: who does not speak it is gone
                raise


def packed(error: XmigError) -> bytes:
    """The answer that ends a connection, as it is sent."""
    return _packed(error.status, error.code, error.message, error.hint, error.retry_after)


@functools.lru_cache(256)
def _packed(status: int, code: str, message: str, hint: str, retry_after: float | None) -> bytes:
    error = XmigError(message, hint=hint, code=code, retry_after=retry_after)
    error.status = status
    answer = problem(error)
    lines = [b"HTTP/1.1 %d %s" % (status, STATUS_PHRASES[status]), b"connection: close"]
    lines += [name + b": " + value for name, value in answer.raw_headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + bytes(answer.body)


def turn_away(sock: socket.socket, refusal: XmigError, *, readable: bool = True) -> None:
    """Say why and close, without waiting for anything: there may be thousands. Who uses TLS cannot be determined."""
    with contextlib.suppress(OSError), sock:
        if readable:
            sock.send(packed(refusal), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            sock.shutdown(socket.SHUT_WR)
            sock.recv(1 << 16, socket.MSG_DONTWAIT)  # what was sent and not read would make the kernel drop the answer


def _only_health(app: Any, refusal: XmigError) -> ASGIApp:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await (app if scope["path"] in HEALTH else problem(refusal))(scope, receive, send)

    return answer
