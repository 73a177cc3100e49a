"""A plan: what was seen of devices and processes, the packing that was found, the moves to it, and what has changed
since."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from xmigd.consolidation.order import Step, order
from xmigd.consolidation.placement import (
    Bin,
    Item,
    Packing,
    Problem,
    Rules,
    freed,
    moved,
    occupants,
    predictions,
    why_not_together,
)
from xmigd.consolidation.schemas import (
    ConsolidationPlan,
    ConsolidationRequest,
    PackedDevice,
    PackedProcess,
    PlannedJob,
    PlannedMove,
    Refusal,
    SolverInfo,
)
from xmigd.consolidation.solver import Solution
from xmigd.devices.inventory import held_bytes
from xmigd.devices.names import devices_of
from xmigd.errors import NotFound
from xmigd.ids import new_id
from xmigd.migrations.estimate import Estimate
from xmigd.migrations.plan import Place, general, in_allocation
from xmigd.prediction.model import Remaining
from xmigd.process.migration_events import Reason
from xmigd.supervisor.process import Process

OVER = ("losing", "lost", "ended", "draining")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The node at one moment."""

    places: Mapping[str, Place]
    processes: Mapping[str, Process]
    busy: Mapping[str, float | None]
    step_ms: Mapping[str, float | None]
    held: Mapping[str, Mapping[str, int]]  # by process and device
    why_not: Mapping[str, Reason | None]  # a process cannot move at all
    remaining: Mapping[str, Remaining]  # by job, where it is known
    claimed: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # of memory quotas, as held
    allocated: Mapping[str, str] = field(default_factory=dict)  # by job: to whom a scheduler has given its devices

    @classmethod
    def of(
        cls, places: Iterable[Place], processes: Iterable[Process], busy: Mapping[str, float | None],
        step_ms: Mapping[str, float | None], remaining: Mapping[str, Remaining], allocated: Mapping[str, str],
    ) -> Seen:  # fmt: skip
        there = {one.row.id: one for one in processes if one.state not in OVER}
        return cls(
            places={place.id: place for place in places}, processes=there, busy=busy, step_ms=step_ms,
            held={name: held_bytes([one]) for name, one in there.items()},
            why_not={name: next(iter(general(one, "proxy", "move")), None) for name, one in there.items()},
            remaining=remaining, allocated=allocated,
            claimed={
                name: {device: one.claimed(ordinal) for ordinal, device in enumerate(devices_of(one.row.device))}
                for name, one in there.items()
            },
        )  # fmt: skip

    def on(self, device: str) -> set[str]:
        return {
            name for name, one in self.processes.items()
            if one.state != "suspended" and device in devices_of(one.row.device)
        }  # fmt: skip

    def capacity(self, device: str) -> int | None:
        """What processes under xMIG can have: what is free, and what they have."""
        free = self.places[device].free_bytes
        return None if free is None else free + sum(held.get(device, 0) for held in self.held.values())


def why_not_device(place: Place) -> str:
    """Why nothing may come; empty: it may."""
    if not place.configured:
        return "the settings do not name it"
    if place.cordoned:
        return f"it is cordoned{f': {place.cordon_reason}' if place.cordon_reason else ''}"
    return "" if place.healthy else f"it cannot be trusted: {place.why}"


def check(request: ConsolidationRequest, seen: Seen) -> None:
    """Raises NotFound: it names what this node does not have."""
    for device in [*request.devices, *request.exclude_devices]:
        if device not in seen.places or not seen.places[device].configured:
            raise NotFound(
                f"this node has no device {device!r}", code="no_such_device", hint="xmigctl device list lists them"
            )
    known = {one.job.id for one in seen.processes.values()}
    groups = [request.jobs, request.exclude_jobs, request.alone, request.busy_shares, *request.apart]
    for job in (job for group in groups for job in group):
        if job not in known:
            raise NotFound(f"there is no job {job!r} with a running process", hint="xmigctl ps lists them")


def refusals(request: ConsolidationRequest, seen: Seen, stuck: Iterable[str]) -> dict[str, Reason]:
    """By process, why it stays. A job moves whole or not at all."""
    found: dict[str, Reason] = {}
    for name, one in seen.processes.items():
        why = seen.why_not[name]
        if why is not None:
            found[name] = why
        elif (whom := seen.allocated.get(one.job.id)) is not None:
            found[name] = in_allocation(whom)
        elif len(devices_of(one.row.device)) > 1:
            found[name] = Reason("several_devices", "a process with several devices is not packed with others")
        elif (left := seen.remaining.get(one.job.id)) is not None and left.p90 < request.least_remaining_s:
            found[name] = Reason("ends_soon", f"its job ends in {left.p90:.0f} s or earlier, as predicted (P90)")
        elif name in stuck:
            found[name] = Reason("no_order", "no order of the moves has room for it at every moment")
    for name, one in seen.processes.items():
        because = next((other for other in found if seen.processes[other].job.id == one.job.id), None)
        if name not in found and because is not None:
            text = f"process {because[:12]} of its job cannot move: {found[because].text}"
            found[name] = Reason("job_stays", text)
    return found


