"""May a process go there? Every refusal has a stable code and a sentence; docs/migration.md says what each means."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from xmigd.host_memory import RESERVE
from xmigd.migrations.estimate import Estimate
from xmigd.process.migration_events import Kind, Reason
from xmigd.supervisor.process import Process

MAX_TARGETS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A device of this node, as far as it is known. What is not is None."""

    id: str
    configured: bool = True
    cordoned: bool = False
    cordon_reason: str = ""
    healthy: bool = True
    why: str = ""
    free_bytes: int | None = None
    total_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Target:
    device: str
    reasons: list[Reason]
    room_bytes: int | None
    expected_downtime_ms: float | None = None
    expected_downtime_basis: str | None = None

    @property
    def allowed(self) -> bool:
        return not self.reasons


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    process: str
    engine: str
    source: str
    live_bytes: int | None
    held_bytes: int
    targets: list[Target] = field(default_factory=list)

    @property
    def free_bytes(self) -> int | None:
        """Held, and of no use to the program now: it is not copied."""
        return None if self.live_bytes is None else max(0, self.held_bytes - self.live_bytes)


def names_of(device: str) -> list[str]:
    """`cpu:0,1` is cpu:0 and cpu:1."""
    kind, _, ordinals = device.partition(":")
    return [f"{kind}:{ordinal}" for ordinal in ordinals.split(",")]


def needed_bytes(process: Process) -> list[int]:
    """Device memory that the process's program has, for each of its devices. Of a suspended one: what its last snapshot
    is all on the first; that is what it will need at least."""
    needed = [0] * len(names_of(process.row.device))
    if process.state == "suspended":
        needed[0] = process.last_snapshot.live_bytes if process.last_snapshot is not None else 0
        return needed
    for handle in process.handles.values():
        if handle.kind == "device" and handle.ordinal < len(needed):
            needed[handle.ordinal] += handle.size
    return needed


def make_plan(
    process: Process, places: Iterable[Place], *, engine: str = "proxy", downtime: Estimate | None = None,
    stays: Reason | None = None,
) -> Plan:  # fmt: skip
    """Where it may go: every device, or as many together as it has now, with what prevents it. `stays`: why nowhere
    but where it was, beside what the process itself prevents."""
    plan = Plan(
        process=process.row.id, engine=engine,
        source=process.machine.where if process.state == "suspended" else process.row.device,
        live_bytes=None if process.last_snapshot is None else process.last_snapshot.live_bytes,
        held_bytes=process.program_bytes,
    )  # fmt: skip
    known = {place.id: place for place in places}
    kind = process.row.device.partition(":")[0]
    count = len(names_of(process.row.device))
    own = general(process, engine, "resume" if process.state == "suspended" else "move")
    elsewhere = own if stays is None else [*own, stays]

    def judged(device: str) -> Target:
        return judge(process, device, known, own if device == process.row.device else elsewhere)

    same = sorted((n for n in known if n.partition(":")[0] == kind), key=_ordinal)
    for chosen in itertools.islice(itertools.combinations(same, count), MAX_TARGETS):
        device = f"{kind}:{','.join(name.partition(':')[2] for name in chosen)}"
        plan.targets.append(judged(device))
    plan.targets.extend(judged(name) for name in sorted(known) if name.partition(":")[0] != kind)
    if downtime is not None and process.state != "suspended":
        plan.targets[:] = [
            replace(t, expected_downtime_ms=downtime.ms, expected_downtime_basis=downtime.basis) if t.allowed else t
            for t in plan.targets
        ]
    return plan


def general(process: Process, engine: str, kind: Kind) -> list[Reason]:
    """What prevents moving it at all."""
    reasons = []
    if engine != "proxy":
        reasons.append(Reason("engine_not_possible", f"a process under the shim is not moved with engine={engine}"))
    why = process.moving.why_not(kind)
    if why is not None:
        reasons.append(why)
    return reasons


def in_allocation(whom: str) -> Reason:
    """`whom`: `allocated_to` of its job."""
    return Reason("scheduled", f"it is {whom}, which may not leave the devices of its allocation")


