"""Is there room for another checkpoint? Decided before its job stands still.

How much one will take is not known before its content was compressed and compared with what is there already. The
estimate is what a checkpoint of this job takes by experience: what the program has itself, and of its device memory as
much as the worst of the earlier checkpoints had to store that came after another one.
Nothing is removed to make room: what is there is whole, and what would replace it is not there yet.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from xmigd.checkpoints.manifest import Program
from xmigd.checkpoints.movable import processes_of
from xmigd.checkpoints.schemas import CheckpointInfo
from xmigd.errors import Conflict, NotFound
from xmigd.migrations.plan import Place, needed_bytes, size
from xmigd.supervisor.process import Process

MIB = 1 << 20


def check_devices(programs: Sequence[Program], chosen: Sequence[Sequence[str]], known: Iterable[Place]) -> None:
    """Does the content of each program fit onto the devices that it is to have? It is what it needs at least: memory
    that is all zeros is not in a checkpoint. Raises Conflict, which says what is missing."""
    needed: Counter[str] = Counter()
    for program, devices in zip(programs, chosen, strict=True):
        for memory in program.memory:
            if memory.kind == "shadow" and memory.ordinal < len(devices):
                needed[devices[memory.ordinal]] += memory.content.bytes
    free = {place.id: place.free_bytes for place in known}
    for device, bytes in needed.items():
        room = free.get(device)
        if room is not None and room < bytes:
            raise Conflict(
                f"{device} has room for {size(room)}, the checkpoint's content needs {size(bytes)}: "
                f"{size(bytes - room)} are missing", code="no_room",
                hint="make room there, or name a larger device with --device",
            )  # fmt: skip


class Room:
    def __init__(self, folder: Path, *, limit_mib: int, free_mib: int) -> None:
        """`folder`: of all checkpoints. `limit_mib`: its largest size; 0: none. `free_mib`: what has to stay free."""
        self._folder = folder
        self._limit = limit_mib * MIB
        self._free = free_mib * MIB

    def check(self, processes: Iterable[Process], root: int, earlier: Iterable[CheckpointInfo]) -> None:
        """Blocks. `root`: the pid of what is dumped. `earlier`: checkpoints of the job. Raises Conflict, which says
        what is missing."""
        device, program = sum(map(device_bytes, processes)), program_bytes(root)
        kept = program + int(device * min(likely_ratio(earlier), 1.0))
        if self._limit and (used := used_bytes(self._folder)) + kept > self._limit:
            raise Conflict(
                f"the folder of checkpoints has {size(used)}, and may have {size(self._limit)}; this one may take "
                f"{size(kept)}: {size(used + kept - self._limit)} are missing",
                code="checkpoints_full",
                hint="remove checkpoints that nobody needs (xmigctl checkpoint list), or raise checkpoint_mib",
            )
        # What CRIU writes is there beside the pieces that are made of it.
        needed = kept + program
        existing = next(path for path in (self._folder, *self._folder.parents) if path.exists())
        disk = os.statvfs(existing)
        free = disk.f_bavail * disk.f_frsize
        if needed + self._free > free:
            raise Conflict(
                f"{existing} has {size(free)} free, of which {size(self._free)} stay free; a checkpoint may take "
                f"{size(needed)}: {size(needed + self._free - free)} are missing",
                code="file_system_full", hint="make room, or remove checkpoints that nobody needs",
            )  # fmt: skip


def device_bytes(process: Process) -> int:
    """Live device memory; all that the program has if there is no snapshot that says what of it is live."""
    last = process.last_snapshot
    return last.live_bytes if last is not None else sum(needed_bytes(process))


def program_bytes(pid: int) -> int:
    """What CRIU will write of the program and all that descends from it, at most: their memory without mapped files."""
    total = 0
    with contextlib.suppress(NotFound):
        for each in processes_of(pid):
            with contextlib.suppress(OSError):
                total += _own_bytes(Path(f"/proc/{each}/status").read_text())
    return total


def _own_bytes(status: str) -> int:
    """Anonymous and shared memory, and what of it is swapped out."""
    fields = ("RssAnon:", "RssShmem:", "VmSwap:")
    lines = (line.split() for line in status.splitlines() if line.startswith(fields))
    return sum(int(words[1]) for words in lines) << 10


def likely_ratio(earlier: Iterable[CheckpointInfo]) -> float:
    """What of the device's content will be new on the disk, as of the job's checkpoints so far. Its first one had to
    store everything, so with that alone nothing is known, and nothing is refused for it: a job that only reads most of
    its memory stores little. One that runs out of room fails, and its job goes on."""
    known = sorted(earlier, key=lambda one: one.created_at)
    if not known:
        return 1.0
    return max((one.stored_bytes / one.content_bytes for one in known[1:] if one.content_bytes), default=0.0)


def used_bytes(folder: Path) -> int:
    """What its files take on the disk. One that vanishes meanwhile counts as nothing."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(Path(place, name), follow_symlinks=False).st_blocks * 512
    return total
