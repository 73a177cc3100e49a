"""Moves, suspensions and resumptions as operations."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from xmigd import log
from xmigd.database import models
from xmigd.driver_checkpoint.service import DriverMoves
from xmigd.errors import Cancelled, Conflict, NotFound, ProcessLocation, XmigError
from xmigd.ids import new_id
from xmigd.jobs import repository as jobs
from xmigd.migrations import estimate, repository
from xmigd.migrations import plan as plans
from xmigd.migrations.estimate import Estimate, MoveSeen, SnapshotSeen
from xmigd.migrations.places import Places
from xmigd.operations.operation import Operation
from xmigd.operations.repository import OperationRow
from xmigd.operations.service import Operations, Outcome, interrupted
from xmigd.process.migration_events import Kind, MigrationRecord, Reason
from xmigd.processes import repository as processes
from xmigd.supervisor.joining import Join
from xmigd.supervisor.node_messages import To
from xmigd.supervisor.process import Process
from xmigd.supervisor.state import now
from xmigd.supervisor.supervisor import Supervisor, over

logger = log.get("migrations")

OPERATION: dict[Kind, str] = {"move": "migration", "suspend": "suspension", "resume": "resumption"}
PREEMPTION = "preemption"  # operation that consists of others (xmigd/scheduling/service.py)
SNAPSHOTS_SEEN, MOVES_SEEN = 10, 100  # that an estimate looks at
RESOLVED_WITHIN = 60.0  # seconds after a start in which it turns out who has a process that was moving


class Turns(Protocol):
    """Jobs that wait in host memory for their turn on a device (sharing/rotation.py)."""

    def waits(self, job: str) -> float | None: ...

    def leave(self, job: str) -> None:
        """It gets no more turns until somebody resumes it."""


class Moves:
    def __init__(
        self,
        *,
        supervisor: Supervisor,
        operations: Operations,
        readers: Engine,
        folder: Path,
        places: Places,
        native: DriverMoves | None = None,
    ) -> None:
        self._supervisor = supervisor
        self._operations = operations
        self._readers = readers
        self._folder = folder
        self._places = places
        self._native = native
        self.turns: Turns | None = None
        self._under_way: dict[str, _Part] = {}  # by process, from the request on until the operation is over
        self._over = asyncio.Condition()  # one of them is
        self._joining: dict[asyncio.Task[None], Join] = {}
        supervisor.joins.add(self._join)
        for kind in OPERATION.values():
            operations.register(kind, self._resolve)

    # --- what is requested --------------------------------------------------------------------------------------------

    async def plan(self, process: Process, engine: str = "proxy", *, leaves_allocation: bool = False) -> plans.Plan:
        """Every target, with what prevents it. Changes nothing."""
        downtime = await asyncio.to_thread(self.estimate, process)
        stays = None if leaves_allocation else await asyncio.to_thread(self._in_allocation, process)
        return plans.make_plan(process, await self._places.known(), engine=engine, downtime=downtime, stays=stays)

    async def move(
        self, process: Process, target: str, *, engine: str, max_downtime_ms: float | None, requestor: str,
        leaves_allocation: bool = False,
    ) -> OperationRow:  # fmt: skip
        """`leaves_allocation`: also a job that a scheduler has given its devices. Raises Conflict with the plan's
        reason."""
        known = {place.id: place for place in await self._places.known()}
        reasons = plans.judge(process, target, known, plans.general(process, engine, "move")).reasons
        if not leaves_allocation and (stays := await asyncio.to_thread(self._in_allocation, process)) is not None:
            reasons.append(stays)
        _refuse(process, reasons)
        expected = await asyncio.to_thread(self.estimate, process)
        record = _record(process, "move", process.row.device, target)
        record.max_downtime_ms = max_downtime_ms
        if expected is not None:
            record.expected_downtime_ms, record.expected_downtime_basis = expected.ms, expected.basis
        return await self._start(process, "move", [[_Part(process, record)]], requestor)

    async def against_suspension(self, processes: Iterable[Process], to: str) -> list[Reason]:
        """What prevents suspending all of these now, and with each of them all ranks of its group."""
        ranks = [one for group in self._groups_of(processes) for one in group]
        return await asyncio.to_thread(plans.against_suspension, ranks, to, self._folder)

    async def suspend(
        self, processes: Iterable[Process], to: To, *, requestor: str, joins: bool = False
    ) -> OperationRow:  # fmt: skip
        """With each of them all ranks of its group, also those of other nodes; `joins`: one of these has begun it. One
        that waits for its turn stays where it is, and gets none. Raises Conflict: one cannot be, and none is."""
        groups = [list(processes)] if joins else self._groups_of(processes)
        ranks = [one for group in groups for one in group]
        first = ranks[0]
        if to == "host" and len(ranks) == 1 and self._waits_for_its_turn(first):
            return await self._stay(first, requestor)
        _refuse(first, await asyncio.to_thread(plans.against_suspension, ranks, to, self._folder))
        parts = [[_Part(one, _record(one, "suspend", one.row.device, to)) for one in group] for group in groups]
        return await self._start(first, "suspend", parts, requestor, joins=joins)

    def _waits_for_its_turn(self, process: Process) -> bool:
        asleep = process.state == "suspended" and process.machine.where == "host"
        return asleep and self.turns is not None and self.turns.waits(process.job.id) is not None

    async def _stay(self, process: Process, requestor: str) -> OperationRow:
        """It is suspended already, for others: from now on by request."""

        async def work(operation: Operation) -> dict[str, Any]:
            self.stays_away(process.job.id)
            return {
                "source": process.row.device, "target": "host", "downtime_ms": None, "total_bytes": None,
                "process_location": "host",
            }  # fmt: skip

        return await self._operations.start(
            OPERATION["suspend"], subject=("process", process.row.id), job_id=process.job.id, owner=process.job.uid,
            requestor=requestor, work=work, cancellable=False, why_not="it is suspended already",
        )  # fmt: skip

    async def resume(
        self, processes: Iterable[Process], devices: Sequence[str], *, requestor: str, paused: bool = False,
        wanted: Callable[[], bool] = lambda: True, joins: bool = False, leaves_allocation: bool = False,
    ) -> OperationRow:  # fmt: skip
        """Each on its own device, or on these in turn; with each all that were suspended with it, also those of other
        nodes, on their devices; `joins`: one of these has begun it. `leaves_allocation`: as of a move. `paused`: they
        were suspended for a moment only, so their devices keep them, even those that take no new process. `wanted` is
        called when nothing else can begin any more before this does. Raises Conflict: one cannot be, and none is; or it
        is not wanted."""
        groups = self._groups_of(processes)
        ranks = [one for group in groups for one in group]
        first = ranks[0]
        for one in ranks:
            if (why := one.moving.why_not("resume")) is not None:
                _refuse(first, [_of_rank(one, why, len(ranks))])
        targets = {
            one.row.id: devices[number % len(devices)] if devices else one.row.device
            for number, one in enumerate(ranks)
        }
        elsewhere = [one for one in ranks if targets[one.row.id] != one.row.device]
        for one in () if leaves_allocation else elsewhere:
            if (stays := await asyncio.to_thread(self._in_allocation, one)) is not None:
                _refuse(first, [_of_rank(one, stays, len(ranks))])
        known = {place.id: place for place in await self._places.known()}
        if not wanted():  # nothing waits from here on until the operation has its subject
            raise Conflict("it is to stay suspended", code="suspended")
        for one in ranks:
            own = plans.general(one, "proxy", "resume")
            reasons = plans.judge(one, targets[one.row.id], known, own).reasons
            _refuse(one, [why for why in reasons if not paused or why.code not in ("cordoned", "failing")])
        _refuse(first, plans.against_packing([(one, targets[one.row.id]) for one in ranks], known))
        parts = [
            [_Part(one, _record(one, "resume", one.machine.where, targets[one.row.id])) for one in group]
            for group in groups
        ]
        return await self._start(first, "resume", parts, requestor, joins=joins)

    async def suspend_job(self, processes: list[Process], to: To, *, requestor: str) -> OperationRow:
        """Those of a job that are not suspended yet."""
        awake = [one for one in processes if one.state != "suspended"]
        return await self.suspend(awake or processes, to, requestor=requestor)

    async def resume_job(
        self, processes: list[Process], devices: Sequence[str], *, requestor: str,
        wanted: Callable[[], bool] = lambda: True, leaves_allocation: bool = False,
    ) -> OperationRow:  # fmt: skip
        """Those of a job that are suspended."""
        asleep = [one for one in processes if one.state == "suspended"]
        return await self.resume(
            asleep or processes, devices, requestor=requestor, wanted=wanted, leaves_allocation=leaves_allocation
        )

    def stays_away(self, job: str) -> None:
        """Somebody wants it to be suspended: if it waits for its turn on a device, it waits no longer."""
        if self.turns is not None:
            self.turns.leave(job)

    def _groups_of(self, processes: Iterable[Process]) -> list[list[Process]]:
        """What is suspended or resumed as one, for each of them once."""
        groups: list[list[Process]] = []
        seen: set[str] = set()
        for process in processes:
            if process.row.id not in seen:
                groups.append(self._supervisor.together(process))
                seen |= {one.row.id for one in groups[-1]}
        return groups

    def estimate(self, process: Process) -> Estimate | None:
        """How long it will stand still if it is moved. Reads the database: not for the event loop's thread."""
        kind = process.row.device.partition(":")[0]
        with Session(self._readers) as session:
            rows = processes.segments(session, process.row.id, SNAPSHOTS_SEEN)
            snapshots = [SnapshotSeen(row.copied_bytes, row.ms) for row in rows]
            moves = [
                MoveSeen(each["downtime_ms"], each["iterations"][-1]["copied_bytes"], each["bytes_per_s"])
                for each in repository.page(session, state="done", limit=MOVES_SEEN)
                if each["kind"] == "move" and each["source"].partition(":")[0] == kind and each["engine"] == "proxy"
                and each["downtime_ms"] is not None and each["iterations"] and each["bytes_per_s"]
            ]  # fmt: skip
        return estimate.downtime(kind, snapshots, moves)

    # --- the work ---------------------------------------------------------------------------------------------------

    def _in_allocation(self, process: Process) -> Reason | None:
        """Of a job that a scheduler has given its devices, as it is now. Reads the database."""
        with Session(self._readers) as session:
            row = jobs.find(session, process.job.id)
        whom = None if row is None else jobs.allocated_to(row.external_id)
        return None if whom is None else plans.in_allocation(whom)

    async def _start(
        self, process: Process, kind: Kind, groups: list[list[_Part]], requestor: str, *, joins: bool = False
    ) -> OperationRow:  # fmt: skip
        """One operation of all of them. `joins`: another node has begun it, for its ranks."""
        parts = [part for group in groups for part in group]
        records = [part.record for part in parts]
        id = new_id()
        for record in records:
            record.operation = id

        async def work(operation: Operation) -> dict[str, Any]:
            for record in records:
                record.started = now()
            try:
                for group in groups:
                    self._with_others(kind, group, joins=joins)
                return await _carry_out(parts, operation)
            except XmigError as error:
                for part in parts:
                    if part.record.state == "running":  # it could not even begin
                        failed = over(part.record, "failed", part.process.location, error.code, error.message)
                        part.process.records.migration(failed)
                        if kind != "move":
                            self._supervisor.scopes.cannot_join(kind, part.process, error.message)
                raise
            finally:
                await self._are_over(parts)

        def also(session: Session) -> None:
            for record in records:
                repository.saving(record)(session)

        for part in parts:  # both were looked at before either began: two on different nodes, too
            other = self._under_way.get(part.process.row.id)
            if other is not None and other.record.state == "running":
                raise Conflict(
                    f"a {other.record.kind} of process {part.process.row.id[:12]} is under way", code="already_moving",
                    phase="planning", process_location=part.process.moving.place, operation=other.record.operation,
                )  # fmt: skip
        for part in parts:
            self._under_way[part.process.row.id] = part
        try:
            return await self._operations.start(
                OPERATION[kind], subject=("process", process.row.id), job_id=process.row.job, owner=process.job.uid,
                requestor=requestor, work=work, request={"migrations": [record.id for record in records]}, id=id,
                also=also,
            )  # fmt: skip
        except XmigError:  # it has not begun
            await self._are_over(parts)
            raise

    def _with_others(self, kind: Kind, group: Sequence[_Part], *, joins: bool) -> None:
        """Of their group, if they are one: of this node, and of others. Raises Conflict, Unavailable: these cannot."""
        processes = [part.process for part in group]
        if kind == "resume":
            together = self._supervisor.resume_together(processes, joins=joins)
            for part in group:
                part.ranks = together
        elif kind == "suspend" and not joins:
            self._supervisor.suspend_together(processes, "file" if group[0].record.target == "file" else "host")

    async def _are_over(self, parts: Sequence[_Part]) -> None:
        for part in parts:
            if self._under_way.get(part.process.row.id) is part:
                del self._under_way[part.process.row.id]
        async with self._over:
            self._over.notify_all()

    def _join(self, join: Join) -> None:
        if join in self._joining.values():
            return  # it waits already
        task = asyncio.get_running_loop().create_task(self._joins(join))
        self._joining[task] = join
        task.add_done_callback(self._joining.pop)

    async def _joins(self, join: Join) -> None:
        """What is under way of these processes is waited for, unless that is what is requested."""
        left = list(join.processes)
        while left := await self._left(left, join.what):
            try:
                if join.what == "suspend":
                    await self.suspend(left, join.to, requestor=f"node {join.node}", joins=True)
                else:
                    await self.resume(left, [], requestor=f"node {join.node}", joins=True)
            except XmigError as error:
                if any(one.row.id in self._under_way for one in left):
                    continue  # somebody has requested something here, too, and was first: perhaps just this
                logger.warning("ranks do not join those of other nodes", what=join.what, why=error.message)
                for process in left:
                    self._supervisor.scopes.cannot_join(join.what, process, error.message)
            return

    async def _left(self, processes: Sequence[Process], what: Kind) -> list[Process]:
        """Those of which that is not under way, once nothing else is."""
        left = list(processes)
        async with self._over:
            while left := [one for one in left if not self._does(one, what)]:
                if not any(one.row.id in self._under_way for one in left):
                    break
                await self._over.wait()
        return left

    def _does(self, process: Process, what: Kind) -> bool:
        part = self._under_way.get(process.row.id)
        record = None if part is None else part.record
        return record is not None and record.kind == what and record.state == "running" and (
            record.phase != "rolling_back"
        )  # fmt: skip

    async def move_part(
        self, process: Process, target: str, part: dict[str, Any], *, requestor: str, cancelled: asyncio.Event,
        ends: float | None = None, leaves_allocation: bool = False,
    ) -> None:  # fmt: skip
        """A move that is a part of an operation, to its end: it is cancelled with that, and at `ends` (monotonic
        seconds). `part` says what became of it: `state`, and of one that failed `why` and `code`. Raises nothing for
        that."""
        try:
            row = await self.move(
                process, target, engine="proxy", max_downtime_ms=None, requestor=requestor,
                leaves_allocation=leaves_allocation,
            )  # fmt: skip
        except XmigError as error:
            part |= {"state": "failed", "why": str(error), "code": error.code}
            return
        part["target"] = target
        await self.follow_part(row, part, cancelled=cancelled, ends=ends)

    async def follow_part(
        self, row: OperationRow, part: dict[str, Any], *, cancelled: asyncio.Event, ends: float | None = None,
        patience: float | None = None,
    ) -> OperationRow | None:  # fmt: skip
        """The same of any operation that is a part of another one. `patience`: seconds for which one that cannot be
        cancelled any more is waited for; None: until it is over. Returns it if it is over."""
        part |= {"operation": row.id, "state": row.state}
        ended = asyncio.ensure_future(self._operations.ended(row))
        cancel = asyncio.ensure_future(cancelled.wait())
        left = None if ends is None else max(0.0, ends - time.monotonic())
        await asyncio.wait([ended, cancel], timeout=left, return_when=asyncio.FIRST_COMPLETED)
        cancel.cancel()
        late = not ended.done() and not cancelled.is_set()
        if not ended.done():
            with contextlib.suppress(XmigError):  # past the point of no return, or over
                self._operations.cancel(row.id)
            await asyncio.wait([ended], timeout=patience)
        if not ended.done():
            ended.cancel()
            part |= {
                "state": "undecided", "code": None,
                "why": "it is past its point of no return, and not over: its operation goes on",
            }  # fmt: skip
            return None
        row = await ended
        problem = row.error or {}
        part |= {
            "state": row.state, "why": problem.get("detail"), "code": problem.get("code"),
            "process_location": problem.get("process_location"),
        }  # fmt: skip
        if late and row.state != "succeeded":
            part["why"] = "the time was up while it was moved; it is where it was"
        return row

    # --- after a restart --------------------------------------------------------------------------------------------

    async def _resolve(self, operation: Operation) -> Outcome:
        """By what the process's servers reported to the new daemon (xmigd/supervisor/supervisor.py)."""
        if operation.request.get("engine") == "driver" and self._native is not None:
            return await self._native.resolve(operation)

        def read() -> list[dict[str, Any]]:
            found = []
            with Session(self._readers) as session:
                for name in operation.request.get("migrations", []):
                    for row in repository.page(session, migration_id=name):
                        process = session.get(models.Process, row["process_id"])
                        found.append(row | {"process_over": process is None or process.state in ("ended", "lost")})
            return found

        deadline = time.monotonic() + RESOLVED_WITHIN
        rows = await asyncio.to_thread(read)
        while any(r["state"] == "running" and not r["process_over"] for r in rows) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
            rows = await asyncio.to_thread(read)
        if not rows:
            return interrupted(operation.row)
        open_or_failed = [row for row in rows if row["state"] != "done"]
        if not open_or_failed:
            return Outcome(state="succeeded", result=public(rows))
        row = open_or_failed[0]
        location = where(row["process_location"], row["kind"], moved=False)
        return interrupted(operation.row, "lost" if row["process_over"] else location)