def judge(process: Process, device: str, known: dict[str, Place], own: Sequence[Reason] = ()) -> Target:
    """One target."""
    reasons = list(own)
    names = names_of(device)
    kind = process.row.device.partition(":")[0]
    needed = needed_bytes(process)
    if device == process.row.device and process.state != "suspended":
        reasons.append(Reason("same_device", f"the process is on {device}"))
    if device.partition(":")[0] != kind:
        reasons.append(Reason("other_kind", f"the program uses a {kind} device; {device} is of another kind"))
    elif len(names) != len(needed):
        reasons.append(Reason("wrong_number", f"the program has {len(needed)} device(s), {device} is {len(names)}"))
    if len(set(names)) != len(names):
        reasons.append(Reason("wrong_number", f"{device} names a device twice"))
    room: int | None = None
    for index, name in enumerate(names):
        place = known.get(name)
        if place is None or not place.configured:
            reasons.append(Reason("no_such_device", f"this node has no device {name}"))
            continue
        if place.cordoned:
            why = f": {place.cordon_reason}" if place.cordon_reason else ""
            reasons.append(Reason("cordoned", f"{name} is cordoned{why}"))
        if not place.healthy:
            reasons.append(Reason("failing", f"{name} cannot be trusted: {place.why}"))
        quota = process.job.memory_quota
        if quota is not None and place.total_bytes is not None and place.total_bytes < quota:
            text = f"{name} has {size(place.total_bytes)}, and the job's memory quota is {size(quota)}"
            reasons.append(Reason("too_small", text))
        if index < len(needed) and (device != process.row.device or process.state == "suspended"):
            claimed = needed[index] if process.state == "suspended" else process.claimed(index)
            if (left := process.lacks_quota(name, claimed)) is not None:
                reasons.append(_quota_full(name, left, claimed))
        if place.free_bytes is not None:
            room = place.free_bytes if room is None else room + place.free_bytes
            if index < len(needed) and place.free_bytes < needed[index] and device != process.row.device:
                text = f"{name} has room for {size(place.free_bytes)}, the process needs {size(needed[index])}"
                reasons.append(Reason("no_room", text))
    return Target(device, reasons, room)


def against_packing(targets: Sequence[tuple[Process, str]], known: dict[str, Place]) -> list[Reason]:
    """What prevents resuming these together: a device has room for each of them, and not for all."""
    needed: Counter[str] = Counter()
    of_quotas: Counter[tuple[str, str]] = Counter()  # by job and device
    come: set[str] = set()  # devices that somebody comes to
    for process, device in targets:
        needed.update(dict(zip(names_of(device), needed_bytes(process), strict=True)))
        of_quotas.update({(process.job.id, name): bytes for name, bytes in
                          zip(names_of(device), needed_bytes(process), strict=True)})  # fmt: skip
        if device != process.row.device:
            come.update(names_of(device))
    one_of = {process.job.id: process for process, _ in targets}
    reasons = [
        _quota_full(name, left, bytes) for (job, name), bytes in of_quotas.items()
        if (left := one_of[job].lacks_quota(name, bytes)) is not None
    ]  # fmt: skip
    for name, bytes in needed.items():
        free = known[name].free_bytes
        if name in come and free is not None and free < bytes:
            reasons.append(Reason("no_room", f"{name} has room for {size(free)}, the processes need {size(bytes)}"))
    return reasons


def against_suspension(processes: Sequence[Process], to: str, folder: Path) -> list[Reason]:
    """What prevents suspending all of these."""
    needed = 0
    for process in processes:
        if (why := process.moving.why_not("suspend")) is not None:
            text = why.text if len(processes) == 1 else f"process {process.row.id[:12]} of its group: {why.text}"
            return [Reason(why.code, text)]
        last = process.last_snapshot
        needed += last.live_bytes if last is not None else sum(needed_bytes(process))
    what = "the process needs" if len(processes) == 1 else f"the {len(processes)} processes need"
    if to == "file":
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        disk = os.statvfs(existing)
        free = disk.f_bavail * disk.f_frsize
        if free < needed:
            return [Reason("file_system_full", f"{existing} has {size(free)} free, {what} {size(needed)}")]
    else:
        room = processes[0].host_pool.room()
        if room - RESERVE < needed:
            text = f"the host has {size(room)} of memory available, {what} {size(needed)}"
            return [Reason("pool_too_small", text)]
    return []


def _quota_full(device: str, left: int, needed: int) -> Reason:
    text = f"the job's memory quota has {size(left)} left on {device}, and {size(needed)} would come"
    return Reason("quota_full", text)


def size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.1f} MiB"


def _ordinal(name: str) -> int:
    return int(name.partition(":")[2])
