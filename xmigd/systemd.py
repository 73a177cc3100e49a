"""The service manager, where there is one: it is informed how the daemon is, and keeps descriptors for the next one.

Everything here is a datagram to $NOTIFY_SOCKET (sd_notify(3)). Without one nothing is sent, and nothing else changes.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, MutableMapping, Sequence

from xmigd.ipc.fds import Fd
from xmigd.ipc.outbox import Outbox

LISTEN_FDS_START = 3


class ServiceManager:
    """The manager that started this process, if one did. Takes what it left in the environment, so that no server or
    program that is started from here mistakes it for its own."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        path = environment.pop("NOTIFY_SOCKET", "")
        watchdog_pid = environment.pop("WATCHDOG_PID", str(os.getpid()))
        watchdog_us = environment.pop("WATCHDOG_USEC", "0")
        self._outbox: Outbox | None = None
        if path:
            address = ("\0" + path[1:]) if path.startswith("@") else path
            self._outbox = Outbox(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM), address, "the service manager")
        ours = watchdog_pid == str(os.getpid()) and watchdog_us.isdecimal()
        self.watchdog = int(watchdog_us) / 1e6 if ours else 0.0  # seconds; 0: nobody watches
        self._kept = _passed(environment)
        self._ping: asyncio.TimerHandle | None = None

    @property
    def present(self) -> bool:
        return self._outbox is not None

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

    def keep(self, name: str, fd: Fd, process: str = "") -> None:
        """Keep a copy of the descriptor, whosever it is. It comes back after a restart or a crash; not after a stop."""
        # Not polled: a descriptor of a GPU's memory may be readable, or in error, and still be good.
        self._tell(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", (fd,))

    def drop(self, name: str) -> None:
        self._tell(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def watch(self, process: str, pidfd: Fd) -> None:
        """The manager keeps what it has until the daemon or an operator says otherwise."""

    def when_reported(self, then: Callable[[], None]) -> None:
        """`then`, once everything of before is with the manager."""
        if self._outbox is not None:
            self._outbox.when_empty(then)

    def when_renewed(self, then: Callable[[], None]) -> None:
        """The manager is never another one."""

    def close(self) -> None:
        """Say what there is still to say, if the manager takes it at once."""
        if self._ping is not None:
            self._ping.cancel()
            self._ping = None
        outbox, self._outbox = self._outbox, None
        if outbox is not None:
            outbox.close()

    def _tell(self, message: str, fds: Sequence[Fd] = ()) -> None:
        if self._outbox is not None:
            self._outbox.send(message, fds)


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
