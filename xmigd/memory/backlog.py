"""The backlog of a server: a socket into which it says each change of its memory, beside telling the daemon.

The reading end lies in the descriptor store, too. What the daemon had not read, or not passed on, when it died is still
in it for the next one, also if the server died at the same moment. The daemon takes out what the store has been
informed.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

from xmigd.errors import ProtocolError
from xmigd.ipc import messages as m
from xmigd.ipc.fds import Fd, close_all

Change = m.MemoryAdd | m.MemoryDrop


class Backlog:
    """Its reading end. The writing end is a hostile process's."""

    def __init__(self, fd: Fd) -> None:
        self.fd = fd

    @classmethod
    def make(cls) -> tuple[Backlog, Fd]:
        """With the end for the server, on which nobody waits. Raises OSError: no descriptors."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        theirs.setblocking(False)
        writing = Fd(theirs.detach())
        return cls(Fd(ours.detach())), writing

    def forget(self, until: int) -> None:
        """The changes up to this one have another place."""
        with contextlib.suppress(OSError), self._socket() as sock:
            while data := sock.recv(m.MAX_MESSAGE, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                change = _parse(data)
                if change is not None and change.change > until:
                    return
                sock.recv(m.MAX_MESSAGE)

    def take(self, until: int) -> Iterator[tuple[Change, list[Fd]]]:
        """Takes out the changes up to this one; what makes no sense is left out."""
        with contextlib.suppress(OSError), self._socket() as sock:
            while data := sock.recv(m.MAX_MESSAGE, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                change = _parse(data)
                if change is not None and change.change > until:
                    return
                _, numbers, _, _ = socket.recv_fds(sock, m.MAX_MESSAGE, 1, socket.MSG_CMSG_CLOEXEC)
                fds = [Fd(number) for number in numbers]
                if change is not None and len(fds) == m.expected_fds(change):
                    yield change, fds
                else:
                    close_all(fds)

    def close(self) -> None:
        self.fd.close()

    def _socket(self) -> socket.socket:
        return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=os.dup(self.fd.fileno()))


def _parse(data: bytes) -> Change | None:
    try:
        message = m.parse(data)
    except ProtocolError:
        return None
    return message if isinstance(message, Change) else None
