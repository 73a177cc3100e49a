"""The runtime directory belongs to one daemon at a time, by a lock that the kernel gives back when its owner dies.

It is the daemon's user's alone, and so is the way to it: whoever can put another directory or another socket in its
place is whom programs tell their jobs to, and whom callers give their tokens.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from xmigd.errors import AlreadyRunning, StartError
from xmigd.users import user_name

MOST_LINKS = 40  # as the kernel
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
HINT = "choose another one with XMIG_RUNTIME_DIR"


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
    """Make the directory and lock it. Raises StartError, also if others could put another in its place, or
    AlreadyRunning with the other's pid."""
    try:
        _check_way(runtime_dir)
        runtime_dir.mkdir(parents=True, exist_ok=True, mode=0o755)
        _check_way(runtime_dir)
        _check_own(runtime_dir)
        fd = os.open(lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise StartError(
            f"the runtime directory {runtime_dir} cannot be used: {error.strerror}",
            hint=HINT,
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


def _check_own(runtime_dir: Path) -> None:
    """Raises StartError: it is somebody else's, or others may write there."""
    found = runtime_dir.stat()
    if found.st_uid != os.geteuid():
        raise StartError(
            f"the runtime directory {runtime_dir} belongs to {user_name(found.st_uid)}, who could put other sockets in "
            f"the place of xmigd's", hint=f"chown it to {user_name(os.geteuid())}, or {HINT}",
        )  # fmt: skip
    if found.st_mode & WRITABLE_BY_OTHERS:
        raise StartError(
            f"others may write in the runtime directory {runtime_dir} (mode {stat.S_IMODE(found.st_mode):04o}), and "
            "could put other sockets in the place of xmigd's", hint=f"chmod go-w {runtime_dir}, or {HINT}",
        )  # fmt: skip


def _check_way(runtime_dir: Path) -> None:
    """Raises StartError: somebody else has a link on the way to it, or could put another directory in its place."""
    trusted = {
        0,
        os.geteuid(),
        os.stat("/").st_uid,
    }  # the last: root's, in a namespace of users that does not know them
    own = (runtime_dir.absolute(), Path(os.path.realpath(runtime_dir)))
    for path, found in _way(runtime_dir.absolute()):
        if stat.S_ISLNK(found.st_mode):
            if found.st_uid not in trusted:
                raise StartError(
                    f"the runtime directory {runtime_dir} is reached by {path}, a symbolic link of "
                    f"{user_name(found.st_uid)}", hint=f"remove the link, or {HINT}",
                )  # fmt: skip
        elif path not in own and found.st_uid not in trusted:
            raise StartError(
                f"the runtime directory {runtime_dir} is in {path}, which belongs to {user_name(found.st_uid)}, who "
                "could put another in its place", hint=HINT,
            )  # fmt: skip
        elif path not in own and found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            raise StartError(
                f"the runtime directory {runtime_dir} is in {path}, where everybody may put another in its place (mode "
                f"{stat.S_IMODE(found.st_mode):04o})", hint=f"chmod o-w {path} (or +t), or {HINT}",
            )  # fmt: skip


def _way(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Everything that exists on the way to `path`, the links themselves and what they lead to."""
    place, rest = Path("/"), list(path.parts[1:])
    yield place, place.stat()
    links = 0
    while rest:
        name = rest.pop(0)
        if name == "..":
            place = place.parent
            continue
        try:
            found = (place / name).lstat()
        except FileNotFoundError:
            return
        yield place / name, found
        if not stat.S_ISLNK(found.st_mode):
            place = place / name
            continue
        links += 1
        if links > MOST_LINKS:
            return
        target = Path(os.readlink(place / name))
        rest = list(target.parts[1:] if target.is_absolute() else target.parts) + rest
        if target.is_absolute():
            place = Path("/")