@dataclass(slots=True)
class _Part:
    """Of an operation."""

    process: Process
    record: MigrationRecord
    ranks: bool = False  # of a resumption: it waits for the others of its group


def _record(process: Process, kind: Kind, source: str, target: str) -> MigrationRecord:
    return MigrationRecord(
        id=new_id(), kind=kind, process=process.row.id, source=source, target=target, started=now(),
        location=process.location, device=process.row.device,
    )  # fmt: skip


async def _carry_out(parts: list[_Part], operation: Operation) -> dict[str, Any]:
    """If one cannot, none of those that do it with it does."""
    latest = {part.record.id: part.record for part in parts}

    def changed(part: _Part, seen: MigrationRecord) -> None:
        latest[seen.id] = seen
        move = part.process.machine.move
        why = None if move is None or move.record.id != seen.id else move.may_cancel
        if why is not None and operation.row.may_cancel and seen.state == "running":
            with contextlib.suppress(Cancelled):
                operation.point_of_no_return(why)
        phase: str = seen.phase
        if seen.state != "running":
            if len(parts) > 1 and any(one.state == "running" for one in latest.values()):
                return
            phase = "done" if seen.state == "done" else _failed_in(seen)
        operation.progress(
            phase, migration=seen.id, iteration=len(seen.iterations) or None,
            total_bytes=_sum(one.total_bytes for one in latest.values()),
            processed_bytes=_sum(one.processed_bytes for one in latest.values()), bytes_per_s=seen.bytes_per_s,
            dirty_bytes_per_s=seen.dirty_bytes_per_s, expected_downtime_ms=seen.expected_downtime_ms, path=seen.path,
        )  # fmt: skip

    def give_up(why: str) -> None:
        for part in parts:
            move = part.process.machine.move
            if move is not None and move.record.id == part.record.id:  # else it is another operation's
                part.process.moving.cancel(why)

    running = [
        asyncio.ensure_future(one.process.moving.run(one.record, partial(changed, one), ranks=one.ranks))
        for one in parts
    ]
    cancelled = asyncio.ensure_future(operation.cancelled.wait())
    try:
        left: set[asyncio.Future[Any]] = set(running)
        while left:
            over, _ = await asyncio.wait({*left, cancelled}, return_when=asyncio.FIRST_COMPLETED)
            left -= over
            if cancelled in over:
                give_up("somebody cancelled it")
                await asyncio.wait(left or running)
                break
            if any(one.exception() is not None for one in over):  # it could not begin
                give_up("another rank could not begin")
        ended = [await one for one in running]
    finally:
        for one in running:
            one.cancel()
        cancelled.cancel()
    return _outcome(parts, ended)


