"""Listening Unix sockets on the event loop, for strangers: one message is awaited from each connection, for a while."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from xmigd import log
from xmigd.errors import StartError
from xmigd.supervisor.channel import Peer, Received, peer_of, receive
from xmigd.supervisor.fds import close_all

PATIENCE = 5.0  # seconds for the first message
MAX_PENDING = 512
MAX_PENDING_PER_USER = 128
ACCEPTS_PER_TURN = 32

FirstMessage = Callable[[socket.socket, Peer, Received], None]
logger = log.get("listener")


def bind_unix(path: Path, kind: int, mode: int) -> socket.socket:
    """A listening socket at `path`. The runtime directory is locked by us: what lies there is stale."""
    sock = socket.socket(socket.AF_UNIX, kind)
    try:
        sock.setblocking(False)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        sock.bind(str(path))
        os.chmod(path, mode)
        sock.listen(512)
    except OSError as error:
        sock.close()
        reason = "the path is too long for a socket" if error.errno is None else error.strerror
        raise StartError(
            f"cannot listen at {path}: {reason}", hint="choose another XMIG_RUNTIME_DIR, writable and short"
        ) from None
    return sock


class Listener:
    """Accepts connections; gives each with its first message to `on_first`, which then owns the socket."""

    def __init__(self, path: Path, on_first: FirstMessage) -> None:
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._on_first = on_first
        self._sock = bind_unix(path, socket.SOCK_SEQPACKET, 0o666)
        # Given up for a moment to refuse a connection when there are no descriptors left: otherwise the listening
        # socket would stay readable and the loop would spin.
        self._reserve: int | None = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        self._pending: dict[socket.socket, tuple[Peer, asyncio.TimerHandle]] = {}
        self._per_user: Counter[int] = Counter()
        self._loop.add_reader(self._sock.fileno(), self._acceptable)

    def close(self) -> None:
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        for sock in list(self._pending):
            self._forget(sock)
            sock.close()
        if self._reserve is not None:
            os.close(self._reserve)
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _acceptable(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                self._cannot_accept(error)
                return
            self._accepted(sock)

    def _cannot_accept(self, error: OSError) -> None:
        logger.error("a connection cannot be taken", socket=self._path.name, why=error.strerror)
        if error.errno in (errno.EMFILE, errno.ENFILE) and self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None
            with contextlib.suppress(OSError):
                self._sock.accept()[0].close()
        if self._reserve is None:
            with contextlib.suppress(OSError):
                self._reserve = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)

    def _accepted(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        peer = peer_of(sock)
        if len(self._pending) >= MAX_PENDING or self._per_user[peer.uid] >= MAX_PENDING_PER_USER:
            logger.warning("connection refused", uid=peer.uid, pid=peer.pid, why="too many that say nothing")
            sock.close()
            return
        timer = self._loop.call_later(PATIENCE, self._too_late, sock)
        self._pending[sock] = (peer, timer)
        self._per_user[peer.uid] += 1
        self._loop.add_reader(sock.fileno(), self._readable, sock)

    def _readable(self, sock: socket.socket) -> None:
        try:
            received = receive(sock)
        except BlockingIOError:
            return
        except OSError:
            self._forget(sock)
            sock.close()
            return
        peer = self._forget(sock)
        if received.oversized or not received.data:
            close_all(received.fds)
            sock.close()
            return
        self._on_first(sock, peer, received)

    def _too_late(self, sock: socket.socket) -> None:
        peer = self._forget(sock)
        logger.warning("connection closed", uid=peer.uid, pid=peer.pid, why="it said nothing")
        sock.close()

    def _forget(self, sock: socket.socket) -> Peer:
        peer, timer = self._pending.pop(sock)
        timer.cancel()
        self._loop.remove_reader(sock.fileno())
        self._per_user[peer.uid] -= 1
        if not self._per_user[peer.uid]:
            del self._per_user[peer.uid]
        return peer
