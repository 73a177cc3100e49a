"""The programs that `xmigctl run` has started, or that it has become: with them their jobs end.

A job may be more than its processes: a shell script that starts two programs, one after the other, or none. From the
moment at which its runner has exited, and no process of it lives, it is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable

from xmigd import log
from xmigd.ipc import exits
from xmigd.ipc import pidfd as pidfds
from xmigd.ipc.exits import End
from xmigd.ipc.fds import Fd

REAPED_WITHIN = 0.05  # seconds that a parent has to wait for its child, if only then its end can be read

Ended = Callable[[str, End, float], None]  # job, end, time of day
logger = log.get("runners")


class Runners:
    """`ended` is called once for each, at the latest when it is found gone. `tells`: this kernel tells everybody how a
    process ended."""

    def __init__(self, ended: Ended, *, tells: bool) -> None:
        self.tells = tells
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._watched: dict[str, tuple[Fd, int, int]] = {}

    def watch(self, job: str, pid: int, started: int) -> None:
        """`started`: with the pid, which process. One that is gone already has ended unseen."""
        if not pidfds.same_process(pid, started):
            self._ended(job, exits.UNKNOWN, time.time())
            return
        try:
            pidfd = Fd(os.pidfd_open(pid))
        except OSError as error:
            logger.warning("a job's end will not be seen", job=job[:12], pid=pid, why=error.strerror)
            return
        self._watched[job] = (pidfd, pid, started)
        self._loop.add_reader(pidfd.fileno(), self._exited, job)

    def close(self) -> None:
        for pidfd, _, _ in self._watched.values():
            self._loop.remove_reader(pidfd.fileno())
            pidfd.close()
        self._watched.clear()

    def _exited(self, job: str) -> None:
        pidfd, pid, started = self._watched.pop(job)
        self._loop.remove_reader(pidfd.fileno())
        at = time.time()
        status = exits.exit_status(pidfd, pid, started)
        if status is None and self.tells:
            self._loop.call_later(REAPED_WITHIN, self._look_again, job, pidfd, at)
            return
        pidfd.close()
        self._ended(job, exits.end_of(status), at)

    def _look_again(self, job: str, pidfd: Fd, at: float) -> None:
        with contextlib.closing(pidfd):
            status = exits.exit_status(pidfd, 0, 0)
        self._ended(job, exits.end_of(status), at)
