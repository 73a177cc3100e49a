"""What a job's programs need of the node to which they move, read from them, and whether this node has it.

The other node's daemon reads it before anything is sent. It is a courtesy, for an early refusal: what arrives is
checked again, and CRIU checks what it restores.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from xmigd import __version__
from xmigd.checkpoints import live
from xmigd.checkpoints.apart import missing_mounts, mounts_of, namespaces_of
from xmigd.checkpoints.manifest import MOST_MOUNTS, Count, Strict, Text
from xmigd.checkpoints.movable import processes_of
from xmigd.checkpoints.room import program_bytes
from xmigd.checkpoints.sockets import inet_sockets
from xmigd.devices.names import together
from xmigd.errors import Conflict
from xmigd.host_memory import RESERVE, available_memory
from xmigd.migrations.plan import Place, needed_bytes, size
from xmigd.native import Layout
from xmigd.process.migration_events import Reason
from xmigd.records import Priority
from xmigd.supervisor.process import Process
from xmigd.text import harmless

MOST_FILES = 4096
MOST_PROGRAMS = 256
# Of x86; what else /proc/cpuinfo lists is not used by programs, or is the kernel's own.
INSTRUCTIONS = ("avx", "sse", "ssse", "fma", "bmi", "amx", "sha", "xsave", "vaes", "movdir")
MORE_INSTRUCTIONS = frozenset(
    ("abm", "adx", "aes", "cx16", "f16c", "fsgsbase", "gfni", "movbe", "pclmulqdq", "popcnt", "rdpid", "rdrand",
     "rdseed", "vpclmulqdq")
)  # fmt: skip

MOST_ADDRESSES = 256

Address = Annotated[str, Field(max_length=64)]
Pid = Annotated[int, Field(gt=0, lt=1 << 31)]


class File(Strict):
    """`bytes`: of one that is mapped or only read; another node has to have the same."""

    path: Text
    bytes: Count | None


class DeviceNeed(Strict):
    kind: Literal["cpu", "null", "cuda"]
    bytes: Count


class ProgramNeed(Strict):
    """One of those that have devices. The others only have files, and pids."""

    device: Annotated[str, Field(max_length=64)]  # that it has, by its node's name
    devices: Annotated[tuple[DeviceNeed, ...], Field(min_length=1, max_length=8)]


class Needs(Strict):
    xmig_version: Text
    layout: Count
    job: Annotated[str, Field(max_length=64)]
    job_name: Annotated[str, Field(max_length=255)]
    priority: Priority
    command: Text
    uid: Annotated[int, Field(ge=0, lt=1 << 32)]
    pids: Annotated[tuple[Pid, ...], Field(max_length=1024)]  # that have to be free; in a namespace of its own: none
    programs: Annotated[tuple[ProgramNeed, ...], Field(min_length=1, max_length=MOST_PROGRAMS)]
    asleep: bool = False  # all are suspended, and stay so
    live_bytes: Count
    program_bytes: Count
    instructions: Annotated[tuple[Annotated[str, Field(max_length=40)], ...], Field(max_length=1024)]
    files: Annotated[tuple[File, ...], Field(max_length=MOST_FILES)]
    mounts: Annotated[tuple[Text, ...], Field(max_length=MOST_MOUNTS)] = ()  # of the machine's, in a namespace
    addresses: Annotated[tuple[Address, ...], Field(max_length=MOST_ADDRESSES)] = ()  # of sockets, by the machine

    @property
    def source(self) -> str:
        """Their devices."""
        return together(one.device for one in self.programs)[:64]


def needs_of(processes: Sequence[Process], root: int, layout: Layout) -> Needs:
    """`root`: from which all descend. Blocks. Raises NotFound: it has ended; Conflict: a file's name cannot be sent,
    or there are too many processes."""
    if len(processes) > MOST_PROGRAMS:
        raise Conflict(f"the job has {len(processes)} processes; at most {MOST_PROGRAMS} can be moved at once",
                       code="too_many_processes")  # fmt: skip
    pids = processes_of(root)
    files = {file.path: File(path=file.path, bytes=None if file.writable else file.bytes)
             for file in live.open_files(pids)}  # fmt: skip
    for path in _mapped(pids):
        with contextlib.suppress(OSError):
            files.setdefault(path, File(path=path, bytes=os.stat(path).st_size))
    job, first = processes[0].job, processes[0].row
    needed = [needed_bytes(one) for one in processes]
    lasts = [one.last_snapshot for one in processes]
    return Needs(
        xmig_version=__version__, layout=layout.layout_version, job=job.id, job_name=job.name,
        priority=job.priority, command=first.command, uid=first.uid, pids=() if namespaces_of(root) else tuple(pids),
        programs=tuple(_needs_of_one(one, its) for one, its in zip(processes, needed, strict=True)),
        asleep=processes[0].state == "suspended",
        live_bytes=sum(sum(its) if last is None else last.live_bytes for its, last in zip(needed, lasts, strict=True)),
        program_bytes=program_bytes(root),
        instructions=tuple(sorted(instructions())), files=tuple(files[path] for path in sorted(files)[:MOST_FILES]),
        mounts=mounts_of(root), addresses=() if "net" in namespaces_of(root) else _addresses(root, pids),
    )  # fmt: skip


def _needs_of_one(process: Process, needed: Sequence[int]) -> ProgramNeed:
    kind = process.row.device.partition(":")[0]
    devices = tuple(DeviceNeed(kind=kind, bytes=count) for count in needed)  # type: ignore[arg-type]
    return ProgramNeed(device=process.row.device, devices=devices)


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
    if without := missing_mounts(needs.mounts):
        more = f" and {len(without) - 1} more" if len(without) > 1 else ""
        named = harmless(without[0], 200)
        reasons.append(Reason("mount_missing", f"nothing is mounted at {named}{more} on this node"))
    if foreign := [address for address in needs.addresses if not _has_address(address)]:
        text = f"this node has no address {harmless(foreign[0], 64)}, at which the program has a socket"
        reasons.append(Reason("address_missing", text))
    needed, room = needs.live_bytes + needs.program_bytes, available_memory()
    if room - RESERVE < needed:
        text = f"this node has {size(room)} of memory available, the program needs {size(needed)}"
        reasons.append(Reason("pool_too_small", text))
    return reasons


def judge(
    need: ProgramNeed, devices: Sequence[str], known: dict[str, Place], taken: Mapping[str, int] | None = None
) -> list[Reason]:  # fmt: skip
    """What prevents this program on these devices. `taken`: bytes, by those that it comes with."""
    if len(devices) != len(need.devices):
        text = f"the program has {len(need.devices)} device(s), {len(devices)} are named"
        return [Reason("wrong_number", text)]
    if len(set(devices)) != len(devices):
        return [Reason("wrong_number", "a device is named twice for one program")]
    reasons = []
    for name, one in zip(devices, need.devices, strict=True):
        place = known.get(name)
        if place is None or not place.configured:
            reasons.append(Reason("no_such_device", f"this node has no device {harmless(name, 64)}"))
            continue
        if name.partition(":")[0] != one.kind:
            reasons.append(Reason("other_kind", f"the program uses a {one.kind} device; {name} is of another kind"))
        if place.cordoned:
            reasons.append(Reason("cordoned", f"{name} is cordoned"))
        if not place.healthy:
            reasons.append(Reason("failing", f"{name} cannot be trusted: {place.why}"))
        room = None if place.free_bytes is None else max(0, place.free_bytes - (taken or {}).get(name, 0))
        if room is not None and room < one.bytes:
            text = f"{name} has room for {size(room)}, the program needs {size(one.bytes)}"
            reasons.append(Reason("no_room", text))
    return reasons


def judge_all(needs: Needs, places: Sequence[Sequence[str]], known: dict[str, Place]) -> list[list[Reason]]:
    """What prevents each of the programs on its devices, all at once. There may be fewer places than programs."""
    taken: Counter[str] = Counter()
    found = []
    for need, devices in zip(needs.programs, places, strict=False):
        found.append(judge(need, devices, known, taken))
        taken.update({name: one.bytes for name, one in zip(devices, need.devices, strict=False)})
    return found


def choose(needs: Needs, known: dict[str, Place]) -> list[list[str]]:
    """Devices for each of the programs: those that the fewest of them have, and of these the one with the most room.
    Fewer than there are programs: there is none for the next one."""
    taken: Counter[str] = Counter()
    users: Counter[str] = Counter()
    chosen: list[list[str]] = []

    def rank(name: str) -> tuple[int, int]:
        return users[name], taken[name] - (known[name].free_bytes or 0)

    for need in needs.programs:
        its: list[str] = []
        for one in need.devices:
            alone = need.model_copy(update={"devices": (one,)})
            possible = [name for name in sorted(known) if name not in its and not judge(alone, [name], known, taken)]
            if not possible:
                return chosen
            its.append(min(possible, key=rank))
            taken[its[-1]] += one.bytes
        users.update(its)
        chosen.append(its)
    return chosen


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


def _addresses(root: int, pids: Iterable[int]) -> tuple[str, ...]:
    """At which they have TCP and UDP sockets, in the network of `root`."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            inodes |= {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    found = {
        each.local.rpartition(":")[0].strip("[]")
        for protocol in ("tcp", "udp")
        for inode, each in inet_sockets(root, protocol).items()
        if f"socket:[{inode}]" in inodes
    }
    return tuple(sorted(found)[:MOST_ADDRESSES])


def _has_address(address: str) -> bool:
    """That this machine has not is refused with a number of its own; others may be those of one interface only."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.bind((address, 0))
    except OSError as error:
        return error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    return True


def _different(file: File) -> str:
    try:
        found = os.stat(file.path).st_size
    except (OSError, ValueError) as error:
        return f"{harmless(file.path, 200)}: {getattr(error, 'strerror', None) or 'no such path'}"
    if file.bytes is not None and found != file.bytes:
        return f"{harmless(file.path, 200)} has {found} bytes here, and {file.bytes} where the program is"
    return ""