def make_problem(request: ConsolidationRequest, seen: Seen, refused: Mapping[str, Reason]) -> Problem:
    chosen = {
        name for name, place in seen.places.items()
        if (place.configured or seen.on(name)) and name not in request.exclude_devices
        and (not request.devices or name in request.devices)
    }  # fmt: skip
    items = []
    for name, one in sorted(seen.processes.items()):
        if one.state == "suspended":
            continue  # nothing of it is on a device
        may = one.job.id not in request.exclude_jobs and (not request.jobs or one.job.id in request.jobs)
        items += [
            Item(
                process=name, job=one.job.id, device=device, memory_bytes=seen.held[name].get(device, 0),
                busy=request.busy_shares.get(one.job.id, seen.busy.get(name)),
                movable=may and name not in refused, rank=one.machine.grouped,
                claimed_bytes=seen.claimed.get(name, {}).get(device, 0), quota_bytes=one.job.memory_quota,
            )
            for device in devices_of(one.row.device) if device in chosen
        ]  # fmt: skip
    return Problem(
        items=tuple(items),
        bins=tuple(
            Bin(id=name, capacity_bytes=seen.capacity(name), takes=not why_not_device(place))
            for name, place in seen.places.items() if name in chosen
        ),
        objective=request.objective,
        rules=Rules(
            max_slow_down=request.max_slow_down, assumed_busy=request.assumed_busy_share, headroom=request.headroom,
            max_jobs=request.max_jobs_per_device, alone=frozenset(request.alone),
            apart=tuple(frozenset(group) for group in request.apart),
        ),
    )  # fmt: skip


@dataclass(kw_only=True)
class Plan:
    """What is kept of it until it is applied."""

    answer: ConsolidationPlan
    problem: Problem
    steps: Sequence[Step]
    there: Mapping[str, frozenset[str]]  # processes on devices that give or get one
    names: Mapping[str, str]  # of their jobs, by process
    operation: str | None = None  # that applies it

    @property
    def id(self) -> str:
        return self.answer.id

    def shown(self) -> ConsolidationPlan:
        return self.answer.model_copy(update={"operation": self.operation})

    def process(self, step: Step) -> str:
        return self.problem.items[step.index].process

    def places(self) -> dict[str, str]:
        """Where the processes are that move, by process."""
        return {self.process(step): self.problem.now[step.index] for step in self.steps}


