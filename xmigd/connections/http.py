"""uvicorn behind our quotas and with deadlines.

Each connection is judged when it is accepted: who says nothing never reaches an application. A request has to have
arrived, headers and body, within `request_timeout`; a connection rests between requests for `idle_timeout` at most; an
answer has to be read. Whoever is refused or cut off gets the reason, as the API's errors are (RFC 9457).

The parser is httptools', which neither bounds what it collects nor waits for answers. So it is given a slice at a time,
and nothing while an answer is owed: requests that were sent ahead stay bytes, and those are few.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import time
from collections import deque
from email.utils import formatdate
from typing import Any, Protocol

import httptools
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from xmigd.connections.acceptor import Acceptor
from xmigd.connections.answers import problem
from xmigd.connections.peers import who_is
from xmigd.connections.quotas import Place, Quotas
from xmigd.errors import NotHttp, RequestTimeout, XmigError

HEALTH = frozenset({"/healthz", "/readyz"})
LOBBY_TIMEOUT = 1.0  # seconds for a request of somebody who has no place
UNREAD_TIMEOUT = 60.0  # seconds in which nothing of an answer is read
CLOSING_TIMEOUT = 5.0  # seconds for the rest of an answer to be read, on a connection that ends
LOOK_EVERY = 0.25  # seconds; deadlines are as exact as that
FOREVER = float("inf")
BODY_HEADERS = frozenset({b"content-length", b"transfer-encoding"})
SLICE = 1 << 10  # bytes for the parser at a time: more requests than are in one are not begun before the first's answer
MAX_HEAD = 64 << 10  # bytes of a request line and headers, or of whatever else is neither of a body nor the end of one
MAX_AHEAD = 512 << 10  # bytes that are sent while an answer is owed; reading pauses from half of it on
NOT_HTTP = NotHttp(
    "this is no request, or not one of HTTP/1.1",
    hint=f"send one Host, at most {MAX_HEAD} bytes of headers, and no Upgrade with a body",
)


class Times(Protocol):
    """Of the settings of both programs."""

    @property
    def request_timeout(self) -> float: ...
    @property
    def idle_timeout(self) -> int: ...


class GuardedProtocol(HttpToolsProtocol):
    """HTTP/1.1 in a place, with a deadline for whatever the peer has to do next."""

    def __init__(self, server: HttpServer, place: Place, state: dict[str, Any]) -> None:
        super().__init__(server.config, server.server_state, {**server.lifespan.state, **state, "place": place})
        self._server = server
        self._place = place
        if place.refusal is not None:
            self.app = _only_health(self.app, place.refusal)
        timeout = server.times.request_timeout
        self._patience = timeout if place.refusal is None else min(timeout, LOBBY_TIMEOUT)
        self._deadline = FOREVER  # for the request
        self._unread = FOREVER  # for the peer to read
        self._in_message = False  # the parser is between a request's first byte and its last
        self._in_body = False
        self._in_vain = 0  # bytes that the parser has been given since it last got anywhere
        self._ahead = bytearray()  # what follows a request that is not answered yet
        self._owed: deque[RequestResponseCycle] = deque()  # requests that are not answered yet
        self._refused = False  # nothing more is read: it ends with the answers that are owed

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline = self.loop.time() + self._patience
        self._server.watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._place.leave()
        super().connection_lost(exc)
        for cycle in self._owed:  # uvicorn lets only the newest know
            cycle.disconnected = True
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._unset_keepalive_if_required()
        if not self._awaits_request():
            self._keep_ahead(data)
            return
        if self._deadline == FOREVER:
            self._deadline = self.loop.time() + self._patience
        self._server.tell_time()
        self._parse(data)
        self._set_deadline()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_message = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:  # what comes behind a body belongs to nobody: what counts was read before it
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_vain = 0
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise ValueError("another version of HTTP")
        if sum(name == b"host" for name, _ in self.headers) != 1 and version == "1.1":
            raise ValueError("a request has one Host")
        if self.parser.should_upgrade() and BODY_HEADERS.intersection(name for name, _ in self.headers):
            raise ValueError("the parser would take the body for the next request")
        super().on_headers_complete()
        if version == "1.0":
            self.cycle.__class__ = _WithoutChunks
        self._owed.append(self.cycle)
        self._in_body = True

    def on_body(self, body: bytes) -> None:
        self._in_vain = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_vain, self._in_body, self._in_message = 0, False, False
        super().on_message_complete()
        if self.cycle.response_complete:  # before its body came
            self._deadline = FOREVER

    def on_response_complete(self) -> None:
        self._place.listened()
        self._server.tell_time()  # the next request may be here already
        super().on_response_complete()
        self._owed.popleft()
        if self._place.refusal is not None:
            self.transport.close()
        if self.transport.is_closing():
            return
        if self._refused:
            self._refuse()
            return
        if self._ahead and self._awaits_request():
            ahead, self._ahead = bytes(self._ahead), bytearray()
            self._parse(ahead)
        self._set_deadline()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.time() + UNREAD_TIMEOUT

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread = FOREVER

    def look(self, now: float) -> None:
        """Is it late?"""
        if self.transport.is_closing():
            if self._deadline == FOREVER:
                self._deadline = now + CLOSING_TIMEOUT
            elif now >= self._deadline:
                self.transport.abort()
        elif now >= self._unread:
            self.transport.abort()  # nothing can be put between what it has not read
        elif now >= self._deadline:
            self._end()

    def _parse(self, data: bytes) -> None:
        """As far as requests are awaited."""
        while data and not self._refused and not self.transport.is_closing():
            if not self._awaits_request():
                self._keep_ahead(data)
                return
            piece, data = data[:SLICE], data[SLICE:]
            self._in_vain += len(piece)
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade as upgrade:  # to what we do not speak: it goes on as before
                data = piece[upgrade.args[0] :] + data
            except httptools.HttpParserError:
                self._refuse()
            else:
                if self._in_vain > MAX_HEAD:
                    self._refuse()

    def _keep_ahead(self, data: bytes) -> None:
        """Until it is its turn. Reading goes on meanwhile: nothing else shows that the peer has gone, and what answers
        it for ever has to hear of that."""
        self._ahead += data
        if len(self._ahead) > MAX_AHEAD:
            self.transport.abort()
        elif len(self._ahead) > MAX_AHEAD // 2:
            self.flow.pause_reading()

    def _set_deadline(self) -> None:
        """After something was read or answered. Line ends before a request are none: they change nothing."""
        if not self._awaits_request():  # the request is whole: the next move is ours
            self._unset_keepalive_if_required()
            self._deadline = FOREVER
        elif self._in_message:
            self._unset_keepalive_if_required()
            if self._deadline == FOREVER:
                self._deadline = self.loop.time() + self._patience
        elif self._deadline == FOREVER and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _refuse(self) -> None:
        """It is not HTTP, or more of it than anybody needs. Whole requests before it are done: they are answered."""
        self._refused = True
        if self._answering():
            self.cycle.keep_alive = False
            self._ahead.clear()
            return
        self.transport.write(packed(self._place.refusal or NOT_HTTP))
        self._deadline = self.loop.time() + CLOSING_TIMEOUT
        self.transport.close()

    def _awaits_request(self) -> bool:
        """The next move is the peer's: there is no request, or not all of the only one."""
        return self.cycle is None or self.cycle.response_complete or (self.cycle.more_body and not self.pipeline)

    def _answering(self) -> bool:
        """An answer is on its way, or owed for something else than the request that is arriving."""
        return bool(self.pipeline) or (
            self.cycle is not None and not self.cycle.response_complete
            and (self.cycle.response_started or not self._in_body)
        )  # fmt: skip

    def _end(self) -> None:
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()  # it does not read, and nothing can be put between what it has not read
            return
        answered = self.cycle is not None and self._in_body and self.cycle.response_complete
        if not answered:
            seconds = self._patience
            late = RequestTimeout(
                f"the request was not here within {seconds:g} s", hint="send headers and body without a pause"
            )
            self.transport.write(packed(self._place.refusal or late))
        self._deadline = self.loop.time() + CLOSING_TIMEOUT
        self.transport.close()


class _WithoutChunks(RequestResponseCycle):
    """Of HTTP/1.0, which does not know them: what has no length ends with the connection, as all its answers do."""

    async def send(self, message: Any) -> None:
        self.chunked_encoding = False
        self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


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
    lines = [b"connection: close", *(name + b": " + value for name, value in answer.raw_headers)]
    return STATUS_LINE[status] + b"\r\n".join(lines) + b"\r\n\r\n" + bytes(answer.body)


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