def _outcome(parts: list[_Part], ended: list[MigrationRecord]) -> dict[str, Any]:
    """Raises Conflict or Cancelled. Programs that ended meanwhile do not count where there are others."""
    done = [one for one in ended if one.state == "done"]
    failed = [one for one in ended if one.state != "done" and not (done and one.code == "program_exited")]
    if not failed:
        return public([_shown(one) for one in done]) | {
            "process_location": where(done[0].location, done[0].kind, moved=True)
        }
    cause = next((one for one in failed if one.code not in ("group_refused", "cancelled")), failed[0])
    process = next(part.process for part in parts if part.record.id == cause.id)
    location: ProcessLocation = where(cause.location, cause.kind, moved=False)
    if process.state in ("losing", "lost"):
        location = "lost"
    if cause.state == "cancelled":
        raise Cancelled("it was cancelled", process_location=location)
    why = cause.error or "it failed"
    if len(parts) > 1:
        why = f"process {cause.process[:12]}: {why}"
    raise Conflict(why, code=cause.code, phase=_failed_in(cause), process_location=location)


def where(location: str, kind: str, *, moved: bool) -> ProcessLocation:
    """As a problem says it."""
    if location in ("host", "file", "lost"):
        return location  # type: ignore[return-value]
    return "target" if moved else "source"


