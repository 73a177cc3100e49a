"""A program that was dumped and restored (CRIU): the memory that it shares with its server is another now."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Sequence

from xmigd.errors import Forbidden, NotFound
from xmigd.ipc.fds import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK, Fd
from xmigd.memory.handles import JobMemory

F_GET_SEALS = 1034
MAPPING = re.compile(r"^([0-9a-f]+-[0-9a-f]+) rw-s 0+ \S+ \d+ +/memfd:xmig-(journal|staging|pinned) \(deleted\)$")


def restored_memory(pid: int, before: JobMemory) -> JobMemory:
    """The memory that process `pid` has mapped in the place of `before`; the snapshots stay as they are.

    Raises NotFound, Forbidden.
    """
    sizes = [os.fstat(old.fileno()).st_size for old in before.shared]
    return JobMemory(*mapped_memory(pid, sizes), before.snapshot0, before.snapshot1, before.quota)


def mapped_memory(pid: int, sizes: Sequence[int]) -> tuple[Fd, Fd, Fd]:
    """The journal, the staging copy and the page-locked memory that process `pid` has mapped.

    The process is as hostile as any program: what it has mapped must have the size that it had, `sizes` in bytes, and
    its size must be sealed. Raises NotFound, Forbidden.
    """
    found: dict[str, Fd] = {}
    try:
        with open(f"/proc/{pid}/maps") as maps:
            for line in maps:
                match = MAPPING.match(line.rstrip("\n"))
                if match is not None and match[2] not in found:
                    found[match[2]] = Fd(os.open(f"/proc/{pid}/map_files/{match[1]}", os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        raise NotFound(f"there is no process {pid}") from None
    except PermissionError:
        raise Forbidden(f"the memory of process {pid} cannot be opened", hint="run xmigd as root") from None
    missing = {"journal", "staging", "pinned"} - found.keys()
    if missing:
        raise NotFound(f"process {pid} has not mapped the memory of a job: no {' and no '.join(sorted(missing))}")
    shared = (found["journal"], found["staging"], found["pinned"])
    for new, size in zip(shared, sizes, strict=True):
        if os.fstat(new.fileno()).st_size != size:
            raise Forbidden(f"the memory of process {pid} is not this one's: it has another size")
        _seal(new, pid)
    return shared


def _seal(memory: Fd, pid: int) -> None:
    wanted = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL
    if fcntl.fcntl(memory.fileno(), F_GET_SEALS) & wanted == wanted:
        return
    try:
        fcntl.fcntl(memory.fileno(), F_ADD_SEALS, wanted)
    except OSError:
        raise Forbidden(f"the size of the memory of process {pid} cannot be sealed") from None
