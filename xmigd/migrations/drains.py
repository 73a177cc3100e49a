"""Drains: devices are cordoned, and every process leaves them, one after the other; and the plan of one before it.

A process moves to another device of this node; where none takes it, to another node, if the request names some; and
where that fails, too, its job is suspended or ended as a checkpoint, if the request wants that.

Invariants:
  What is not done in time is reported. A move that is under way then is cancelled: its process is on one device or on
  the other, never on both.
  A move to another node that may have happened is followed by nothing else: its copy here may never go on.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from xmigd.database.reader import Reader
from xmigd.errors import NotFound, Unavailable, XmigError
from xmigd.jobs import repository as jobs
from xmigd.migrations import plan as plans
from xmigd.migrations.places import Places
from xmigd.migrations.plan import Target
from xmigd.migrations.schemas import Otherwise
from xmigd.migrations.service import Moves
from xmigd.operations.operation import Operation
from xmigd.operations.repository import OperationRow
from xmigd.operations.service import Operations
from xmigd.process.migration_events import Reason
from xmigd.scheduling.service import Preemptions
from xmigd.supervisor.process import Process
from xmigd.supervisor.supervisor import Supervisor
from xmigd.transfers.service import Elsewhere, Transfers

AWAY = ("suspended", "lost", "ended")  # nothing of such processes is on a device
MOVING = 0.8  # share of the time for moves, where jobs that do not move are preempted: those need some of it, too
LONGEST = 3600.0  # seconds for the preemption of a job, if the drain has no limit
UNDECIDED = 5.0  # seconds after the end of the time in which a transfer past its point of no return is waited for
How = Literal["move", "transfer", "host", "file", "checkpoint", "stuck"]
Part = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """What a drain may do beside moves to other devices of this node."""

    nodes: Sequence[str] = ()  # peers, the first ones first
    otherwise: Otherwise = "stay"


HERE = Ways()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What would become of a process."""

    process: Process
    needed_bytes: int
    how: How = "stuck"
    target: str | None = None  # None: it is not moved
    reasons: list[Reason] = field(default_factory=list)
    expected_downtime_ms: float | None = None


@dataclass(slots=True)
class _Nodes:
    """Other nodes, as one drain sees them."""

    names: list[str]
    silent: dict[str, Reason] = field(default_factory=dict)  # that did not answer: they are not waited for again
    taken: Counter[str] = field(default_factory=Counter)  # bytes of their devices, by those before in the plan
    placed: dict[str, str] = field(default_factory=dict)  # by process that would go: its device there


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """A drain that is under way. Times are monotonic seconds."""

    operation: Operation
    requestor: str
    ways: Ways
    nodes: _Nodes
    ends: float | None
    moves_end: float | None