def _shown(record: MigrationRecord) -> dict[str, Any]:
    """As its row, as far as a result needs it."""
    return {
        "id": record.id, "process_id": record.process, "source": record.source, "target": record.target,
        "downtime_ms": record.downtime_ms, "expected_downtime_ms": record.expected_downtime_ms,
        "setup_ms": record.setup_ms, "total_bytes": record.total_bytes, "processed_bytes": record.processed_bytes,
        "path": record.path, "iterations": record.iterations,
    }  # fmt: skip


def public(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Migrations' rows as an operation's result: of several ranks the longest times, and bytes of all."""
    first = rows[0]
    result = {name: first[name] for name in ("source", "target", "expected_downtime_ms", "path")}
    result |= {name: _most(row[name] for row in rows) for name in ("downtime_ms", "setup_ms")}
    result |= {name: _sum(row[name] for row in rows) for name in ("total_bytes", "processed_bytes")}
    result |= {"migration": first["id"], "rounds": len(first["iterations"])}
    if len(rows) > 1:
        names = ("process_id", "source", "target", "downtime_ms", "total_bytes")
        result["ranks"] = [{"migration": row["id"]} | {name: row[name] for name in names} for row in rows]
    return result


# What to do about states of the process itself, which no target helps against.
HINTS = {
    "suspended": "xmigctl resume lets it go on, with --device on another device",
    "not_suspended": "xmigctl ps says in which state it is",
    "not_running": "xmigctl ps says in which state it is",
    "already_moving": "xmigctl op list --state running has it",
    "program_exited": "",
}


def _most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _of_rank(process: Process, why: Reason, ranks: int) -> Reason:
    """Why not, where it may be another process than the one that somebody named."""
    return why if ranks == 1 else Reason(why.code, f"process {process.row.id[:12]} of its group: {why.text}")


def _failed_in(record: MigrationRecord) -> str:
    names = [phase.name for phase in record.phases if phase.name not in ("over", "rolling_back")]
    return names[-1] if names else "planning"


def _refuse(process: Process, reasons: list[Reason]) -> None:
    """Raises Conflict with the first reason, and where the process is."""
    if not reasons:
        return
    if reasons[0].code == "no_such_device":
        raise NotFound(reasons[0].text, code="no_such_device", hint="xmigctl device list has them")
    location: ProcessLocation = where(process.location, "", moved=False)
    raise Conflict(
        "; ".join(reason.text for reason in reasons), code=reasons[0].code, phase="planning",
        process_location=location, hint=HINTS.get(reasons[0].code, "xmigctl migrate --plan says what is possible"),
    )  # fmt: skip
