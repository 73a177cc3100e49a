"""The runtime directory belongs to one daemon at a time, by a lock that the kernel gives back when its owner dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from xmigd.errors import AlreadyRunning, StartError


class Lock:
    """Held as long as this object lives, or until `release`."""

    def __init__(self, fd: int, path: Path) -> None:
        self._fd = fd
        self.path = path

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def prepare(runtime_dir: Path, lock_file: Path) -> Lock:
    """Make the directory and lock it. Raises StartError, or AlreadyRunning with the other's pid."""
    try:
        runtime_dir.mkdir(parents=True, exist_ok=True, mode=0o755)
        fd = os.open(lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise StartError(
            f"the runtime directory {runtime_dir} cannot be used: {error.strerror}",
            hint="choose another one with XMIG_RUNTIME_DIR",
        ) from None
    if os.fstat(fd).st_uid != os.geteuid():
        os.close(fd)
        raise StartError(f"{lock_file} belongs to another user", hint="choose another directory with XMIG_RUNTIME_DIR")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        other = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise AlreadyRunning(
            f"another xmigd (pid {other}) runs in {runtime_dir}",
            hint="stop it, or choose another directory with XMIG_RUNTIME_DIR",
        ) from None
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:  # a full /run: the pid is for people only, but the sockets would fail as well
        os.close(fd)
        raise StartError(
            f"the runtime directory {runtime_dir} cannot be written: {error.strerror}", hint="make room there"
        ) from None
    return Lock(fd, lock_file)