class Drains:
    def __init__(
        self, *, supervisor: Supervisor, moves: Moves, transfers: Transfers, preemptions: Preemptions,
        operations: Operations, places: Places, reader: Reader, before: Callable[[list[Process]], Awaitable[None]],
        node: str, devices: Sequence[str],
    ) -> None:  # fmt: skip
        """`before`: with the processes that will leave. `devices`: of this node, which is `node`."""
        self._supervisor = supervisor
        self._moves = moves
        self._transfers = transfers
        self._preemptions = preemptions
        self._operations = operations
        self._places = places
        self._reader = reader
        self._before = before
        self._node = node
        self._devices = devices

    # --- what would happen --------------------------------------------------------------------------------------------

    async def plan(self, devices: Sequence[str], ways: Ways = HERE) -> list[Step]:
        """If these were drained now, one process after the other. Changes nothing. Raises NotFound."""
        self._check(devices)
        nodes = _Nodes(self._transfers.nodes(ways.nodes))
        known = {place.id: place for place in await self._places.known()}
        for device in devices:
            known[device] = replace(known[device], cordoned=True, cordon_reason="it would be drained")
        steps: list[Step] = []
        suspended: list[Process] = []  # in host memory, by then
        for process in self._on(devices):
            downtime = await asyncio.to_thread(self._moves.estimate, process)
            targets = plans.make_plan(process, known.values(), downtime=downtime).targets
            needed, best = plans.needed_bytes(process), _best(targets)
            step = Step(process=process, needed_bytes=sum(needed), reasons=_reasons(targets))
            if best is not None:
                expected = best.expected_downtime_ms
                step = replace(step, how="move", target=best.device, reasons=[], expected_downtime_ms=expected)
                for name, bytes in zip(plans.names_of(best.device), needed, strict=True):
                    if (free := known[name].free_bytes) is not None:  # it is there for nobody else any more
                        known[name] = replace(known[name], free_bytes=max(0, free - bytes))
            else:
                step = await self._elsewhere(step, ways, nodes, steps, suspended)
            steps.append(step)
        return steps

    async def _elsewhere(
        self, step: Step, ways: Ways, nodes: _Nodes, before: Sequence[Step], suspended: list[Process]
    ) -> Step:
        """What becomes of a process that no other device of this node takes."""
        process = step.process
        if (device := nodes.placed.get(process.row.id)) is not None:  # its job goes as a whole
            return replace(step, how="transfer", target=device, reasons=[])
        places, reasons = await self._on_nodes(process, nodes)
        step = replace(step, reasons=[*step.reasons, *reasons])
        if places:
            for one, device in places.items():
                nodes.taken[device] += sum(plans.needed_bytes(one))
                nodes.placed[one.row.id] = device
            return replace(step, how="transfer", target=places[process])
        if ways.otherwise == "stay":
            return step
        for each in before:  # its job is preempted as a whole
            if each.process.job.id == process.job.id and each.how in ("host", "file", "checkpoint"):
                return replace(step, how=each.how)
        method, reasons = await self._preemptions.foresee(process.job.id, ways.otherwise, suspended)
        if method == "host":
            suspended += self._supervisor.processes_of(process.job.id)
        return replace(step, how=method or "stuck", reasons=[*step.reasons, *reasons])

    async def _on_nodes(self, process: Process, nodes: _Nodes) -> tuple[dict[Process, str], list[Reason]]:
        """Where on the first of these nodes that has places for all processes of its job, and why those before have
        none."""
        if nodes.names and (known_as := await asyncio.to_thread(self._external_id, process.job.id)) is not None:
            text = f"its scheduler knows it on this node, as {known_as}: for that it would be over"
            return {}, [Reason("scheduled", text)]
        reasons: list[Reason] = []
        for node in nodes.names:
            if (silent := nodes.silent.get(node)) is not None:
                reasons.append(silent)
                continue
            try:
                plan = await self._transfers.plan(process, node)
            except XmigError as error:
                reasons.append(Reason(error.code, f"{node}: {error.message}"))
                if isinstance(error, Unavailable):
                    nodes.silent[node] = reasons[-1]
                continue
            places, found = _places(plan, nodes.taken)
            if places:
                return places, reasons
            reasons += [Reason(why.code, f"{node}: {why.text}") for why in found]
        return {}, reasons

    def _external_id(self, job: str) -> str | None:
        """Of who has started it: as it is now, and not as it was when the job began."""
        with self._reader.session() as session:
            row = jobs.find(session, job)
            return None if row is None else row.external_id

    # --- what is requested --------------------------------------------------------------------------------------------

    async def drain(
        self, device: str, *, reason: str, requestor: str, within: float | None = None, ways: Ways = HERE
    ) -> OperationRow:
        """Cordon it, and have every process leave it, one after the other. `within`: seconds from now on. Raises
        NotFound."""
        return await self._start([device], ("device", device), reason, requestor, within, ways)

    async def drain_node(
        self, *, reason: str, requestor: str, within: float | None = None, ways: Ways = HERE
    ) -> OperationRow:
        """All devices of this node as one. Raises NotFound."""
        return await self._start(self._devices, ("node", self._node), reason, requestor, within, ways)

    async def _start(
        self, devices: Sequence[str], subject: tuple[str, str], reason: str, requestor: str, within: float | None,
        ways: Ways,
    ) -> OperationRow:  # fmt: skip
        self._check(devices)
        began = time.monotonic()
        ends = moves_end = None if within is None else began + within
        if within is not None and ways.otherwise != "stay":
            moves_end = began + MOVING * within
        nodes = _Nodes(self._transfers.nodes(ways.nodes))
        kind, name = subject

        async def work(operation: Operation) -> Part:
            order = _Order(
                operation=operation, requestor=requestor, ways=ways, nodes=nodes, ends=ends, moves_end=moves_end
            )
            return {kind: name} | await self._drain(order, devices, reason)

        return await self._operations.start(
            "drain", subject=subject, requestor=requestor, work=work,
            request={kind: name, "nodes": nodes.names, "otherwise": ways.otherwise},
        )  # fmt: skip

    def _check(self, devices: Iterable[str]) -> None:
        for device in devices:
            if device not in self._devices:
                raise NotFound(f"there is no device {device!r}", hint="xmigctl device list lists them")

    def _on(self, devices: Iterable[str]) -> list[Process]:
        return [
            process
            for process in list(self._supervisor.processes.values())
            if process.state not in AWAY and set(devices).intersection(plans.names_of(process.row.device))
        ]

    # --- the work -----------------------------------------------------------------------------------------------------

    async def _drain(self, order: _Order, devices: Sequence[str], reason: str) -> Part:
        for device in devices:
            await self._places.cordon(device, reason, order.requestor)
        parts: list[Part] = []
        processes = self._on(devices)
        await self._before(processes)
        for process in processes:
            order.operation.check_cancelled()
            about: Part = {"process": process.row.id, "job": process.job.id, "source": process.row.device}
            if process.state in AWAY:  # meanwhile
                parts += [part | about for part in parts if _has_taken_along(part, process)][:1]
                continue
            part: Part = about | {"target": None, "how": None, "tried": []}
            parts.append(part)
            order.operation.progress("moving", parts=parts, done=len(parts) - 1)
            if _is_over(order.ends):
                part |= {"state": "not_begun", "why": "the time was up before its turn"}
            else:
                await self._leave(order, process, part)
            order.operation.progress("moving", parts=parts, done=len(parts))
        failed = [part for part in parts if part["state"] != "succeeded"]
        if failed:
            left = ", ".join(f"{part['process'][:12]}: {part['why']}" for part in failed)
            gone = f"{len(parts) - len(failed)} of {len(parts)} processes have left"
            raise XmigError(
                f"{gone}; on {', '.join(devices)} stay {left}", code="drain_incomplete",
                hint=f"make room elsewhere and drain again; {_it(devices)} cordoned",
            )  # fmt: skip
        moved = sum(part["how"] in ("move", "transfer") for part in parts)
        return {"moved": moved, "preempted": len(parts) - moved, "parts": parts}

    async def _leave(self, order: _Order, process: Process, part: Part) -> None:
        """`part` says what became of it; of all that failed, what and why."""
        if not _is_over(order.moves_end):
            await self._move_here(order, process, part)
            if not self._goes_on(order, process, part):
                return
            if not _is_over(order.moves_end):
                await self._move_to_nodes(order, process, part)
                if not self._goes_on(order, process, part):
                    return
        if order.ways.otherwise != "stay" and not _is_over(order.ends):
            await self._preempt(order, process, part)
            _keep_failure(part)
        part.setdefault("state", "failed")
        whys = dict.fromkeys(str(each["why"]) for each in part["tried"])
        part |= {"why": None if part["state"] == "succeeded" else "; ".join(whys)}

    def _goes_on(self, order: _Order, process: Process, part: Part) -> bool:
        """With the next way: this one has failed, and the process is where it was."""
        _keep_failure(part)
        if process.state in AWAY or order.operation.cancelled.is_set():
            return False
        if part["how"] == "transfer" and part.get("process_location") != "source":
            return False
        # One that was cancelled, its time was up: another way may have time of its own.
        return part["state"] == "failed" or (part["state"] == "cancelled" and order.ways.otherwise != "stay")

    async def _move_here(self, order: _Order, process: Process, part: Part) -> None:
        # A drain is the operator's word about a device, also to schedulers' jobs.
        targets = (await self._moves.plan(process, leaves_allocation=True)).targets
        best = _best(targets)
        if best is None:
            why = "; ".join(dict.fromkeys(reason.text for reason in _reasons(targets)))
            part |= {"state": "failed", "why": why or "there is no other device"}
            return
        part["how"] = "move"
        await self._moves.move_part(
            process, best.device, part, requestor=order.requestor, cancelled=order.operation.cancelled,
            ends=order.moves_end, leaves_allocation=True,
        )  # fmt: skip

    async def _move_to_nodes(self, order: _Order, process: Process, part: Part) -> None:
        """To the first that takes it: one that refuses, or where it fails, is followed by the next."""
        left = _Nodes(list(order.nodes.names), order.nodes.silent)
        while left.names and not _is_over(order.moves_end):
            places, reasons = await self._on_nodes(process, left)
            if reasons:
                part["tried"].append({"how": "transfer", "target": None, "why": "; ".join(why.text for why in reasons)})
            if not places:
                return
            node = places[process].partition("/")[0]
            left.names = left.names[left.names.index(node) + 1 :]
            part |= {"how": "transfer", "target": places[process]}
            target = places[process] if len(places) == 1 else node  # that gives each process its device
            try:
                row = await self._transfers.move(process, target, max_downtime_ms=None, requestor=order.requestor)
            except XmigError as error:
                why = f"{node}: {error.message}"
                part |= {"state": "failed", "why": why, "code": error.code, "process_location": "source"}
            else:
                cancelled = order.operation.cancelled
                await self._moves.follow_part(row, part, cancelled=cancelled, ends=order.moves_end, patience=UNDECIDED)
            if part["state"] != "failed" or not self._goes_on(order, process, part):
                return

    async def _preempt(self, order: _Order, process: Process, part: Part) -> None:
        """All of its job."""
        assert order.ways.otherwise != "stay"
        left = LONGEST if order.ends is None else max(0.1, order.ends - time.monotonic())
        part |= {"how": order.ways.otherwise, "target": None}
        try:
            row = await self._preemptions.preempt_job(
                process.job.id, process.job.uid, seconds=left, prefer=order.ways.otherwise, requestor=order.requestor
            )
        except XmigError as error:
            part |= {"state": "failed", "why": error.message, "code": error.code}
            return
        over = await self._moves.follow_part(row, part, cancelled=order.operation.cancelled)
        if over is not None and over.result is not None:
            part |= {"how": over.result.get("process_location"), "checkpoint": over.result.get("checkpoint")}


