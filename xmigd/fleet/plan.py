"""A plan over nodes: what was seen of them, the packing, the transfers to it, and what has changed since. No I/O."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from xmigd.errors import NotFound
from xmigd.fleet.packing import Device, Node, Task, pack
from xmigd.fleet.schemas import (
    FleetJob,
    FleetMove,
    FleetNode,
    FleetPlan,
    FleetPlanRequest,
    FleetProcess,
    FleetRefusal,
    LeftOut,
    NodeShown,
)
from xmigd.ids import new_id

NS = "/"


@dataclass(frozen=True, slots=True)
class Running:
    """A process as its node shows it."""

    node: str
    job: FleetJob
    process: FleetProcess

    @property
    def place(self) -> str:
        return f"{self.node}{NS}{self.process.device}"


@dataclass(kw_only=True)
class Plan:
    """What is kept of it until it is applied."""

    answer: FleetPlan
    request: FleetPlanRequest
    there: Mapping[str, frozenset[str]]  # processes on devices to which one comes
    operation: str | None = field(default=None)  # that applies it

    @property
    def id(self) -> str:
        return self.answer.id

    def shown(self) -> FleetPlan:
        return self.answer.model_copy(update={"operation": self.operation})


def running(node: str, shown: NodeShown) -> list[Running]:
    return [Running(node, job, one) for job in shown.jobs for one in job.processes]


def on_devices(nodes: Iterable[FleetNode]) -> dict[str, set[str]]:
    """By NODE/DEVICE, the processes there."""
    found: dict[str, set[str]] = {}
    for node in nodes:
        for one in [] if node.shown is None else running(node.name, node.shown):
            for device in devices_of(one.process.device):
                found.setdefault(f"{node.name}{NS}{device}", set()).add(one.process.id)
    return found


def devices_of(device: str) -> list[str]:
    kind, _, ordinals = device.partition(":")
    return [f"{kind}:{ordinal}" for ordinal in ordinals.split(",")]


def taking_part(request: FleetPlanRequest, nodes: Sequence[FleetNode]) -> tuple[list[FleetNode], list[LeftOut]]:
    """Nodes that do, and those that do not. Raises NotFound: the request names one that is not known."""
    known = {node.name for node in nodes}
    for name in [*request.nodes, *request.exclude_nodes]:
        if name not in known:
            raise NotFound(f"there is no node {name!r}", code="not_found", hint="xmigctl fleet list lists them")
    found, left_out = [], []
    for node in nodes:
        if (request.nodes and node.name not in request.nodes) or node.name in request.exclude_nodes:
            left_out.append(LeftOut(node=node.name, why="the request leaves it out"))
        elif node.state != "answered" or node.shown is None:
            left_out.append(LeftOut(node=node.name, why=f"{node.state}: {node.why}"))
        elif node.shown.left_out:
            why = f"it has more jobs than it lists ({node.shown.left_out} more)"
            left_out.append(LeftOut(node=node.name, why=why))
        else:
            found.append(node)
    return found, left_out


def make(request: FleetPlanRequest, nodes: Sequence[FleetNode]) -> Plan:
    """Raises NotFound. Computes: not for the event loop's thread."""
    part, left_out = taking_part(request, nodes)
    began = time.monotonic()
    devices, ids, index = _devices(request, part)
    everything = [one for node in part if node.shown is not None for one in running(node.name, node.shown)]
    tasks: list[Task] = []
    of_task: list[Running] = []
    refusals = []
    for one in everything:
        stays = one.process.stays
        if not stays and one.job.id in request.exclude_jobs:
            stays = "the request leaves it out"
        if stays:
            refusals.append(
                FleetRefusal(
                    process=one.process.id, job_id=one.job.id, job_name=one.job.name, source=one.place, text=stays
                )
            )  # fmt: skip
        busy = request.assumed_busy_share if one.process.busy_share is None else one.process.busy_share
        names = [f"{one.node}{NS}{device}" for device in devices_of(one.process.device)]
        for name in names:
            if name in index:
                tasks.append(
                    Task(
                        key=one.process.id, device=index[name], bytes=one.process.memory_bytes // len(names), busy=busy,
                        movable=not stays,
                    )
                )  # fmt: skip
                of_task.append(one)
    packed = pack(
        [Node(key=node.name) for node in part], devices, tasks, objective=request.objective,
        max_slow_down=request.max_slow_down, max_moves=request.max_moves,
    )  # fmt: skip
    ms = (time.monotonic() - began) * 1e3
    ways = {node.name: node.shown.ways for node in part if node.shown is not None}
    moves = [_move(of_task[number], ids[packed.place[number]], ways) for number in packed.moves]
    there = on_devices(part)
    answer = FleetPlan(
        id=new_id(), created_at=time.time(), objective=request.objective, operation=None,
        nodes=[node.name for node in part], left_out=left_out,
        devices_used_before=len({task.device for task in tasks}), devices_used_after=len(set(packed.place)),
        freed_devices=[ids[number] for number in packed.freed_devices],
        freed_nodes=[part[number].name for number in packed.freed_nodes], moves=moves, refusals=refusals,
        ms=round(ms, 3),
    )  # fmt: skip
    return Plan(
        answer=answer, request=request,
        there={move.target: frozenset(there.get(move.target, set())) for move in moves},
    )  # fmt: skip


