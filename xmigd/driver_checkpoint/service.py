"""Moves, suspensions and resumptions of programs that were not started under xMIG, as operations.

They are records like those of engine=proxy (table migrations). The program gets a row among the processes, in state
`native`: nobody supervises it, and the daemon has no part in its life but this.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from sqlalchemy import Engine as Database
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from xmigd.database import models
from xmigd.database.writer import Writer
from xmigd.driver_checkpoint import node
from xmigd.driver_checkpoint.engine import Engine, Journey
from xmigd.driver_checkpoint.link import Helpers
from xmigd.driver_checkpoint.machine import Checkpointing, Kind
from xmigd.driver_checkpoint.node import Gpu, Gpus, Program
from xmigd.driver_checkpoint.plan import Known, against, against_target, make_plan, needed_bytes
from xmigd.errors import Cancelled, Conflict, Forbidden, NotFound, ProcessLocation, XmigError
from xmigd.host_memory import available_memory
from xmigd.ids import new_id
from xmigd.migrations import repository as migrations
from xmigd.migrations.places import Places
from xmigd.migrations.plan import Plan
from xmigd.operations.operation import Operation
from xmigd.operations.repository import OperationRow
from xmigd.operations.service import Operations, Outcome, interrupted
from xmigd.process.migration_events import Location, MigrationRecord, Phase, PhaseTime, Reason
from xmigd.recording.database import DatabaseRecords
from xmigd.supervisor.supervisor import Supervisor

NATIVE = "native"
OPERATION: dict[Kind, str] = {"move": "migration", "suspend": "suspension", "resume": "resumption"}
PREFIX = "pid:"  # what a program is called by those who ask


class DriverMoves:
    def __init__(
        self,
        *,
        operations: Operations,
        writer: Writer,
        readers: Database,
        folder: Path,
        known: Callable[[], Awaitable[Known]],
        engine_options: dict[str, Any] | None = None,
    ) -> None:
        self._operations = operations
        self._writer = writer
        self._records = DatabaseRecords(writer)
        self._readers = readers
        self._known = known
        self._options = engine_options or {}
        self._helpers = Helpers(folder)

    def leave(self) -> None:
        """The daemon ends. Calls under way do not: the next daemon's helper waits for them."""
        self._helpers.leave()

    # --- what is requested --------------------------------------------------------------------------------------------

    async def plan(self, process: str, uid: int | None) -> Plan:
        """`process`: pid:1234. `uid`: who asks; None: an operator. Changes nothing."""
        program = await _find(process, uid)
        gpus = await asyncio.to_thread(node.look)
        return make_plan(program, gpus, available_memory(), await self._known())

    async def move(self, process: str, target: str, *, uid: int | None, requestor: str) -> OperationRow:
        """Raises Conflict with every reason against it."""
        program = await _find(process, uid)
        gpus = await asyncio.to_thread(node.look)
        found = _gpu(gpus, target)
        known = await self._known()
        reasons = against(program, gpus, available_memory(), known, "move")
        _refuse([*reasons, *against_target(program, gpus, found, known)])
        source = gpus.of(program.pid)[0]
        journey = Journey("move", program, source.uuid, found.uuid, needed_bytes(program, gpus))
        return await self._start(journey, source.device, target, requestor)

    async def suspend(self, process: str, *, uid: int | None, requestor: str) -> OperationRow:
        """Its device memory goes to the host's, and its GPU is free."""
        program = await _find(process, uid)
        gpus = await asyncio.to_thread(node.look)
        _refuse(against(program, gpus, available_memory(), await self._known(), "suspend"))
        source = gpus.of(program.pid)[0]
        journey = Journey("suspend", program, source.uuid, source.uuid, needed_bytes(program, gpus))
        return await self._start(journey, source.device, "host", requestor)

    async def resume(self, process: str, device: str | None, *, uid: int | None, requestor: str) -> OperationRow:
        """Of one that was suspended here, or had to be left in the host's memory."""
        program = await _find(process, uid)
        last = await asyncio.to_thread(self._last, program)
        if last is None or last["location"] != "host":
            raise Conflict(f"{process} was not suspended by xMIG", code="not_suspended",
                           hint="xmigctl suspend does it", phase="planning")  # fmt: skip
        gpus = await asyncio.to_thread(node.look)
        source, target = _gpu(gpus, last["device"]), _gpu(gpus, device or last["device"])
        known = await self._known()
        reasons = against(program, gpus, available_memory(), known, "resume")
        needed = last["bytes"] or 0
        if target.free_bytes < needed:
            reasons.append(Reason("no_room", f"{target.device} has no room for it"))
        if target.name != source.name:
            reasons.append(Reason("other_kind", f"{target.device} is a {target.name}, it was on a {source.name}"))
        _refuse([*reasons, *(r for r in against_target(program, gpus, target, known) if r.code != "no_room")])
        journey = Journey("resume", program, source.uuid, target.uuid, needed)
        return await self._start(journey, "host", target.device, requestor)

    # --- the work ---------------------------------------------------------------------------------------------------

    async def _start(self, journey: Journey, source: str, target: str, requestor: str) -> OperationRow:
        device = source if source.startswith("cuda") else target
        process, job = await self._adopt(journey.program, device)
        record = MigrationRecord(
            id=new_id(), operation=new_id(), kind=journey.kind, process=process, source=source, target=target,
            engine="driver", started=time.monotonic_ns(), total_bytes=journey.needed_bytes, device=device,
            location="host" if journey.kind == "resume" else "device",
        )  # fmt: skip

        async def work(operation: Operation) -> dict[str, Any]:
            return await self._carry_out(journey, record, operation)

        request = {"engine": "driver", "migration": record.id, "source": journey.source, "target": journey.target,
                   "bytes": journey.needed_bytes, "program": asdict(journey.program)}  # fmt: skip
        return await self._operations.start(
            OPERATION[journey.kind], subject=("process", process), job_id=job, owner=journey.program.uid,
            requestor=requestor, work=work, request=request, id=record.operation, also=migrations.saving(record),
        )  # fmt: skip

    async def _carry_out(self, journey: Journey, record: MigrationRecord, operation: Operation) -> dict[str, Any]:
        helper = self._helpers.of(journey.program.uid)
        operation.progress("preparing", migration=record.id, total_bytes=record.total_bytes)
        try:
            await helper.start()
        except XmigError as error:
            record.state, record.code, record.error = "failed", error.code, error.message
            record.ended = time.monotonic_ns()
            self._records.migration(record)
            raise
        record.setup_ms = helper.setup_ms

        def changed(seen: Journey) -> None:
            if operation.cancelled.is_set():
                seen.machine.cancel("somebody cancelled it")
            elif operation.row.may_cancel and not seen.machine.may_cancel and seen.machine.outcome == "running":
                with contextlib.suppress(Cancelled):
                    operation.point_of_no_return("the driver is restoring it")
            _describe(record, seen)
            self._records.migration(record)
            operation.progress(seen.machine.phase, migration=record.id, total_bytes=record.total_bytes)

        machine = await Engine(helper, **self._options).travel(journey, changed)
        self._end(record, journey)
        return _answer(record, machine)

    def _end(self, record: MigrationRecord, journey: Journey) -> None:
        machine = journey.machine
        record.state = machine.outcome
        record.location = _location(machine)
        record.code, record.error = machine.code, machine.why
        record.ended = time.monotonic_ns()
        if machine.location == "target":
            record.device = record.target
        if journey.locked_at is not None and journey.unlocked_at is not None:
            record.downtime_ms = (journey.unlocked_at - journey.locked_at) / 1e6
        _describe(record, journey)
        self._records.migration(record)

    # --- after a restart --------------------------------------------------------------------------------------------

    async def resolve(self, operation: Operation) -> Outcome:
        """An operation that an earlier daemon began: whatever the driver had done is taken back."""
        request = operation.request
        kind: Kind = next(kind for kind, name in OPERATION.items() if name == operation.row.kind)
        journey = Journey(kind, Program(**request["program"]), request["source"], request["target"], request["bytes"])

        def read() -> MigrationRecord | None:
            with Session(self._readers) as session:
                row = session.scalars(
                    select(models.Migration).where(models.Migration.id == request["migration"])
                ).first()
                if row is None:
                    return None
                return MigrationRecord(
                    id=row.id, kind=cast(Any, row.kind), process=row.process_id, operation=operation.id,
                    source=row.source, target=row.target, engine=row.engine,
                    started=time.monotonic_ns() - int((time.time() - row.started_at) * 1e9),
                    device=row.source if row.source.startswith("cuda") else row.target,
                )  # fmt: skip

        record = await asyncio.to_thread(read)
        if record is None:  # it had not begun
            return interrupted(operation.row, "source")
        helper = self._helpers.of(journey.program.uid)
        machine = await Engine(helper, **self._options).travel(journey, lambda _: None, abandoned=True)
        if machine.location == "source":
            # It may have been restored on the target before the daemon ended: the driver says where it runs.
            gpus = await asyncio.to_thread(node.look)
            if any(gpu.uuid == journey.target for gpu in gpus.of(journey.program.pid)) and kind == "move":
                machine.outcome, machine.location, machine.why, machine.code = "done", "target", None, None
        self._end(record, journey)
        if machine.outcome == "done":
            return Outcome(state="succeeded", result=_answer(record, machine))
        return interrupted(operation.row, _where(machine))

    # --- rows -------------------------------------------------------------------------------------------------------

    async def _adopt(self, program: Program, device: str) -> tuple[str, str]:
        """Its row among the processes, and its job's: an old one of the same process, or new ones."""

        def write(session: Session) -> tuple[str, str]:
            found = session.scalars(_same(program)).first()
            if found is not None:
                return found.id, found.job_id
            name = program.command.split(" ", 1)[0].rpartition("/")[2][:255] or "program"
            job = models.Job(
                id=new_id(), name=name, command=program.command[:4096], uid=program.uid, device=None, registered=False,
                token_hash=None, hang_timeout=None, created_at=time.time(),
            )  # fmt: skip
            process = models.Process(
                id=new_id(), job_id=job.id, pid=program.pid, start_time=program.start_time, uid=program.uid,
                gid=program.gid, command=program.command[:4096], device=device, state=NATIVE,
                why="not started under xMIG", server_pid=None, server_start_time=None, generation=0,
                started_at=time.time(), ended_at=None,
            )  # fmt: skip
            session.add(job)
            session.flush()
            session.add(process)
            return process.id, job.id

        return await self._writer.write("native.adopt", write)

    def _last(self, program: Program) -> dict[str, Any] | None:
        """Where it is, by the last record."""
        with Session(self._readers) as session:
            row = session.scalars(_same(program)).first()
            if row is None:
                return None
            query = select(models.Migration).where(models.Migration.process_id == row.id)
            record = session.scalars(query.order_by(models.Migration.number.desc())).first()
            return {"location": row.location, "device": row.device, "bytes": record.total_bytes if record else None}

    async def forget_the_dead(self) -> None:
        """At start: programs that have ended since."""

        def write(session: Session) -> None:
            for row in session.scalars(select(models.Process).where(models.Process.state == NATIVE)):
                found = node.program(row.pid)
                if found is None or found.start_time != row.start_time:
                    ended = {"state": "ended", "why": "the program has ended", "ended_at": time.time()}
                    session.execute(update(models.Process).where(models.Process.id == row.id).values(**ended))

        await self._writer.write("native.forget", write)


