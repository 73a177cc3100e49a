"""What a program needs of the node to which it moves, read from the program, and whether this node has it.

The other node's daemon reads it before anything is sent. It is a courtesy, for an early refusal: what arrives is
checked again, and CRIU checks what it restores.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from xmigd import __version__
from xmigd.checkpoints import live
from xmigd.checkpoints.apart import namespaces_of, root_in
from xmigd.checkpoints.manifest import Count, Strict, Text
from xmigd.checkpoints.movable import processes_of
from xmigd.checkpoints.room import program_bytes
from xmigd.host_memory import RESERVE, available_memory
from xmigd.migrations.plan import Place, needed_bytes, size
from xmigd.native import Layout
from xmigd.process.migration_events import Reason
from xmigd.supervisor.process import Process
from xmigd.text import harmless

MOST_FILES = 4096
# Of x86; what else /proc/cpuinfo lists is not used by programs, or is the kernel's own.
INSTRUCTIONS = ("avx", "sse", "ssse", "fma", "bmi", "amx", "sha", "xsave", "vaes", "movdir")
MORE_INSTRUCTIONS = frozenset(
    ("abm", "adx", "aes", "cx16", "f16c", "fsgsbase", "gfni", "movbe", "pclmulqdq", "popcnt", "rdpid", "rdrand",
     "rdseed", "vpclmulqdq")
)  # fmt: skip

Pid = Annotated[int, Field(gt=0, lt=1 << 31)]


class File(Strict):
    """`bytes`: of one that is mapped or only read; another node has to have the same."""

    path: Text
    bytes: Count | None


class DeviceNeed(Strict):
    kind: Literal["cpu", "null", "cuda"]
    bytes: Count


class Needs(Strict):
    xmig_version: Text
    layout: Count
    job_name: Annotated[str, Field(max_length=255)]
    command: Text
    uid: Annotated[int, Field(ge=0, lt=1 << 32)]
    source: Annotated[str, Field(max_length=64)]  # its device, by its node's name
    pids: Annotated[tuple[Pid, ...], Field(max_length=1024)]  # that have to be free; in a namespace of its own: none
    devices: Annotated[tuple[DeviceNeed, ...], Field(min_length=1, max_length=8)]
    live_bytes: Count
    program_bytes: Count
    instructions: Annotated[tuple[Annotated[str, Field(max_length=40)], ...], Field(max_length=1024)]
    files: Annotated[tuple[File, ...], Field(max_length=MOST_FILES)]


def needs_of(process: Process, layout: Layout) -> Needs:
    """Blocks. Raises NotFound: it has ended; Conflict: a file's name cannot be sent."""
    root = root_in(process.row.pid)
    pids = processes_of(root)
    files = {file.path: File(path=file.path, bytes=None if file.writable else file.bytes)
             for file in live.open_files(pids)}  # fmt: skip
    for path in _mapped(pids):
        with contextlib.suppress(OSError):
            files.setdefault(path, File(path=path, bytes=os.stat(path).st_size))
    needed = needed_bytes(process)
    kind = process.row.device.partition(":")[0]
    last = process.last_snapshot
    return Needs(
        xmig_version=__version__, layout=layout.layout_version, job_name=process.job.name, command=process.row.command,
        uid=process.row.uid, source=process.row.device, pids=() if namespaces_of(root) else tuple(pids),
        devices=tuple(DeviceNeed(kind=kind, bytes=count) for count in needed),  # type: ignore[arg-type]
        live_bytes=sum(needed) if last is None else last.live_bytes, program_bytes=program_bytes(root),
        instructions=tuple(sorted(instructions())), files=tuple(files[path] for path in sorted(files)[:MOST_FILES]),
    )  # fmt: skip


def general(needs: Needs, layout: Layout, *, running: Iterable[str] = ()) -> list[Reason]:
    """What prevents it on this node, whatever device is chosen. Blocks."""
    reasons = []
    if (needs.xmig_version, needs.layout) != (__version__, layout.layout_version):
        reasons.append(
            Reason("other_version", f"this node has xMIG {__version__}, layout {layout.layout_version}; the program "
                                    f"has {harmless(needs.xmig_version, 40)}, layout {needs.layout}")
        )  # fmt: skip
    if taken := [pid for pid in needs.pids if Path(f"/proc/{pid}").exists()]:
        reasons.append(Reason("pid_in_use", f"another process of this node has the pid {taken[0]}, which it needs"))
    if missing := sorted(set(needs.instructions) - instructions()):
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        named = ", ".join(harmless(name, 40) for name in missing[:5])
        reasons.append(Reason("other_cpu", f"the CPU of this node lacks {named}{more}"))
    different = [why for file in needs.files if (why := _different(file))]
    if different:
        more = f"; and {len(different) - 1} more" if len(different) > 1 else ""
        reasons.append(Reason("file_missing", f"{different[0]}{more}"))
    needed, room = needs.live_bytes + needs.program_bytes, available_memory()
    if room - RESERVE < needed:
        text = f"this node has {size(room)} of memory available, the program needs {size(needed)}"
        reasons.append(Reason("pool_too_small", text))
    return reasons


def judge(needs: Needs, devices: Sequence[str], known: dict[str, Place]) -> list[Reason]:
    """What prevents it on these devices."""
    if len(devices) != len(needs.devices):
        text = f"the program has {len(needs.devices)} device(s), {len(devices)} are named"
        return [Reason("wrong_number", text)]
    reasons = []
    for name, need in zip(devices, needs.devices, strict=True):
        place = known.get(name)
        if place is None or not place.configured:
            reasons.append(Reason("no_such_device", f"this node has no device {harmless(name, 64)}"))
            continue
        if name.partition(":")[0] != need.kind:
            reasons.append(Reason("other_kind", f"the program uses a {need.kind} device; {name} is of another kind"))
        if place.cordoned:
            reasons.append(Reason("cordoned", f"{name} is cordoned"))
        if not place.healthy:
            reasons.append(Reason("failing", f"{name} cannot be trusted: {place.why}"))
        if place.free_bytes is not None and place.free_bytes < need.bytes:
            text = f"{name} has room for {size(place.free_bytes)}, the program needs {size(need.bytes)}"
            reasons.append(Reason("no_room", text))
    return reasons


def instructions() -> set[str]:
    """That this CPU has, as far as programs choose by them."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "flags":
                return {f for f in value.split() if f.startswith(INSTRUCTIONS) or f in MORE_INSTRUCTIONS}
            if name.strip() == "Features":
                return set(value.split())
    return set()


def _mapped(pids: Iterable[int]) -> set[str]:
    """Files that are mapped, by their paths."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape").splitlines():
                path = line[73:]
                if path.startswith("/") and not path.startswith(("/memfd:", "/dev/", "/SYSV")) and path.isascii():
                    found.add(path)
    return {path for path in found if not path.endswith(" (deleted)")}


def _different(file: File) -> str:
    try:
        found = os.stat(file.path).st_size
    except (OSError, ValueError) as error:
        return f"{harmless(file.path, 200)}: {getattr(error, 'strerror', None) or 'no such path'}"
    if file.bytes is not None and found != file.bytes:
        return f"{harmless(file.path, 200)} has {found} bytes here, and {file.bytes} where the program is"
    return ""
