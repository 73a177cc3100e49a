"""File descriptors with an owner."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
SYS_KCMP, KCMP_FILE = 312, 0  # of x86-64; Python does not know the call
F_ADD_SEALS = 1033
KEEP_SIZE, PUNCH_HOLE = 1, 2  # FALLOC_FL_*
TABLE = 16384  # descriptors for which the kernel makes room at once
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW = 1, 2, 4

_freeing = ThreadPoolExecutor(1, thread_name_prefix="freeing")


class Fd:
    """A file descriptor that is closed once: by `close`, or with its last reference."""

    __slots__ = ("__weakref__", "_number")

    def __init__(self, number: int) -> None:
        self._number = number

    def fileno(self) -> int:
        if self._number < 0:
            raise ValueError("the descriptor is closed")
        return self._number

    @property
    def closed(self) -> bool:
        return self._number < 0

    def close(self) -> None:
        number, self._number = self._number, -1
        if number >= 0:
            with contextlib.suppress(OSError):
                os.close(number)

    def __del__(self) -> None:
        self.close()


def same_file(a: int, b: int) -> bool:
    """Do both mean the same open file, as after dup() or a passage through a socket?"""
    pid = os.getpid()
    answer: int = LIBC.syscall(SYS_KCMP, pid, pid, KCMP_FILE, a, b)
    if answer >= 0:
        return answer == 0
    # A kernel or a sandbox without kcmp(2). The service manager looks at the same, then.
    first, second = os.fstat(a), os.fstat(b)
    return os.path.samestat(first, second) and not stat.S_ISCHR(first.st_mode)


def close_all(fds: Iterable[Fd]) -> None:
    for fd in fds:
        fd.close()


def free(fds: Iterable[Fd]) -> None:
    """Close descriptors of memory, beside the caller: to take the memory back, once nobody has it, takes the kernel a
    millisecond for each 64 MiB of huge pages, and ten of small ones."""
    _freeing.submit(close_all, list(fds))


def sealed_memory(name: str, size: int) -> Fd:
    """A memfd whose size nobody changes. Raises OSError."""
    fd = Fd(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    os.ftruncate(fd.fileno(), size)
    fcntl.fcntl(fd.fileno(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
    return fd


def read_only(fd: Fd) -> Fd:
    """Another descriptor of the same memory, through which nobody writes. Raises OSError."""
    return Fd(os.open(f"/proc/self/fd/{fd.fileno()}", os.O_RDONLY | os.O_CLOEXEC))


def write_all(fd: int, content: bytes | bytearray | memoryview, at: int) -> None:
    """All of it, from there on, however many calls that takes. Raises OSError."""
    view = memoryview(content)
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written


def punch(fd: int, at: int, size: int) -> None:
    """Give the memory of a part of a file back; it is zero then. A file system that cannot do that retains it."""
    LIBC.fallocate(fd, PUNCH_HOLE | KEEP_SIZE, ctypes.c_long(at), ctypes.c_long(size))


def raise_descriptor_limit() -> int:
    """As many descriptors as this process may have; returns how many. Every granule of device memory is one.

    The kernel's table of them grows now: later, with more threads, it would wait for all processors, 10 ms each time.
    """
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < hard or hard == resource.RLIM_INFINITY:
        wanted = 1 << 20 if hard == resource.RLIM_INFINITY else hard
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            limit = wanted
    with Path(os.devnull).open("rb") as some, contextlib.suppress(OSError):
        os.close(fcntl.fcntl(some, fcntl.F_DUPFD_CLOEXEC, min(limit, TABLE) - 1))
    return limit
