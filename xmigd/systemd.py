"""The service manager, where there is one: it is told how the daemon is, and keeps descriptors for the next one.

Everything here is a datagram to $NOTIFY_SOCKET (sd_notify(3)). Without one nothing is sent, and nothing else changes.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import MutableMapping, Sequence

from xmigd import log
from xmigd.supervisor.fds import Fd

LISTEN_FDS_START = 3
RETRY_AFTER = 0.01
MAX_WAITING = 1 << 17  # messages; a manager that reads none for so long is not one to wait for

logger = log.get("systemd")


class ServiceManager:
    """The manager that started this process, if one did. Takes what it left in the environment, so that no server or
    program that is started from here mistakes it for its own."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        path = environment.pop("NOTIFY_SOCKET", "")
        watchdog_pid = environment.pop("WATCHDOG_PID", str(os.getpid()))
        watchdog_us = environment.pop("WATCHDOG_USEC", "0")
        self._address = ("\0" + path[1:]) if path.startswith("@") else path
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if path else None
        if self._sock is not None:
            self._sock.setblocking(False)
        ours = watchdog_pid == str(os.getpid()) and watchdog_us.isdecimal()
        self.watchdog = int(watchdog_us) / 1e6 if ours else 0.0  # seconds; 0: nobody watches
        self._kept = _passed(environment)
        self._waiting: deque[tuple[bytes, Sequence[Fd]]] = deque()
        self._retry: asyncio.TimerHandle | None = None
        self._ping: asyncio.TimerHandle | None = None

    @property
    def present(self) -> bool:
        return self._sock is not None

    def take_kept(self) -> list[tuple[str, Fd]]:
        """The descriptors that an earlier daemon left in the store, with their names, oldest first; once."""
        kept, self._kept = self._kept, []
        return kept

    # --- how the daemon is ------------------------------------------------------------------------------------------

    def ready(self, status: str) -> None:
        """Everything is bound: who asks now is answered. From now on the event loop keeps the watchdog quiet."""
        self._tell(f"READY=1\nSTATUS={status}")
        if self.watchdog and self._ping is None:
            self._keep_quiet()

    def reloading(self) -> None:
        """`ready` ends it."""
        self._tell(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, why: str) -> None:
        self._tell(f"STOPPING=1\nSTATUS={why}")

    def _keep_quiet(self) -> None:
        self._tell("WATCHDOG=1")
        self._ping = asyncio.get_running_loop().call_later(self.watchdog / 3, self._keep_quiet)

    # --- descriptors ------------------------------------------------------------------------------------------------

    def keep(self, name: str, fd: Fd) -> None:
        """Keep a copy of the descriptor. It comes back after a restart or a crash; not after a stop."""
        # Not polled: a descriptor of a GPU's memory may be readable, or in error, and still be good.
        self._tell(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", (fd,))

    def drop(self, name: str) -> None:
        self._tell(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def close(self) -> None:
        """Say what there is still to say, if the manager takes it at once."""
        self._flush()
        for timer in (self._retry, self._ping):
            if timer is not None:
                timer.cancel()
        self._retry = self._ping = None
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _tell(self, message: str, fds: Sequence[Fd] = ()) -> None:
        if self._sock is None:
            return
        if len(self._waiting) >= MAX_WAITING:
            logger.error("the service manager does not read", why="what it is told is given up")
            self._waiting.clear()
        self._waiting.append((message.encode(), fds))
        if len(self._waiting) == 1:
            self._flush()

    def _flush(self) -> None:
        """In order: a name is dropped and used again."""
        self._retry = None
        while self._waiting and self._sock is not None:
            message, fds = self._waiting[0]
            if not any(fd.closed for fd in fds):
                try:
                    numbers = array.array("i", [fd.fileno() for fd in fds])
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)] if fds else []
                    self._sock.sendmsg([message], rights, socket.MSG_DONTWAIT, self._address)
                except (BlockingIOError, InterruptedError):
                    self._try_again()
                    return
                except OSError as error:
                    logger.warning("the service manager cannot be told", why=error.strerror)
            self._waiting.popleft()

    def _try_again(self) -> None:
        with contextlib.suppress(RuntimeError):  # no loop runs any more
            self._retry = asyncio.get_running_loop().call_later(RETRY_AFTER, self._flush)


def _passed(environment: MutableMapping[str, str]) -> list[tuple[str, Fd]]:
    """The descriptors that the manager passed to this process (sd_listen_fds_with_names(3))."""
    pid = environment.pop("LISTEN_PID", "")
    count = environment.pop("LISTEN_FDS", "0")
    names = environment.pop("LISTEN_FDNAMES", "").split(":")
    if pid != str(os.getpid()) or not count.isdecimal():
        return []
    passed = []
    for index in range(int(count)):
        number = LISTEN_FDS_START + index
        os.set_inheritable(number, False)
        passed.append((names[index] if index < len(names) else "", Fd(number)))
    return passed