def knowledge(places: Places, supervisor: Supervisor) -> Callable[[], Awaitable[Known]]:
    """What plans need of xMIG's own devices and processes."""

    async def known() -> Known:
        devices = await places.known()
        processes = supervisor.processes.values()
        return Known(
            cordoned={place.id: place.cordon_reason for place in devices if place.cordoned},
            failing={place.id: place.why for place in devices if not place.healthy},
            managed={pid for p in processes for pid in (p.row.pid, p.server_pid) if pid is not None},
        )

    return known


def _same(program: Program) -> Any:
    return select(models.Process).where(
        models.Process.pid == program.pid, models.Process.start_time == program.start_time,
        models.Process.state == NATIVE,
    )  # fmt: skip


async def _find(process: str, uid: int | None) -> Program:
    number = process.removeprefix(PREFIX)
    program = await asyncio.to_thread(node.program, int(number)) if number.isdecimal() else None
    if program is None:
        raise NotFound(f"there is no program {process[:64]!r}", hint="engine=driver names it by its pid: pid:1234")
    if uid is not None and uid != program.uid:
        raise Forbidden(f"this belongs to user {program.uid}, not to user {uid}")
    return program


def _gpu(gpus: Gpus, device: str) -> Gpu:
    found = next((gpu for gpu in gpus.all if gpu.device == device), None)
    if found is None:
        raise NotFound(f"this node has no GPU {device}", code="no_such_device",
                       hint="xmigctl migrate --plan lists the targets")  # fmt: skip
    return found