def _keep_failure(part: Part) -> None:
    if part.get("state") not in (None, "succeeded") and part.get("why"):
        tried = {"how": part["how"], "target": part["target"], "why": part["why"]}
        if tried not in part["tried"]:
            part["tried"].append(tried)


def _is_over(ends: float | None) -> bool:
    return ends is not None and time.monotonic() >= ends


def _it(devices: Sequence[str]) -> str:
    return "the device stays" if len(devices) == 1 else "the devices stay"


def _has_taken_along(part: Part, process: Process) -> bool:
    """Has its whole job gone to another node?"""
    return (part["job"], part["how"], part["state"]) == (process.job.id, "transfer", "succeeded")


def _places(plan: Elsewhere, taken: Counter[str]) -> tuple[dict[Process, str], list[Reason]]:
    """The device of each process of a job; empty: what prevents that."""
    no_room = Reason("no_room", "those before it take the room")
    if len(plan.places) == 1 and plan.targets:
        process = plan.places[0].process
        best = _best(_left_on(target, taken, sum(plans.needed_bytes(process))) for target in plan.targets)
        return ({}, _reasons(plan.targets) or [no_room]) if best is None else ({process: best.device}, [])
    reasons = {(why.code, why.text): why for place in plan.places for why in place.reasons}
    needed: Counter[str] = Counter()
    for place in plan.places:
        needed[place.device or ""] += sum(plans.needed_bytes(place.process))
    short = [
        one.device
        for one in plan.targets
        if one.room_bytes is not None and taken[one.device] and one.room_bytes < taken[one.device] + needed[one.device]
    ]
    if reasons or set(short) & set(needed):
        return {}, list(reasons.values()) or [no_room]
    return {place.process: place.device for place in plan.places if place.device is not None}, []


def _left_on(target: Target, taken: Counter[str], needed: int) -> Target:
    """Without what others take."""
    if target.room_bytes is None or not (before := taken[target.device]):
        return target
    left = max(0, target.room_bytes - before)
    reasons = target.reasons if left >= needed else [*target.reasons, Reason("no_room", "those before it take it")]
    return replace(target, room_bytes=left, reasons=reasons)


def _best(targets: Iterable[Target]) -> Target | None:
    return max((each for each in targets if each.allowed), key=lambda each: each.room_bytes or 0, default=None)


def _reasons(targets: Iterable[Target]) -> list[Reason]:
    """Why it can go nowhere, each reason once. That its own device is no target is none."""
    found = (reason for target in targets for reason in target.reasons if reason.code != "same_device")
    return list({(reason.code, reason.text): reason for reason in found}.values())
