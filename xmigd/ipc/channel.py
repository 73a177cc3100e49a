"""A SOCK_SEQPACKET connection on the event loop: whole messages with descriptors, both ways, never blocking."""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xmigd.ipc.fds import Fd, close_all
from xmigd.ipc.messages import MAX_FDS, MAX_MESSAGE

SEND_BUFFER = 4 << 20
MESSAGES_PER_TURN = 64  # one peer that never stops talking must not keep the others waiting
MAX_QUEUE = 1 << 17
SO_PEERGROUPS = 59  # not in Python's socket module
SO_PEERPIDFD = 77  # Linux 6.5; not in Python 3.11's socket module
RETRY_AFTER = 0.002

_FLAGS = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
_ANCILLARY = socket.CMSG_SPACE(MAX_FDS * 4)


@dataclass(frozen=True, slots=True)
class Peer:
    pid: int
    uid: int
    gid: int


def peer_of(sock: socket.socket) -> Peer:
    """Who connected: the kernel's word (SO_PEERCRED), not the peer's."""
    pid, uid, gid = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return Peer(pid, uid, gid)


def peer_groups(sock: socket.socket) -> frozenset[int]:
    """The supplementary groups that the peer had when it connected (SO_PEERGROUPS); none if it has more than 256."""
    try:
        data = sock.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, 4 * 256)
    except OSError:
        return frozenset()
    return frozenset(struct.unpack(f"{len(data) // 4}I", data))


def peer_pidfd(sock: socket.socket, pid: int) -> Fd:
    """A pidfd of the process that connected. Raises OSError: it is gone, or there are no descriptors left."""
    try:
        number = struct.unpack("i", sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, 4))[0]
    except OSError as error:
        if error.errno not in (errno.ENOPROTOOPT, errno.EINVAL):
            raise
        number = os.pidfd_open(pid)
    return Fd(number)


@dataclass(frozen=True, slots=True)
class Received:
    data: bytes  # empty: the peer has closed
    fds: list[Fd]
    oversized: bool = False
    fds_missing: bool = False  # descriptors were sent that this process could not take (EMFILE)


def receive(sock: socket.socket) -> Received:
    """One message. Raises BlockingIOError if there is none."""
    data, ancillary, flags, _ = sock.recvmsg(MAX_MESSAGE, _ANCILLARY, _FLAGS)
    numbers: array.array[int] = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
    fds = [Fd(number) for number in numbers]
    cut_off = bool(flags & socket.MSG_CTRUNC)
    too_many = cut_off and len(fds) >= MAX_FDS
    return Received(data, fds, bool(flags & socket.MSG_TRUNC) or too_many, cut_off and not too_many)


class Channel:
    """Calls `on_message` for each message, and `on_closed` once when the connection has ended by itself, with the
    reason and whether the peer ended it; not after `close`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        on_message: Callable[[Received], None],
        on_closed: Callable[[str, bool], None],
    ) -> None:
        sock.setblocking(False)
        for option in (getattr(socket, "SO_SNDBUFFORCE", 32), socket.SO_SNDBUF):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, option, SEND_BUFFER)
                break
        self._loop = loop
        self._sock: socket.socket | None = sock
        self._on_message = on_message
        self._on_closed = on_closed
        self._queue: deque[tuple[bytes, Sequence[Fd]]] = deque()
        self._retry: asyncio.TimerHandle | None = None
        loop.add_reader(sock.fileno(), self._readable)

    @property
    def closed(self) -> bool:
        return self._sock is None

    def send(self, data: bytes, fds: Sequence[Fd] = ()) -> None:
        """Send now, or as soon as the peer has room. Order is kept."""
        if self._sock is None:
            return
        if len(self._queue) >= MAX_QUEUE:
            self._end("it does not read what it is sent")
            return
        self._queue.append((data, fds))
        if len(self._queue) == 1:
            self._flush()

    def drain(self) -> None:
        """Take everything that the peer sent before now: it has exited."""
        while self._sock is not None and self._take_one():
            pass

    def close(self) -> None:
        sock, self._sock = self._sock, None
        if sock is None:
            return
        self._loop.remove_reader(sock.fileno())
        self._loop.remove_writer(sock.fileno())
        if self._retry is not None:
            self._retry.cancel()
        self._queue.clear()
        sock.close()

    def _end(self, reason: str, *, by_peer: bool = False) -> None:
        if self._sock is not None:
            self.close()
            self._on_closed(reason, by_peer)

    def _readable(self) -> None:
        for _ in range(MESSAGES_PER_TURN):
            if self._sock is None or not self._take_one():
                return

    def _take_one(self) -> bool:
        assert self._sock is not None
        try:
            received = receive(self._sock)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True  # it ended with messages unread; what it reported before that comes next, and then its end
        except OSError as error:
            self._end(f"its connection failed: {error.strerror}", by_peer=True)
            return False
        if received.oversized:
            close_all(received.fds)
            self._end("a message that is too long or has too many descriptors")
            return False
        if not received.data:
            close_all(received.fds)
            self._end("it closed its connection", by_peer=True)
            return False
        self._on_message(received)
        return True

    def _flush(self) -> None:
        self._retry = None
        while self._queue and self._sock is not None:
            data, fds = self._queue[0]
            if any(fd.closed for fd in fds):  # dropped while it waited: the receiver must not get what is gone
                self._queue.popleft()
                continue
            try:
                self._send(data, fds)
            except BlockingIOError:
                self._loop.add_writer(self._sock.fileno(), self._flush)
                return
            except OSError as error:
                if error.errno in (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM):
                    # Too many descriptors under way in the whole system: no event tells when there are fewer.
                    self._loop.remove_writer(self._sock.fileno())
                    self._retry = self._loop.call_later(RETRY_AFTER, self._flush)
                    return
                # What it still had to say is read before its end is believed.
                self._queue.clear()
                self._loop.remove_writer(self._sock.fileno())
                self._loop.call_soon(self._broken, f"its connection failed: {error.strerror}")
                return
            self._queue.popleft()
        if self._sock is not None:
            self._loop.remove_writer(self._sock.fileno())

    def _broken(self, reason: str) -> None:
        self.drain()
        self._end(reason, by_peer=True)

    def _send(self, data: bytes, fds: Sequence[Fd]) -> None:
        assert self._sock is not None
        flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
        if fds:
            numbers = array.array("i", [fd.fileno() for fd in fds])
            self._sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)], flags)
        else:
            self._sock.send(data, flags)