def _refuse(reasons: list[Reason]) -> None:
    if reasons:
        raise Conflict(
            "; ".join(reason.text for reason in reasons), code=reasons[0].code, phase="planning",
            process_location="source", hint="xmigctl migrate --plan says what is possible",
        )  # fmt: skip


def _describe(record: MigrationRecord, journey: Journey) -> None:
    record.phase = cast(Phase, journey.machine.phase)
    record.phases = [PhaseTime(name, at) for name, at in journey.phases]
    if journey.machine.outcome == "running":
        record.location = "moving"


def _location(machine: Checkpointing) -> Location:
    return "device" if machine.location in ("source", "target") else cast(Location, machine.location)


def _where(machine: Checkpointing) -> ProcessLocation:
    return machine.location


def _answer(record: MigrationRecord, machine: Checkpointing) -> dict[str, Any]:
    """An operation's result. Raises what it failed with."""
    if machine.outcome == "done":
        names = ("source", "target", "downtime_ms", "setup_ms", "total_bytes")
        return {"migration": record.id, "process_location": _where(machine)} | {n: getattr(record, n) for n in names}
    if machine.outcome == "cancelled":
        raise Cancelled("it was cancelled", process_location=_where(machine))
    hints = {
        "host": "make room on a GPU, then xmigctl resume", "lost": "start it again: the driver cannot give it back",
    }  # fmt: skip
    raise Conflict(
        machine.why or "it failed", code=machine.code, process_location=_where(machine),
        hint=hints.get(machine.location, "the program goes on where it was"),
    )  # fmt: skip
