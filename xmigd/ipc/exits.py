"""With what a program has ended. Only its parent is informed; what others can learn depends on the kernel.

Until its parent has waited for it, /proc has it, and that may be microseconds. Afterwards a pidfd has it since Linux
6.15 (PIDFD_GET_INFO). Before 6.15 whoever is not the parent cannot be sure to learn it: what is not known is None.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from typing import NamedTuple

from xmigd.ipc import pidfd as pidfds
from xmigd.ipc.fds import Fd

# linux/pidfd.h: struct pidfd_info, version 0
_INFO = struct.Struct("<QQ11Ii")  # mask, cgroup, ids, exit_code
_BYTES = 64
_GET_INFO = 3 << 30 | _BYTES << 16 | 0xFF << 8 | 11  # _IOWR(0xFF, 11, struct pidfd_info)
_WANTS_EXIT = 1 << 3


class End(NamedTuple):
    """What its exit code was, or the signal that ended it."""

    code: int | None = None
    signal: int | None = None


UNKNOWN = End()


def end_of(status: int | None) -> End:
    """A wait status, as waitpid(2) has it."""
    if status is None:
        return UNKNOWN
    return End(code=os.WEXITSTATUS(status)) if os.WIFEXITED(status) else End(signal=os.WTERMSIG(status))


def exit_status(pidfd: Fd, pid: int, started: int) -> int | None:
    """The wait status of a process that has exited, as the kernel tells it now. `started`: with the pid, which one."""
    for _ in range(2):  # its parent may wait for it between the two
        for status in (_of_reaped(pidfd), _of_zombie(pid, started)):
            if status is not None:
                return status
    return None


def _of_reaped(pidfd: Fd) -> int | None:
    info = bytearray(_BYTES)
    _INFO.pack_into(info, 0, _WANTS_EXIT, *[0] * 13)
    try:
        fcntl.ioctl(pidfd.fileno(), _GET_INFO, info)
    except OSError:
        return None
    mask, *_, status = _INFO.unpack_from(info)
    return int(status) if mask & _WANTS_EXIT else None


def _of_zombie(pid: int, started: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    if fields[0] != b"Z" or int(fields[19]) != started:
        return None
    status = int(fields[49])
    # To whom the process does not belong the kernel may say 0 whatever it was.
    return status if status or pidfds.owner(pid) == os.geteuid() else None


def kernel_tells() -> bool:
    """Does this kernel tell how somebody else's child ended? Tried, for a process without threads."""
    child = os.fork()
    if child == 0:
        os._exit(7)
    with contextlib.closing(Fd(os.pidfd_open(child))) as pidfd:
        os.waitpid(child, 0)
        return end_of(_of_reaped(pidfd)) == End(code=7)
