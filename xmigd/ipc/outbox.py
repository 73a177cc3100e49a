"""Messages with descriptors to somebody who is never waited for: the service manager, the descriptor store."""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import socket
from collections import deque
from collections.abc import Callable, Sequence

from xmigd import log
from xmigd.ipc.fds import Fd

RETRY_AFTER = 0.01
MAX_WAITING = 1 << 17  # messages; who reads none for so long is not one to wait for

# Full, or too many descriptors under way in the whole system: no event tells when there is room.
_PASSES = (errno.EAGAIN, errno.EINTR, errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM)


class Outbox:
    """Sends in order, now or later: a name is dropped and used again."""

    def __init__(
        self, sock: socket.socket, address: str | None, whom: str, failed: Callable[[OSError], None] | None = None
    ) -> None:
        """`address`: of a datagram socket; None: it is connected. `failed` hears of each message that went nowhere."""
        sock.setblocking(False)
        self._sock: socket.socket | None = sock
        self._address = () if address is None else (address,)
        self._whom = whom
        self._failed = failed or (lambda error: None)
        self._log = log.get("outbox")
        self._waiting: deque[tuple[bytes, Sequence[Fd]]] = deque()
        self._then: list[Callable[[], None]] = []
        self._retry: asyncio.TimerHandle | None = None

    def when_empty(self, then: Callable[[], None]) -> None:
        """`then`, once everything before it is sent, or given up."""
        self._then.append(then)
        self._flush()

    def send(self, message: str, fds: Sequence[Fd] = ()) -> None:
        """Without waiting. A descriptor that is closed before its turn is not sent, and its message neither."""
        if self._sock is None:
            return
        if len(self._waiting) >= MAX_WAITING:
            self._log.error(f"{self._whom} does not read", why="what it is sent is given up")
            self._waiting.clear()
        self._waiting.append((message.encode(), fds))
        if len(self._waiting) == 1:
            self._flush()

    def close(self) -> None:
        """Say what there is still to say, if it is taken at once."""
        self._flush()
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()

    def _flush(self) -> None:
        self._retry = None
        while self._waiting and self._sock is not None:
            message, fds = self._waiting[0]
            if not any(fd.closed for fd in fds):
                try:
                    numbers = array.array("i", [fd.fileno() for fd in fds])
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)] if fds else []
                    self._sock.sendmsg([message], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL, *self._address)
                except OSError as error:
                    if error.errno in _PASSES:
                        self._try_again()
                        return
                    self._log.warning(f"{self._whom} cannot be informed", why=error.strerror)
                    self._failed(error)
            if self._waiting:
                self._waiting.popleft()
        then, self._then = self._then, []
        for each in then:
            each()

    def _try_again(self) -> None:
        with contextlib.suppress(RuntimeError):  # no loop runs any more
            self._retry = asyncio.get_running_loop().call_later(RETRY_AFTER, self._flush)
