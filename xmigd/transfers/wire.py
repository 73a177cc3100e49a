"""What daemons send each other about a transfer: requests and answers, each with bytes behind it, over TLS.

A connection goes to the port for peers. Its first byte says that it is none of a link (docs/peers.md). TLS follows,
with the same pinned certificates. Each message is a header of 12 bytes, JSON, and a payload. Nothing in here trusts the
other side: every length has a limit before anything of it is read, and every read and write a time.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import socket
import struct
import termios
import threading
from collections.abc import Callable, Iterator
from typing import Any

from xmigd.checkpoints.planes import Bytes
from xmigd.errors import ProtocolError, Unavailable

PREFIX = b"T"  # a record of TLS never begins with it
BULK = b"B"  # nor with this one: pieces of the transfer with the id of ID bytes behind it
ID = 32
HEADER = struct.Struct(">IQ")  # bytes of JSON, bytes of the payload
LONGEST = 1 << 20  # bytes of JSON
LONGEST_PAYLOAD = 64 << 20  # bytes: a manifest of 1 TiB
STEP = 5.0  # seconds for connecting with TLS
STALL = 20.0  # seconds in which nothing at all comes or goes
BLOCK = 512 << 10  # bytes that are written at once: each has that time
KEEPALIVE = ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 4))
GIVEN_UP = 10_000  # ms after which what was sent and not received is a lost connection

Payload = bytes | bytearray


class Closing:
    """Ends connections at once, whatever is being sent on them. Every thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False

    def close(self) -> None:
        """All that are open, and each that is opened from now on."""
        with self._lock:
            self._closed = True
            for sock in self._open:
                _end(sock)

    @contextlib.contextmanager
    def of(self, sock: socket.socket) -> Iterator[None]:
        """That of this socket, too. Meanwhile TLS may take the socket over."""
        # A descriptor that nobody else closes: its number is no other file's.
        with socket.socket(fileno=os.dup(sock.fileno())) as own:
            with self._lock:
                self._open.add(own)
                if self._closed:
                    _end(own)
            try:
                yield
            finally:
                with self._lock:
                    self._open.discard(own)


def _end(sock: socket.socket) -> None:
    """What waits in the kernel to be sent is thrown away when the last descriptor is closed. Who sends or receives is
    woken up now."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.shutdown(socket.SHUT_RDWR)


class Line:
    """One connection. Its methods block; one thread at a time uses it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(STALL)

    def send(self, body: dict[str, Any], *payload: Bytes) -> None:
        """`payload`: in parts. Raises Unavailable: the connection is lost."""
        text = json.dumps(body, separators=(",", ":")).encode()
        if len(text) > LONGEST:
            raise ProtocolError(f"a message of {len(text)} bytes; at most {LONGEST} are sent")
        try:
            self.sock.sendall(HEADER.pack(len(text), sum(map(len, payload))) + text)
            for part in payload:
                view = memoryview(part)
                for at in range(0, len(view), BLOCK):
                    self.sock.sendall(view[at : at + BLOCK])
        except OSError as error:
            raise lost(error) from None

    def receive(
        self, longest: int = LONGEST_PAYLOAD, before: Callable[[int], None] = lambda size: None
    ) -> tuple[dict[str, Any], Payload]:
        """The next message, with at most so many bytes behind it. `before` they are read, it is called with their
        number. Raises Unavailable, ProtocolError, EOFError: the other side has closed it."""
        length, more = HEADER.unpack(self._exactly(HEADER.size, first=True))
        if length > LONGEST or more > longest:
            raise ProtocolError(f"a message of {length} and {more} bytes, which is more than allowed")
        try:
            body = json.loads(self._exactly(length))
        except (ValueError, RecursionError):
            raise ProtocolError("a message that is no JSON") from None
        if not isinstance(body, dict):
            raise ProtocolError("a message that is no object")
        before(more)
        return body, self._exactly(more)

    def call(self, body: dict[str, Any], payload: Bytes = b"") -> tuple[dict[str, Any], Payload]:
        """The answer. Raises Unavailable, ProtocolError."""
        self.send(body, payload)
        return self.answer()

    def answer(self) -> tuple[dict[str, Any], Payload]:
        """To what was sent. Raises Unavailable, ProtocolError."""
        try:
            return self.receive()
        except EOFError:
            raise Unavailable("the peer has closed the connection", code="peer_unreachable") from None

    def close(self) -> None:
        self.sock.close()

    def _exactly(self, length: int, *, first: bool = False) -> bytearray:
        """Over a slow link the answer comes late: as long as what was sent still leaves, it is waited for."""
        content = bytearray(length)
        view, at, unsent = memoryview(content), 0, self._unsent()
        while at < length:
            try:
                count = self.sock.recv_into(view[at:])
            except TimeoutError as error:
                before, unsent = unsent, self._unsent()
                if unsent == before:
                    raise lost(error) from None
                continue
            except OSError as error:
                raise lost(error) from None
            if count == 0:
                if first and at == 0:
                    raise EOFError
                raise Unavailable("the connection ended in the middle of a message", code="peer_unreachable")
            at += count
        return content

    def _unsent(self) -> int:
        """Bytes that were sent, and that the other side has not acknowledged."""
        found = array.array("i", [0])
        fcntl.ioctl(self.sock.fileno(), termios.TIOCOUTQ, found)
        return found[0]


def lost(error: OSError) -> Unavailable:
    why = error.strerror or str(error) or type(error).__name__
    return Unavailable(f"the connection to the peer is lost: {why}", code="peer_unreachable",
                       hint="xmigctl peer list says whether it is connected")  # fmt: skip


def prepare(sock: socket.socket) -> None:
    """A peer that is gone, or behind a link that is down, is noticed within ten seconds."""
    sock.settimeout(STEP)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GIVEN_UP)
