"""A plan over nodes: what was seen of them, the packing, the transfers to it, and what has changed since. No I/O."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from xmigd.devices.names import devices_of, together
from xmigd.errors import NotFound
from xmigd.fleet.packing import Device, Node, Packed, Task, pack
from xmigd.fleet.schemas import (
    FleetJob,
    FleetMove,
    FleetNode,
    FleetPlace,
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
    of_job: Mapping[str, frozenset[str]]  # all processes of jobs that move to another node
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
    tasks: list[Task] = []
    of_task: list[Running] = []
    refusals = []
    for name, job in [(node.name, job) for node in part if node.shown is not None for job in node.shown.jobs]:
        stays = _stays(request, name, job, index)
        for one, why in zip([Running(name, job, each) for each in job.processes], stays, strict=True):
            if why:
                refusals.append(_refusal(one, why))
            its = _tasks(request, one, index, movable=not why)
            tasks += its
            of_task += [one] * len(its)
    packed = pack(
        [Node(key=node.name) for node in part], devices, tasks, objective=request.objective,
        max_slow_down=request.max_slow_down, max_moves=request.max_moves,
    )  # fmt: skip
    ms = (time.monotonic() - began) * 1e3
    ways = {node.name: node.shown.ways for node in part if node.shown is not None}
    moves = [
        _move([(of_task[number], ids[packed.place[number]]) for number in sorted(numbers)], ways)
        for numbers in packed.moves
    ]
    refusals += _left_where_they_are(tasks, of_task, packed)
    there = on_devices(part)
    moving = {name for move in moves for name in (one.process for one in move.processes)}
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
        there={place: frozenset(there.get(place, set())) for place in _targets(moves)},
        of_job={
            _key(one.node, one.job.id): frozenset(each.id for each in one.job.processes)
            for one in of_task if one.process.id in moving
        },
    )  # fmt: skip


def _key(node: str, job: str) -> str:
    return f"{node}{NS}{job}"


def _targets(moves: Iterable[FleetMove]) -> list[str]:
    return list(dict.fromkeys(one.target for move in moves for one in move.processes))


def _stays(request: FleetPlanRequest, node: str, job: FleetJob, index: Mapping[str, int]) -> list[str]:
    """Of each of its processes, why it does not move; empty: nothing is known against. A job moves as a whole, or not
    at all."""
    if job.id in request.exclude_jobs:
        return ["the request leaves it out"] * len(job.processes)
    found = [one.stays for one in job.processes]
    for number, one in enumerate(job.processes):
        if not found[number] and any(f"{node}{NS}{device}" not in index for device in devices_of(one.device)):
            found[number] = "its node does not list its device"
    first = next((number for number, why in enumerate(found) if why), None)
    if first is None:
        return found
    because = f"process {job.processes[first].id[:12]} of its job cannot move: {found[first]}"
    return [why or because for why in found]


def _refusal(one: Running, why: str) -> FleetRefusal:
    return FleetRefusal(
        process=one.process.id, job_id=one.job.id, job_name=one.job.name, source=one.place, text=why
    )  # fmt: skip


def _tasks(request: FleetPlanRequest, one: Running, index: Mapping[str, int], *, movable: bool) -> list[Task]:
    busy = request.assumed_busy_share if one.process.busy_share is None else one.process.busy_share
    return [
        Task(
            key=one.process.id, device=index[name], bytes=bytes, busy=busy, movable=movable, rank=one.process.rank,
            job=_key(one.node, one.job.id) if movable and len(one.job.processes) > 1 else "",
        )
        for name, bytes in _held(one).items() if name in index
    ]  # fmt: skip


def _held(one: Running) -> dict[str, int]:
    """Bytes by NODE/DEVICE."""
    names = [f"{one.node}{NS}{device}" for device in devices_of(one.process.device)]
    return {name: one.process.memory_bytes // len(names) for name in names}


def _left_where_they_are(tasks: Sequence[Task], of_task: Sequence[Running], packed: Packed) -> list[FleetRefusal]:
    """Why jobs of several processes that could move do not."""
    moved = {tasks[number].job for numbers in packed.moves for number in numbers}
    found = []
    for task, one in zip(tasks, of_task, strict=True):
        if not task.job or task.job in moved:
            continue
        if task.job in packed.without_node:
            count = len(one.job.processes)
            why = f"no other node has room for all of the {count} processes of its job, by memory and slow-down"
        else:
            why = "its job has several processes, and nothing gets free if it moves"
        found.append(_refusal(one, why))
    return found


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


def _move(its: Sequence[tuple[Running, str]], ways: Mapping[str, Mapping[str, object]]) -> FleetMove:
    """`its`: processes of one job, each with its target."""
    first, targets = its[0][0], [target for _, target in its]
    node = targets[0].partition(NS)[0]
    way = ways.get(first.node, {}).get(node) if node != first.node else None
    speed, bytes = getattr(way, "bytes_per_s", None), sum(one.process.memory_bytes for one, _ in its)
    return FleetMove(
        processes=[FleetPlace(process=one.process.id, source=one.place, target=target) for one, target in its],
        job_id=first.job.id, job_name=first.job.name, source=_on_one([one.place for one, _ in its]),
        target=_on_one(targets), memory_bytes=bytes, expected_standstill_ms=getattr(way, "standstill_ms", None),
        expected_s=bytes / speed if speed else None,
        basis=None if way is None else f"{getattr(way, 'transfers', 0)} transfers from {first.node} to {node}",
    )  # fmt: skip


def _on_one(places: Sequence[str]) -> str:
    """one/cpu:0 and one/cpu:1 are `one/cpu:0,cpu:1`."""
    return f"{places[0].partition(NS)[0]}{NS}{together(place.partition(NS)[2] for place in places)}"


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
    now = {(one.node, one.process.id): one for node in nodes if node.shown for one in running(node.name, node.shown)}
    for move in plan.answer.moves:
        found += _changed(plan, move, now)
    places = on_devices(nodes)
    moving = {one.process for move in plan.answer.moves for one in move.processes}
    for target, then in plan.there.items():
        name, _, device = target.partition(NS)
        shown = by_name[name].shown
        state = next((each for each in shown.devices if each.id == device), None) if shown is not None else None
        if state is None or state.state != "ready":
            why = "its node does not have it any more" if state is None else f"{state.state} {state.why}".strip()
            found.append(f"nothing may come to {target}: {why}")
            continue
        for process in sorted(places.get(target, set()) - then - moving):
            found.append(f"process {process[:12]} of job {now[name, process].job.name} has come to {target}")
    return found or _without_room(plan, by_name, now)


def _changed(plan: Plan, move: FleetMove, now: Mapping[tuple[str, str], Running]) -> list[str]:
    """Of what moves."""
    found = []
    node = move.source.partition(NS)[0]
    for one in move.processes:
        here = now.get((node, one.process))
        if here is None or here.job.id != move.job_id:
            found.append(f"process {one.process[:12]} of job {move.job_name} has ended")
        elif here.place != one.source:
            found.append(f"process {one.process[:12]} is on {here.place}, not on {one.source}")
        elif here.process.stays:
            found.append(f"process {one.process[:12]} cannot move now: {here.process.stays}")
        elif {each.id for each in here.job.processes} != plan.of_job[_key(node, move.job_id)]:
            found.append(f"job {move.job_name} has other processes than it had")
    return list(dict.fromkeys(found))


def _without_room(plan: Plan, nodes: Mapping[str, FleetNode], now: Mapping[tuple[str, str], Running]) -> list[str]:
    """Programs may have taken more memory since. Move after move."""
    used: Counter[str] = Counter()
    for one in now.values():
        used.update(_held(one))
    for move in plan.answer.moves:
        node = move.source.partition(NS)[0]
        for each in move.processes:
            bytes = now[node, each.process].process.memory_bytes
            used[each.source] -= bytes
            used[each.target] += bytes
        for target in _targets([move]):
            name, _, device = target.partition(NS)
            shown = nodes[name].shown
            state = next((each for each in shown.devices if each.id == device), None) if shown is not None else None
            capacity = None if state is None else state.capacity_bytes
            if capacity is None or used[target] > capacity * (1 - plan.request.headroom):
                return [f"{target} has no room any more for what is to come (job {move.job_name})"]
    return []
