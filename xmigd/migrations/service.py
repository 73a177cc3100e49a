"""Moves, suspensions, resumptions and drains as operations."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from xmigd.database import models
from xmigd.driver_checkpoint.service import DriverMoves
from xmigd.errors import Cancelled, Conflict, NotFound, ProcessLocation, XmigError
from xmigd.ids import new_id
from xmigd.migrations import estimate, repository
from xmigd.migrations import plan as plans
from xmigd.migrations.estimate import Estimate, MoveSeen, SnapshotSeen
from xmigd.migrations.places import Places
from xmigd.operations.operation import Operation
from xmigd.operations.repository import OperationRow
from xmigd.operations.service import Operations, Outcome, interrupted
from xmigd.process.migration_events import Kind, MigrationRecord, Reason
from xmigd.processes import repository as processes
from xmigd.supervisor.process import Process, now
from xmigd.supervisor.supervisor import Supervisor, over

OPERATION: dict[Kind, str] = {"move": "migration", "suspend": "suspension", "resume": "resumption"}
SNAPSHOTS_SEEN, MOVES_SEEN = 10, 100  # that an estimate looks at
RESOLVED_WITHIN = 60.0  # seconds after a start in which it turns out who has a process that was moving


class Moves:
    def __init__(
        self,
        *,
        supervisor: Supervisor,
        operations: Operations,
        readers: Engine,
        folder: Path,
        places: Places,
        devices: list[str],
        native: DriverMoves | None = None,
    ) -> None:
        self._supervisor = supervisor
        self._operations = operations
        self._readers = readers
        self._folder = folder
        self._places = places
        self._devices = devices
        self._native = native
        for kind in OPERATION.values():
            operations.register(kind, self._resolve)

    # --- what is requested --------------------------------------------------------------------------------------------

    async def plan(self, process: Process, engine: str = "proxy") -> plans.Plan:
        """Every target, with what prevents it. Changes nothing."""
        downtime = await asyncio.to_thread(self._estimate, process)
        return plans.make_plan(process, await self._places.known(), engine=engine, downtime=downtime)

    async def move(
        self, process: Process, target: str, *, engine: str, max_downtime_ms: float | None, requestor: str
    ) -> OperationRow:
        """Raises Conflict with the plan's reason."""
        await self._check(process, target, engine, "move")
        expected = await asyncio.to_thread(self._estimate, process)
        return await self._start(process, "move", process.row.device, target, requestor, max_downtime_ms, expected)

    async def suspend(self, process: Process, to: str, *, requestor: str) -> OperationRow:
        _refuse(process, await asyncio.to_thread(plans.against_suspension, process, to, self._folder))
        return await self._start(process, "suspend", process.row.device, to, requestor)

    async def resume(self, process: Process, device: str | None, *, requestor: str) -> OperationRow:
        """To its own device, or to another one."""
        why = process.moving.why_not("resume")
        if why is not None:
            _refuse(process, [why])
        target = device or process.row.device
        await self._check(process, target, "proxy", "resume")
        return await self._start(process, "resume", process.machine.where, target, requestor)

    async def drain(self, device: str, *, reason: str, requestor: str) -> OperationRow:
        """Cordon it, and move every process off it, one after the other. Raises NotFound."""
        if device not in self._devices:
            raise NotFound(f"there is no device {device!r}", hint="GET /v1/devices lists them")

        async def work(operation: Operation) -> dict[str, Any]:
            return await self._drain(operation, device, reason, requestor)

        return await self._operations.start(
            "drain", subject=("device", device), requestor=requestor, work=work, request={"device": device}
        )

    def _estimate(self, process: Process) -> Estimate | None:
        """How long it will stand still if it is moved."""
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

    async def _check(self, process: Process, target: str, engine: str, kind: Kind) -> None:
        known = {place.id: place for place in await self._places.known()}
        _refuse(process, plans.judge(process, target, known, plans.general(process, engine, kind)).reasons)

    async def _start(
        self, process: Process, kind: Kind, source: str, target: str, requestor: str,
        max_downtime_ms: float | None = None, expected: Estimate | None = None,
    ) -> OperationRow:  # fmt: skip
        record = MigrationRecord(
            id=new_id(), operation=new_id(), kind=kind, process=process.row.id, source=source, target=target,
            started=now(), max_downtime_ms=max_downtime_ms, location=process.location, device=process.row.device,
            expected_downtime_ms=None if expected is None else expected.ms,
            expected_downtime_basis=None if expected is None else expected.basis,
        )  # fmt: skip

        async def work(operation: Operation) -> dict[str, Any]:
            record.started = now()
            try:
                return await _carry_out(process, record, operation)
            except XmigError as error:
                if record.state == "running":  # it could not even begin
                    process.records.migration(over(record, "failed", process.location, error.code, error.message))
                raise

        return await self._operations.start(
            OPERATION[kind], subject=("process", process.row.id), job_id=process.row.job, owner=process.job.uid,
            requestor=requestor, work=work, request={"migration": record.id}, id=record.operation,
            also=repository.saving(record),
        )  # fmt: skip

    async def _drain(self, operation: Operation, device: str, reason: str, requestor: str) -> dict[str, Any]:
        await self._places.cordon(device, reason, requestor)
        parts: list[dict[str, Any]] = []
        for process in [p for p in self._supervisor.processes.values() if device in plans.names_of(p.row.device)]:
            operation.check_cancelled()
            if process.state in ("suspended", "lost", "ended"):
                continue  # nothing of it is on the device
            part: dict[str, Any] = {"process": process.row.id, "source": process.row.device, "target": None}
            parts.append(part)
            operation.progress("moving", parts=parts, done=len(parts) - 1)
            await self._drain_one(operation, process, part, requestor)
            operation.progress("moving", parts=parts, done=len(parts))
        failed = [part for part in parts if part["state"] != "succeeded"]
        if failed:
            left = ", ".join(f"{part['process'][:12]}: {part['why']}" for part in failed)
            raise XmigError(
                f"{len(parts) - len(failed)} of {len(parts)} processes were moved; on {device} stay {left}",
                code="drain_incomplete", hint="make room elsewhere and drain again; the device stays cordoned",
            )  # fmt: skip
        return {"device": device, "moved": len(parts), "parts": parts}

    async def _drain_one(self, operation: Operation, process: Process, part: dict[str, Any], requestor: str) -> None:
        targets = (await self.plan(process)).targets
        allowed = [target for target in targets if target.allowed]
        if not allowed:
            why = "; ".join(dict.fromkeys(r.text for t in targets for r in t.reasons if r.code != "same_device"))
            part |= {"state": "failed", "why": why or "there is no other device"}
            return
        best = max(allowed, key=lambda target: target.room_bytes or 0)
        try:
            row = await self.move(process, best.device, engine="proxy", max_downtime_ms=None, requestor=requestor)
        except XmigError as error:
            part |= {"state": "failed", "why": str(error)}
            return
        part |= {"target": best.device, "operation": row.id, "state": row.state}
        ended = asyncio.ensure_future(self._ended(row))
        cancel = asyncio.ensure_future(operation.cancelled.wait())
        await asyncio.wait([ended, cancel], return_when=asyncio.FIRST_COMPLETED)
        cancel.cancel()
        if not ended.done():
            with contextlib.suppress(XmigError):
                self._operations.cancel(row.id)
        row = await ended
        part |= {"state": row.state, "why": (row.error or {}).get("detail")}

    async def _ended(self, row: OperationRow) -> OperationRow:
        while row.active:
            seen = await self._operations.wait(row.id, 60)
            row = seen if seen is not None else await asyncio.to_thread(self._operations.get, row.id)
        return row

    # --- after a restart --------------------------------------------------------------------------------------------

    async def _resolve(self, operation: Operation) -> Outcome:
        """By what the process's servers reported to the new daemon (xmigd/supervisor/supervisor.py)."""
        if operation.request.get("engine") == "driver" and self._native is not None:
            return await self._native.resolve(operation)

        def read() -> dict[str, Any] | None:
            with Session(self._readers) as session:
                found = repository.page(session, migration_id=operation.request.get("migration", ""))
                if not found:
                    return None
                process = session.get(models.Process, found[0]["process_id"])
                over = process is None or process.state in ("ended", "lost")
                return found[0] | {"process_over": over}

        deadline = time.monotonic() + RESOLVED_WITHIN
        row = await asyncio.to_thread(read)
        while row is not None and row["state"] == "running" and time.monotonic() < deadline:
            if row["process_over"]:
                break
            await asyncio.sleep(0.05)
            row = await asyncio.to_thread(read)
        if row is None:
            return interrupted(operation.row)
        if row["state"] == "done":
            return Outcome(state="succeeded", result=public(row))
        location = where(row["process_location"], row["kind"], moved=False)
        return interrupted(operation.row, "lost" if row["process_over"] else location)


