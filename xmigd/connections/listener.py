"""Listening Unix sockets on the event loop, for strangers: one message is awaited from each connection, for a while."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path

from xmigd import log
from xmigd.connections.acceptor import Acceptor
from xmigd.connections.peers import user
from xmigd.connections.quotas import Place, Quotas, within_descriptors
from xmigd.errors import StartError, XmigError
from xmigd.ipc.channel import Peer, Received, peer_of, receive
from xmigd.ipc.fds import close_all

PATIENCE = 5.0  # seconds for the first message
LITTLE_PATIENCE = 1.0  # for that of somebody who has too many connections already
MAX_PENDING = 512
MAX_PENDING_PER_USER = 128
MAX_REFUSED = 128

FirstMessage = Callable[[socket.socket, Peer, Received], None]
Refused = Callable[[socket.socket, XmigError], None]
logger = log.get("listener")


def bind_unix(path: Path, kind: int, mode: int, backlog: int = 512) -> socket.socket:
    """A listening socket at `path`. The runtime directory is locked by us: what lies there is stale."""
    sock = socket.socket(socket.AF_UNIX, kind)
    try:
        sock.setblocking(False)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        sock.bind(str(path))
        os.chmod(path, mode)
        sock.listen(backlog)
    except OSError as error:
        sock.close()
        reason = "the path is too long for a socket" if error.errno is None else error.strerror
        raise StartError(
            f"cannot listen at {path}: {reason}", hint="choose another XMIG_RUNTIME_DIR, writable and short"
        ) from None
    return sock


class Listener:
    """Accepts connections; gives each with its first message to `on_first`, which then owns the socket. `on_refused`
    tells whoever comes too often why."""

    def __init__(self, path: Path, on_first: FirstMessage, on_refused: Refused | None = None) -> None:
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._on_first = on_first
        self._on_refused = on_refused
        self._sock = bind_unix(path, socket.SOCK_SEQPACKET, 0o666)
        pending = within_descriptors(MAX_PENDING, 8)
        self._quotas = Quotas(
            pending, MAX_PENDING_PER_USER, what="unfinished handshakes",
            advice=f"start fewer programs at once; connections that say nothing are closed after {PATIENCE:g} s",
        )  # fmt: skip
        self._pending: dict[socket.socket, tuple[Place, Peer, asyncio.TimerHandle]] = {}
        self._refused: deque[tuple[socket.socket, float]] = (
            deque()
        )  # reported why, and until when they stay, oldest first
        self._most_refused = within_descriptors(MAX_REFUSED, 32)
        self._ending: asyncio.TimerHandle | None = None
        self._acceptor = Acceptor(self._sock, path.name, self._accepted)

    def close(self) -> None:
        self._acceptor.close()
        self._sock.close()
        if self._ending is not None:
            self._ending.cancel()
        while self._refused:
            self._end_refused()
        for sock in list(self._pending):
            self._forget(sock)
            sock.close()
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _accepted(self, sock: socket.socket) -> None:
        peer = peer_of(sock)
        try:
            place = self._quotas.admit(user(peer.uid))
        except XmigError as refusal:
            self._refuse(sock, refusal)
            return
        # Who has no place of its own is heard before it is refused: a peer that is closed before it has spoken would
        # take that for a defect.
        timer = self._loop.call_later(PATIENCE if place.refusal is None else LITTLE_PATIENCE, self._too_late, sock)
        self._pending[sock] = (place, peer, timer)
        self._loop.add_reader(sock.fileno(), self._readable, sock)

    def _refuse(self, sock: socket.socket, why: XmigError) -> None:
        """Say why. It stays open for a moment more, as long as there are not too many: who writes to a closed socket
        does not hear the answer."""
        if self._on_refused is not None:
            self._on_refused(sock, why)
        self._refused.append((sock, self._loop.time() + LITTLE_PATIENCE))
        if len(self._refused) > self._most_refused:
            self._end_refused()
        if self._ending is None:
            self._ending = self._loop.call_later(LITTLE_PATIENCE, self._end_late)

    def _end_late(self) -> None:
        self._ending = None
        while self._refused and self._refused[0][1] <= self._loop.time():
            self._end_refused()
        if self._refused:
            self._ending = self._loop.call_at(self._refused[0][1], self._end_late)

    def _end_refused(self) -> None:
        sock, _ = self._refused.popleft()
        with contextlib.suppress(OSError):  # what was sent and not read would make the kernel drop the answer
            close_all(receive(sock).fds)
        sock.close()

    def _readable(self, sock: socket.socket) -> None:
        refusal = self._pending[sock][0].refusal
        try:
            received = receive(sock)
        except BlockingIOError:
            return
        except OSError:
            self._forget(sock)
            sock.close()
            return
        peer = self._forget(sock)
        if received.oversized or not received.data or refusal is not None:
            close_all(received.fds)
            if refusal is not None and received.data:
                self._refuse(sock, refusal)
            else:
                sock.close()
            return
        self._on_first(sock, peer, received)

    def _too_late(self, sock: socket.socket) -> None:
        peer = self._forget(sock)
        logger.debug("connection closed", uid=peer.uid, pid=peer.pid, why="it reported nothing")
        sock.close()

    def _forget(self, sock: socket.socket) -> Peer:
        place, peer, timer = self._pending.pop(sock)
        timer.cancel()
        self._loop.remove_reader(sock.fileno())
        place.leave()
        return peer
