"""Processes as the daemon sees them: by pidfd, never by number alone, because numbers are used again."""

from __future__ import annotations

import contextlib
import os
import select
import signal

from xmigd.supervisor.fds import Fd


def has_exited(pidfd: Fd) -> bool:
    """A pidfd is readable from the moment its process has exited."""
    poll = select.poll()
    poll.register(pidfd.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def send_signal(pidfd: Fd, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd.fileno(), number)


def start_time(pid: int) -> int:
    """When the process was started, in clock ticks since boot: with the pid, its identity. 0: no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return 0
    return int(stat[stat.rindex(b")") + 2 :].split()[19])


def owner(pid: int) -> int | None:
    """The user of a process."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def same_process(pid: int, started: int) -> bool:
    return pid > 0 and started > 0 and start_time(pid) == started
