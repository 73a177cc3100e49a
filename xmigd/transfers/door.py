"""Where peers call: each connection is served by a thread of its own, beside the loop, which recovers programs.

A request that concerns more than pieces is handled in the loop. What a peer may request at all, `Arrivals` decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

from xmigd import log
from xmigd.errors import ProtocolError, TooManyRequests, XmigError
from xmigd.peers.certificates import fingerprint_of
from xmigd.peers.links import PeerLinks
from xmigd.text import harmless
from xmigd.transfers.calls import as_answer
from xmigd.transfers.pumps import read_first, start_pump
from xmigd.transfers.wire import BULK, ID, LONGEST_PAYLOAD, PREFIX, STEP, Line, Payload, prepare

CONNECTIONS = 40  # of one peer at once
HELD = LONGEST_PAYLOAD  # bytes behind requests of one peer that are in memory at once
PATIENCE = 120.0  # seconds that a request may take in the loop

logger = log.get("transfers")

Handler = Callable[[str, dict[str, Any], Payload], Awaitable[dict[str, Any]]]
Quick = Callable[[str, dict[str, Any], Payload], tuple[dict[str, Any], bytes] | None]  # None: it is for the loop
Longest = Callable[[str], int]  # bytes behind a request of this peer


class _Room:
    """For what is behind a peer's requests, on all its connections: who finds none waits, its connection unread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: Counter[str] = Counter()

    @contextlib.contextmanager
    def of(self, peer: str) -> Iterator[Callable[[int], None]]:
        """For one request, until it is answered: what takes so many bytes."""
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            with self._changed:
                self._changed.wait_for(lambda: self._held[peer] + size <= HELD)
                self._held[peer] += size
                taken = size

        try:
            yield take
        finally:
            with self._changed:
                self._held[peer] -= taken
                self._changed.notify_all()


class Door:
    """`in_loop` handles requests in the loop, `in_thread` those about content, in the connection's thread."""

    def __init__(
        self, links: PeerLinks, *, in_loop: Handler, in_thread: Quick, longest: Longest,
        sender: Callable[[str], str | None] = lambda transfer: None,
    ) -> None:  # fmt: skip
        """`sender`: the peer whose pieces of this transfer are expected."""
        self._links = links
        self._sender = sender
        self._in_loop = in_loop
        self._in_thread = in_thread
        self._longest = longest
        self._loop = asyncio.get_running_loop()
        self._open: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._room = _Room()
        links.other_connections[PREFIX] = self.welcome
        links.other_connections[BULK] = self.welcome_pieces

    async def welcome(self, sock: socket.socket) -> None:
        """A connection whose first byte is ours. Returns once it is known who is there. Raises OSError, ValueError."""
        prepare(sock)
        sock.recv(len(PREFIX))
        wrapped = self._links.trust.server.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        await self._begin(self._serve, wrapped)

    async def welcome_pieces(self, sock: socket.socket) -> None:
        """One for pieces of a transfer. Returns once it is known whose they are. Raises OSError, ValueError."""
        prepare(sock)
        await self._begin(self._serve_apart, sock)

    async def _begin(self, serve: Callable[[Any, asyncio.Future[None]], None], sock: socket.socket) -> None:
        welcomed: asyncio.Future[None] = self._loop.create_future()
        threading.Thread(target=serve, args=(sock, welcomed), daemon=True, name="transfer").start()
        try:
            async with asyncio.timeout(STEP):
                await welcomed
        except BaseException:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # its thread ends
            raise

    def _serve_apart(self, sock: socket.socket, welcomed: asyncio.Future[None]) -> None:
        """Another process has the connection (pump.py), which lets only that peer in."""
        with sock, contextlib.ExitStack() as stack:
            try:
                transfer = read_first(sock, len(BULK) + ID)[len(BULK) :].decode("ascii", "replace")
                peer = self._sender(transfer)
                known = None if peer is None else self._links.peer(peer)
                if peer is None or known is None or known.certificate is None:
                    raise ValueError("nothing of that transfer is expected")
                if stack.enter_context(self._counted(peer)):  # before it has a process
                    raise ValueError(f"{peer} has {CONNECTIONS} connections")
                process, pair = start_pump(sock, self._links.trust.identity, known.certificate)
            except (OSError, ValueError) as error:
                self._report(welcomed, error)
                return
            self._report(welcomed, None)
            sock.close()
            with process, pair:
                self._answer_peer(peer, pair, full=False)

    def _serve(self, wrapped: ssl.SSLSocket, welcomed: asyncio.Future[None]) -> None:
        try:
            wrapped.do_handshake()
        except (OSError, ValueError) as error:
            wrapped.close()
            self._report(welcomed, error)
            return
        fingerprint = fingerprint_of(wrapped.getpeercert(binary_form=True) or b"")
        peer = self._links.named(fingerprint)
        if peer is None:
            wrapped.close()
            self._report(welcomed, ValueError(f"nobody here has the fingerprint {fingerprint}"))
            return
        self._report(welcomed, None)
        with wrapped, self._counted(peer) as full:
            self._answer_peer(peer, wrapped, full=full)

    @contextlib.contextmanager
    def _counted(self, peer: str) -> Iterator[bool]:
        """A connection of this peer: does it have too many?"""
        with self._lock:
            self._open[peer] += 1
            full = self._open[peer] > CONNECTIONS
        try:
            yield full
        finally:
            with self._lock:
                self._open[peer] -= 1

    def _answer_peer(self, peer: str, sock: socket.socket, *, full: bool) -> None:
        try:
            self._answer_all(peer, Line(sock), full=full)
        except EOFError:
            pass
        except (XmigError, RuntimeError, CancelledError) as error:  # the last two: this daemon ends
            logger.info("a connection of a peer ends", peer=peer, why=harmless(str(error)))
        except Exception:
            logger.exception("a connection of a peer failed", peer=peer)

    def _answer_all(self, peer: str, line: Line, *, full: bool) -> None:
        while True:
            with self._room.of(peer) as take:
                request, payload = line.receive(self._longest(peer), take)
                try:
                    if full:
                        raise TooManyRequests(f"{peer} has {CONNECTIONS} connections")
                    found = self._in_thread(peer, request, payload)
                    if found is None:
                        handling = asyncio.run_coroutine_threadsafe(self._handle(peer, request, payload), self._loop)
                        found = handling.result(PATIENCE), b""
                except ProtocolError as error:
                    line.send(as_answer(error))
                    raise
                except XmigError as error:
                    found = as_answer(error), b""
                del payload
            line.send(*found)

    async def _handle(self, peer: str, request: dict[str, Any], payload: Payload) -> dict[str, Any]:
        return await self._in_loop(peer, request, payload)

    def _report(self, welcomed: asyncio.Future[None], error: Exception | None) -> None:
        def report() -> None:
            if not welcomed.done():
                welcomed.set_result(None) if error is None else welcomed.set_exception(error)

        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(report)
