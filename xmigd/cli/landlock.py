"""The devices' files, closed to a program and to everything that it starts (Landlock, Linux 5.13 and later): who
loads the genuine driver there finds no GPU. No privilege is needed; whoever has none gains none from programs either
(sudo)."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # of every architecture
VERSION_REQUESTED = 1
PATH_BENEATH = 1
WRITE_FILE, READ_FILE, MAKE_CHAR = 1 << 1, 1 << 2, 1 << 6
PR_SET_NO_NEW_PRIVS = 38
PREFIX = "nvidia"
LIBC = ctypes.CDLL(None, use_errno=True)


class _Ruleset(ctypes.Structure):
    _fields_ = (("handled_access_fs", ctypes.c_uint64),)


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def available() -> bool:
    return int(LIBC.syscall(CREATE_RULESET, None, 0, VERSION_REQUESTED)) > 0


def close_devices(dev: Path = Path("/dev")) -> None:
    """For this process and its children to come: the files of `dev` whose names begin with `nvidia` are neither read
    nor written, and no other way to a device is made. All else is as it was: a rule can only open, so everything
    there is now, but for these, is opened. Raises OSError."""
    rules = _Ruleset(WRITE_FILE | READ_FILE | MAKE_CHAR)
    ruleset = _checked(LIBC.syscall(CREATE_RULESET, ctypes.byref(rules), ctypes.sizeof(rules), 0))
    try:
        parents = set(dev.resolve().parents)
        for folder in (*parents, dev.resolve()):
            for entry in os.scandir(folder):
                path = Path(entry.path)
                hidden = folder == dev.resolve() and entry.name.startswith(PREFIX)
                # What a link leads to is opened where it is, or not: a link must not open one of the hidden, or all.
                if not (hidden or entry.is_symlink() or path in parents or path == dev.resolve()):
                    _open(ruleset, path)
        if os.geteuid() != 0:
            _checked(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        _checked(LIBC.syscall(RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)


def _open(ruleset: int, path: Path) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # it is gone, or a link to nowhere, or not ours to see
        return
    try:
        rule = _Beneath(WRITE_FILE | READ_FILE, fd)
        _checked(LIBC.syscall(ADD_RULE, ruleset, PATH_BENEATH, ctypes.byref(rule), 0))
    finally:
        os.close(fd)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(result)
