"""CRIU opens by name what a program had open, with root's rights, and removes and makes names of sockets. Whoever may
rename something on the way to such a name could have another file opened: one that only root may open, say.

So each name has to lead where it led, and what was opened is looked at before the program runs: the kernel knows it by
the name where it really is. An image of CRIU's (images/fdinfo.proto, regfile.proto, sk-unix.proto) has all names.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from xmigd.checkpoints import proc
from xmigd.checkpoints.fields import BYTES, fields
from xmigd.checkpoints.own_files import IMAGE, NAME, REG, entries
from xmigd.errors import Conflict
from xmigd.text import harmless

UNIX_SOCKET, SOCKET_NAME = 16, 11  # fields of file_entry, and of unix_sk_entry in it
DELETED = b" (deleted)"


def check_name(path: str | bytes) -> None:
    """Does it lead nowhere else? Blocks. Raises Conflict."""
    name = os.fsencode(path)
    if os.path.realpath(name) != name:
        raise _elsewhere(name)


def check_names(folder: Path) -> set[bytes]:
    """Those of files in the images in this folder, which lead nowhere else now. Nor do those of sockets. Blocks. Raises
    Conflict, Damaged, OSError."""
    files: set[bytes] = set()
    for entry in entries((folder / IMAGE).read_bytes()):
        for number, kind, _, content in fields(entry):
            if (number, kind) == (REG, BYTES):
                files |= {name for name in _named(content, NAME) if name.startswith(b"/")}
            elif (number, kind) == (UNIX_SOCKET, BYTES):
                for name in _named(content, SOCKET_NAME):
                    if name.startswith(b"/"):
                        check_name(os.path.dirname(name))
    for name in files:
        check_name(name)
    return files


def check_opened(pids: Iterable[int], names: set[bytes], owners: Mapping[str, int | None], uid: int) -> None:
    """Have these stopped processes anything open or mapped that is not called so, or that somebody else has put in the
    place of a file of this user's? `owners`: that files had. Blocks. Raises Conflict."""
    for pid in pids:
        for name, link in _links(pid):
            with contextlib.suppress(*proc.GONE):
                status = os.stat(link)
                if stat.S_ISCHR(status.st_mode) or _is_deleted(name, status):
                    continue
                if name not in names:
                    raise _elsewhere(name)
                if owners.get(os.fsdecode(name)) == uid != status.st_uid:
                    raise Conflict(f"{harmless(os.fsdecode(name))} belongs to another user than it did",
                                   code="file_changed", hint="put the file back as it was")  # fmt: skip


def _links(pid: int) -> Iterator[tuple[bytes, str]]:
    """What a process has of files: their names, and where to look at them."""
    with contextlib.suppress(*proc.GONE):
        links = [f"/proc/{pid}/{name}" for name in ("cwd", "exe")]
        links += [
            f"/proc/{pid}/{kind}/{name}" for kind in ("fd", "map_files") for name in os.listdir(f"/proc/{pid}/{kind}")
        ]
        for link in links:
            with contextlib.suppress(*proc.GONE):
                name = os.readlink(os.fsencode(link))
                if name.startswith(b"/"):
                    yield name, link


def _is_deleted(name: bytes, status: os.stat_result) -> bool:
    """Then it came from an image, and not from a name. A name may really end like that."""
    return status.st_nlink == 0 or (name.endswith(DELETED) and not proc.is_there(os.fsdecode(name), status))


def _named(message: bytes, field: int) -> list[bytes]:
    return [text.rstrip(b"\0") for number, kind, _, text in fields(message) if (number, kind) == (field, BYTES)]


def _elsewhere(name: bytes) -> Conflict:
    return Conflict(
        f"{harmless(os.fsdecode(name))} is not what the program had open: a link on the way leads elsewhere",
        code="file_changed", hint="put the files and folders back as they were",
    )  # fmt: skip