def _devices(
    request: FleetPlanRequest, part: Sequence[FleetNode]
) -> tuple[list[Device], list[str], dict[str, int]]:  # fmt: skip
    devices: list[Device] = []
    ids: list[str] = []
    for number, node in enumerate(part):
        for each in [] if node.shown is None else node.shown.devices:
            capacity = None if each.capacity_bytes is None else int(each.capacity_bytes * (1 - request.headroom))
            ids.append(f"{node.name}{NS}{each.id}")
            devices.append(
                Device(
                    key=ids[-1], node=number, kind=each.id.partition(":")[0], capacity=capacity,
                    takes=each.state == "ready",
                )
            )  # fmt: skip
    return devices, ids, {name: number for number, name in enumerate(ids)}


def _move(one: Running, target: str, ways: Mapping[str, Mapping[str, object]]) -> FleetMove:
    node = target.partition(NS)[0]
    way = ways.get(one.node, {}).get(node)
    standstill = getattr(way, "standstill_ms", None)
    speed = getattr(way, "bytes_per_s", None)
    basis = None if way is None else f"{getattr(way, 'transfers', 0)} transfers from {one.node} to {node}"
    return FleetMove(
        process=one.process.id, job_id=one.job.id, job_name=one.job.name, source=one.place, target=target,
        memory_bytes=one.process.memory_bytes, expected_standstill_ms=standstill if node != one.node else None,
        expected_s=None if not speed or node == one.node else one.process.memory_bytes / speed,
        basis=basis if node != one.node else None,
    )  # fmt: skip


def changes(plan: Plan, nodes: Sequence[FleetNode]) -> list[str]:
    """What makes the plan stale; empty: nothing."""
    by_name = {node.name: node for node in nodes}
    found: list[str] = []
    concerned = {place.partition(NS)[0] for move in plan.answer.moves for place in (move.source, move.target)}
    for name in sorted(concerned):
        node = by_name.get(name)
        if node is None or node.state != "answered":
            why = "it is no peer any more" if node is None else f"{node.state}: {node.why}"
            found.append(f"node {name} does not answer ({why})")
    if found:
        return found
    now = {one.process.id: one for node in nodes if node.shown for one in running(node.name, node.shown)}
    moving = {move.process for move in plan.answer.moves}
    for move in plan.answer.moves:
        here = now.get(move.process)
        if here is None:
            found.append(f"process {move.process[:12]} of job {move.job_name} has ended")
        elif here.place != move.source:
            found.append(f"process {move.process[:12]} is on {here.place}, not on {move.source}")
        elif here.process.stays:
            found.append(f"process {move.process[:12]} cannot move now: {here.process.stays}")
    places = on_devices(nodes)
    for target, then in plan.there.items():
        name, _, device = target.partition(NS)
        shown = by_name[name].shown
        state = next((each for each in shown.devices if each.id == device), None) if shown is not None else None
        if state is None or state.state != "ready":
            why = "its node does not have it any more" if state is None else f"{state.state} {state.why}".strip()
            found.append(f"nothing may come to {target}: {why}")
            continue
        for process in sorted(places.get(target, set()) - then - moving):
            found.append(f"process {process[:12]} of job {now[process].job.name} has come to {target}")
    return found or _without_room(plan, by_name, now)


def _without_room(plan: Plan, nodes: Mapping[str, FleetNode], now: Mapping[str, Running]) -> list[str]:
    """Programs may have taken more memory since."""
    coming: dict[str, int] = {}
    for move in plan.answer.moves:
        coming[move.target] = coming.get(move.target, 0) + now[move.process].process.memory_bytes
    for target, bytes in coming.items():
        name, _, device = target.partition(NS)
        shown = nodes[name].shown
        state = next((each for each in shown.devices if each.id == device), None) if shown is not None else None
        capacity = None if state is None else state.capacity_bytes
        taken = sum(
            one.process.memory_bytes for one in now.values() if one.node == name and one.process.device == device
        )
        if capacity is None or taken + bytes > capacity * (1 - plan.request.headroom):
            return [f"{target} has no room any more for what is to come ({bytes} bytes)"]
    return []
