"""Processes as the daemon sees them: by pidfd, never by number alone, because numbers are used again."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from pathlib import Path

from xmigd.ipc.fds import Fd

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PF_EXITING = 0x4  # of a task's flags, proc(5)


def has_exited(pidfd: Fd) -> bool:
    """A pidfd is readable from the moment its process has exited."""
    poll = select.poll()
    poll.register(pidfd.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def is_exiting(pid: int) -> bool:
    """Is the process on its way out, or gone? True from before the moment at which its files are closed: who sees a
    connection end can tell whether it ended with its process, which may take long over the rest of its exit."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return True
    return _exits(stat)


def _exits(stat: bytes) -> bool:
    """Of a task, by its stat."""
    return bool(int(stat[stat.rindex(b")") + 2 :].split()[6]) & PF_EXITING)


def runs_no_more(pid: int) -> bool:
    """Likewise, of each of its threads: none of its own code runs any more. What the kernel still does at its end, as
    giving a device back, may take long."""
    folder, threads = Path(f"/proc/{pid}/task"), list[str]()
    with contextlib.suppress(OSError):  # it has gone
        threads = os.listdir(folder)
    for thread in threads:
        with contextlib.suppress(OSError):
            if not _exits((folder / thread / "stat").read_bytes()):
                return False
    return True


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
    return started(stat)


def started(stat: bytes) -> int:
    """The same, by what the kernel has shown of the process. Raises ValueError: that is nothing of a process."""
    return int(stat[stat.rindex(b")") + 2 :].split()[19])


def boot_id() -> bytes:
    """Of the machine, since its start: pids and start times of before mean other processes."""
    return BOOT_ID.read_bytes().strip()


def owner(pid: int) -> int | None:
    """The effective user of a process. Not the owner of its folder in /proc: that is root once a program has dropped
    from root to another user, proc(5)."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            status = file.read()
    except OSError:
        return None
    return int(status.partition(b"\nUid:")[2].split(maxsplit=2)[1])


def program(pid: int) -> str:
    """What the process runs, by the kernel's short name; empty: no such process, or one that has ended already and that
    nobody has waited for."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return ""
    name, state = stat[stat.index(b"(") + 1 : stat.rindex(b")")], stat[stat.rindex(b")") + 2 :][:1]
    return "" if state in b"ZX" else name.decode(errors="replace")


def same_process(pid: int, started: int) -> bool:
    return pid > 0 and started > 0 and start_time(pid) == started