@dataclass(frozen=True, kw_only=True)
class Draft:
    """What a plan is made of."""

    request: ConsolidationRequest
    seen: Seen
    problem: Problem
    solution: Solution
    packing: Packing
    steps: Sequence[Step]
    refused: Mapping[str, Reason]

    @property
    def moving(self) -> list[str]:
        return list(dict.fromkeys(self.problem.items[step.index].process for step in self.steps))

    def plan(self, downtimes: Mapping[str, Estimate | None]) -> Plan:
        """`downtimes`: of processes that move."""
        answer = ConsolidationPlan(
            id=new_id(), created_at=time.time(), objective=self.problem.objective, operation=None,
            before=self._devices(self.problem.now), after=self._devices(self.packing),
            freed=freed(self.problem, self.packing), moves=[self._move(step, downtimes) for step in self.steps],
            jobs=self._jobs(), refusals=self._refusals(), solver=SolverInfo.model_validate(self.solution),
        )  # fmt: skip
        concerned = {device for step in self.steps for device in (step.source, step.target)}
        return Plan(
            answer=answer, problem=self.problem, steps=self.steps,
            there={device: frozenset(self.seen.on(device)) for device in concerned},
            names={name: one.job.name for name, one in self.seen.processes.items()},
        )  # fmt: skip

    def _devices(self, packing: Packing) -> list[PackedDevice]:
        there, leaving = occupants(packing), set(moved(self.problem, self.packing))
        found = []
        for each in self.problem.bins:
            items = [(index, self.problem.items[index]) for index in there.get(each.id, [])]
            shares = [item.busy for _, item in items]
            found.append(
                PackedDevice(
                    device=each.id, takes=each.takes, why=why_not_device(self.seen.places[each.id]),
                    capacity_bytes=each.capacity_bytes, used_bytes=sum(item.memory_bytes for _, item in items),
                    busy_share=None if None in shares else sum(share for share in shares if share is not None),
                    processes=[
                        PackedProcess(
                            process=item.process, job_id=item.job, job_name=self._name(item.process),
                            memory_bytes=item.memory_bytes, busy_share=item.busy, moves=index in leaving,
                            step_ms=self.seen.step_ms.get(item.process),
                        )
                        for index, item in items
                    ],
                )
            )  # fmt: skip
        return found

    def _move(self, step: Step, downtimes: Mapping[str, Estimate | None]) -> PlannedMove:
        item = self.problem.items[step.index]
        downtime = downtimes.get(item.process)
        return PlannedMove(
            process=item.process, job_id=item.job, job_name=self._name(item.process), source=step.source,
            target=step.target, memory_bytes=item.memory_bytes, detour=step.detour,
            expected_downtime_ms=None if downtime is None else downtime.ms,
            expected_downtime_basis=None if downtime is None else downtime.basis,
        )  # fmt: skip

    def _jobs(self) -> list[PlannedJob]:
        problem = self.problem
        predicted = predictions(problem, self.packing)
        names = {item.job: self._name(item.process) for item in problem.items}
        moving = {problem.items[index].job for index in moved(problem, self.packing)}
        devices: dict[str, set[str]] = {}
        for item, device in zip(problem.items, self.packing, strict=True):
            devices.setdefault(item.job, set()).add(device)
        left = {job: self.seen.remaining.get(job) for job in names}
        return [
            PlannedJob(
                job_id=job, job_name=names[job], devices=sorted(devices[job]), moves=job in moving,
                remaining_s_p50=None if (one := left[job]) is None else one.p50,
                remaining_s_p90=None if one is None else one.p90,
                predicted_slow_down=predicted[job], promised_slow_down=problem.rules.max_slow_down,
            )
            for job in names
        ]  # fmt: skip

    def _refusals(self) -> list[Refusal]:
        return [
            Refusal(
                process=name, job_id=self.seen.processes[name].job.id, job_name=self._name(name),
                device=self.seen.processes[name].row.device, code=why.code, text=why.text,
            )
            for name, why in self.refused.items()
        ]  # fmt: skip

    def _name(self, process: str) -> str:
        return self.seen.processes[process].job.name


def steps_of(problem: Problem, packing: Packing) -> tuple[list[Step], list[str]]:
    """The moves in an order that has room, and the processes for which there is none."""
    found = order(problem, packing)
    return found.steps, [problem.items[index].process for index in found.stuck]


def changes(plan: Plan, now: Seen) -> list[str]:
    """What makes the plan stale; empty: nothing."""
    found, places = [], plan.places()
    for name, device in places.items():
        one = now.processes.get(name)
        if one is None:
            found.append(f"process {name[:12]} of job {plan.names[name]} has ended")
        elif one.row.device != device:
            found.append(f"process {name[:12]} is on {one.row.device}, not on {device}")
        elif (why := now.why_not[name]) is not None:
            found.append(f"process {name[:12]} cannot move now: {why.text}")
        elif (whom := now.allocated.get(one.job.id)) is not None:
            found.append(f"process {name[:12]} cannot move now: {in_allocation(whom).text}")
    targets = {step.target for step in plan.steps}
    for device, then in plan.there.items():
        place = now.places.get(device)
        why_device = "the node does not have it any more" if place is None else why_not_device(place)
        if device in targets and why_device:
            found.append(f"nothing may come to {device}: {why_device}")
            continue
        here = now.on(device)
        found += [
            f"process {name[:12]} of job {now.processes[name].job.name} has come to {device}"
            for name in sorted(here - then)
        ]
        found += [f"process {name[:12]} has left {device}" for name in sorted(then - here - places.keys())]
    return found or _without_room(plan, now)


def _without_room(plan: Plan, now: Seen) -> list[str]:
    """Programs may have taken more memory since."""
    items = tuple(
        replace(
            item,
            memory_bytes=now.held.get(item.process, {}).get(item.device, 0),
            claimed_bytes=now.claimed.get(item.process, {}).get(item.device, 0),
        )
        for item in plan.problem.items
    )
    bins = tuple(
        replace(each, capacity_bytes=now.capacity(each.id) if each.id in now.places else None)
        for each in plan.problem.bins
    )
    problem = replace(plan.problem, items=items, bins=bins)
    place = list(problem.now)
    for step in plan.steps:
        there = occupants(place).get(step.target, [])
        why = why_not_together(problem, step.target, [*there, step.index])
        if why is not None:
            return [f"{step.target} cannot take process {items[step.index].process[:12]} any more: {why}"]
        place[step.index] = step.target
    return []
