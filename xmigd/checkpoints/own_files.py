"""Files of its own for what is restored beside the job, or several times: two programs that write to one file would
overwrite each other's output, and CRIU wants a file to be as long as it was.

A copy lies beside the file, because CRIU looks for it in the same mount. It has as much of the file as there was when
the program was written down. CRIU's list of files (images/fdinfo.proto, images/regfile.proto) gets its name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

from xmigd.checkpoints.fields import BYTES, fields, varint
from xmigd.checkpoints.manifest import OpenFile
from xmigd.errors import Conflict
from xmigd.store.objects import Damaged

IMAGE = "files.img"
MAGIC_BYTES, SIZE = 8, struct.Struct("<I")
REG, NAME = 3, 6  # fields of file_entry, and of reg_file_entry in it
PATIENCE = 600.0  # seconds for a copy
KILLED = 128 + signal.SIGKILL  # by timeout(1), or by anybody


def names_of(files: Iterable[OpenFile], suffix: str) -> dict[str, str]:
    """Of those that the program writes to: what the copies are called."""
    return {file.path: f"{file.path}.{suffix}" for file in files if file.writable}


def copy_files(files: Iterable[OpenFile], suffix: str, *, uid: int, gid: int, lock: IO[bytes]) -> dict[str, str]:
    """Returns `names_of`. With the rights of the program's user, who may have put something else there meanwhile.
    `lock`: an open file of ours; as long as anything is copied, also when this daemon has ended, its lock is held.
    Blocks. Raises Conflict."""
    files = list(files)
    names, made = names_of(files, suffix), dict[str, str]()
    rights = [] if os.geteuid() == uid else ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups"]
    script = """set -eC; : > "$2"; trap 'rm -f -- "$2"' EXIT; cp --preserve=mode --reflink=auto -- "$1" "$2"
        [ "$(stat --format=%s -- "$2")" -ge "$3" ] || { echo "it is shorter than it was" >&2; exit 1; }
        truncate --size="$3" -- "$2"
        trap - EXIT"""
    # The outer one has the lock, and is ours: the user can neither take it over nor keep it for longer.
    holding = ["sh", "-c", '"$@" </dev/null; exit "$?"', "sh", "timeout", "--signal=KILL", f"{PATIENCE:g}", *rights]
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        for file in files:
            if (copy := names.get(file.path)) is None:
                continue
            try:  # its user may have made a process that keeps the output open
                done = subprocess.run(
                    [*holding, "sh", "-c", script, "sh", file.path, copy, str(file.bytes)], stdin=lock,
                    capture_output=True, text=True, errors="replace", check=False, timeout=PATIENCE + 10,
                    env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                made[file.path] = copy  # as far as it came
                raise Conflict(f"{file.path} cannot be copied: it takes too long", code="file_not_copied") from None
            if done.returncode != 0:
                if done.returncode == KILLED:
                    made[file.path] = copy  # as far as it came
                why = done.stderr.strip().splitlines()[-1:] or [f"cp ended with {done.returncode}"]
                raise Conflict(f"{file.path} cannot be copied: {why[0]}", code="file_not_copied",
                               hint="its folder must be writable for the program's user")  # fmt: skip
            made[file.path] = copy
    except BaseException:
        remove(made)
        raise
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)
    return made


def remove(made: Mapping[str, str]) -> None:
    """The copies that there are. Blocks."""
    for copy in made.values():
        with contextlib.suppress(OSError):
            os.unlink(copy)


def use(folder: Path, names: Mapping[str, str]) -> None:
    """In the images in this folder: the program has these files open instead. Blocks. Raises Damaged, OSError."""
    path = folder / IMAGE
    path.write_bytes(renamed(path.read_bytes(), {old.encode(): new.encode() for old, new in names.items()}))


def renamed(image: bytes, names: Mapping[bytes, bytes]) -> bytes:
    """Raises Damaged: it is no such image."""
    changed = bytearray(image[:MAGIC_BYTES])
    for entry in entries(image):
        entry = _renamed(entry, names)
        changed += SIZE.pack(len(entry)) + entry
    return bytes(changed)


def entries(image: bytes) -> Iterator[bytes]:
    """Of each file. Raises Damaged: it is no such image."""
    at = MAGIC_BYTES
    while at < len(image):
        if at + SIZE.size > len(image):
            raise Damaged("CRIU's list of files is truncated")
        (size,) = SIZE.unpack_from(image, at)
        at += SIZE.size
        yield image[at : at + size]
        at += size


def _renamed(entry: bytes, names: Mapping[bytes, bytes]) -> bytes:
    found = bytearray()
    for number, kind, raw, content in fields(entry):
        if (number, kind) == (REG, BYTES):
            file = b"".join(
                _text(NAME, names.get(text, text)) if (name, of) == (NAME, BYTES) else part
                for name, of, part, text in fields(content)
            )
            found += _text(REG, file)
        else:
            found += raw
    return bytes(found)


def _text(number: int, content: bytes) -> bytes:
    return varint(number << 3 | BYTES) + varint(len(content)) + content