async def _carry_out(process: Process, record: MigrationRecord, operation: Operation) -> dict[str, Any]:
    def changed(seen: MigrationRecord) -> None:
        move = process.machine.move
        why = None if move is None or move.record.id != seen.id else move.may_cancel
        if why is not None and operation.row.may_cancel and seen.state == "running":
            with contextlib.suppress(Cancelled):
                operation.point_of_no_return(why)
        phase: str = seen.phase
        if seen.state != "running":
            phase = "done" if seen.state == "done" else _failed_in(seen)
        operation.progress(
            phase, migration=seen.id, iteration=len(seen.iterations) or None, total_bytes=seen.total_bytes,
            processed_bytes=seen.processed_bytes, bytes_per_s=seen.bytes_per_s,
            dirty_bytes_per_s=seen.dirty_bytes_per_s, expected_downtime_ms=seen.expected_downtime_ms, path=seen.path,
        )  # fmt: skip

    running = asyncio.ensure_future(process.moving.run(record, changed))
    cancelled = asyncio.ensure_future(operation.cancelled.wait())
    try:
        await asyncio.wait([running, cancelled], return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            process.moving.cancel("somebody cancelled it")
        ended = await running
    finally:
        running.cancel()
        cancelled.cancel()
    if ended.state == "done":
        return {
            "migration": ended.id, "source": ended.source, "target": ended.target, "downtime_ms": ended.downtime_ms,
            "expected_downtime_ms": ended.expected_downtime_ms, "setup_ms": ended.setup_ms,
            "total_bytes": ended.total_bytes, "processed_bytes": ended.processed_bytes,
            "rounds": len(ended.iterations), "path": ended.path,
            "process_location": where(ended.location, ended.kind, moved=True),
        }  # fmt: skip
    location: ProcessLocation = where(ended.location, ended.kind, moved=False)
    if process.state in ("losing", "lost"):
        location = "lost"
    if ended.state == "cancelled":
        raise Cancelled("it was cancelled", process_location=location)
    raise Conflict(ended.error or "it failed", code=ended.code, phase=_failed_in(ended), process_location=location)


def where(location: str, kind: str, *, moved: bool) -> ProcessLocation:
    """As a problem says it."""
    if location in ("host", "file", "lost"):
        return location  # type: ignore[return-value]
    return "target" if moved else "source"


def public(row: dict[str, Any]) -> dict[str, Any]:
    """A migration's row as an operation's result."""
    names = (
        "source", "target", "downtime_ms", "expected_downtime_ms", "setup_ms", "total_bytes", "processed_bytes", "path",
    )  # fmt: skip
    return {"migration": row["id"]} | {name: row[name] for name in names} | {"rounds": len(row["iterations"])}


def _failed_in(record: MigrationRecord) -> str:
    names = [phase.name for phase in record.phases if phase.name not in ("over", "rolling_back")]
    return names[-1] if names else "planning"


def _refuse(process: Process, reasons: list[Reason]) -> None:
    """Raises Conflict with the first reason, and where the process is."""
    if not reasons:
        return
    if reasons[0].code == "no_such_device":
        raise NotFound(reasons[0].text, code="no_such_device", hint="xmigctl migrate --plan lists the targets")
    location: ProcessLocation = where(process.location, "", moved=False)
    raise Conflict(
        "; ".join(reason.text for reason in reasons), code=reasons[0].code, phase="planning",
        process_location=location, hint="xmigctl migrate --plan says what is possible",
    )  # fmt: skip
