"""xmigd.records.Records on the database."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, cast

from sqlalchemy import delete, func, select, update
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.orm import Session

from xmigd.database import models
from xmigd.database.writer import Writer
from xmigd.devices.header import Description, descriptions
from xmigd.devices.names import devices_of
from xmigd.ipc.exits import End
from xmigd.ipc.messages import Cut
from xmigd.logs import repository as logs
from xmigd.process.events import FaultRecord, RecoveryRecord
from xmigd.process.migration_events import Kind, Location, MigrationRecord, Path, Phase
from xmigd.records import JobRow, LiveProcess, LogLine, ProcessRow
from xmigd.supervisor.process import Process

FINAL = ("lost", "ended")
UNPROTECTED = "unprotected"  # it has never come to us
SEGMENTS_KEPT = 1000
PHASES = ("standby_ready", "mapped", "restored", "redone", "resumed")


def job_model(job: JobRow) -> models.Job:
    return models.Job(**asdict(job), created_at=time.time())


def end_job(session: Session, job: str, end: End, at: float) -> None:
    """Who saw nothing leaves what is known; who saw something is believed once."""
    statement = update(models.Job).where(models.Job.id == job)
    session.execute(statement.values(ended_at=func.coalesce(models.Job.ended_at, at)))
    if end.code is not None or end.signal is not None:
        unknown = statement.where(models.Job.exit_code.is_(None), models.Job.exit_signal.is_(None))
        session.execute(unknown.values(exit_code=end.code, exit_signal=end.signal))


def runners(session: Session) -> list[tuple[str, int, int]]:
    """Jobs whose runner the last daemon watched: with its pid and start."""
    query = select(models.Job.id, models.Job.runner_pid, models.Job.runner_start)
    query = query.where(models.Job.runner_pid.is_not(None), models.Job.ended_at.is_(None))
    return [(job, pid, started or 0) for job, pid, started in session.execute(query) if pid is not None]


def wall(monotonic_ns: int) -> float:
    """The time of day of a moment of CLOCK_MONOTONIC."""
    return time.time() - (time.monotonic_ns() - monotonic_ns) / 1e9


class DatabaseRecords:
    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def job_made(self, job: JobRow) -> None:
        model = job_model(job)
        self._writer.record("jobs.made", lambda session: session.merge(model))

    def job_ended(self, job: str, end: End, at: float) -> None:
        self._writer.record("jobs.end", lambda session: end_job(session, job, end, at))

    def process_ended(self, process: str, end: End) -> None:
        statement = update(models.Process).where(models.Process.id == process)
        statement = statement.values(exit_code=end.code, exit_signal=end.signal)
        self._writer.record("processes.end", lambda session: session.execute(statement))

    def log_line(self, line: LogLine) -> None:
        self._writer.record("logs.add", lambda session: logs.add(session, line))

    def process_started(self, process: ProcessRow) -> None:
        values = {
            **asdict(process), "state": "starting", "why": "a program has connected", "started_at": time.time(),
        }  # fmt: skip
        values["job_id"] = values.pop("job")
        self._writer.record("processes.start", lambda session: session.execute(insert(models.Process).values(**values)))

    def unprotected_process(self, process: ProcessRow, why: str) -> None:
        values = {
            **asdict(process), "state": UNPROTECTED, "why": why, "unprotected": why, "started_at": time.time(),
        }  # fmt: skip
        values["job_id"] = values.pop("job")
        statement = insert(models.Process).values(**values)
        self._writer.record("processes.unprotected", lambda session: session.execute(statement))

    def process_unprotected(self, process: ProcessRow, why: str) -> None:
        statement = update(models.Process).where(models.Process.id == process.id).values(unprotected=why)
        self._writer.record("processes.unprotected", lambda session: session.execute(statement))

    def job_stopped(self, job: str) -> None:
        statement = update(models.Job).where(models.Job.id == job).values(stopped=True)
        self._writer.record("jobs.stop", lambda session: session.execute(statement))

    def process_moved(self, process: str, pid: int, start_time: int) -> None:
        statement = update(models.Process).where(models.Process.id == process).values(pid=pid, start_time=start_time)
        self._writer.record("processes.rebind", lambda session: session.execute(statement))

    def process_state(self, process: str, state: str, why: str) -> None:
        at = time.time()

        def write(session: Session) -> None:
            # A lost process stays lost: that its program has exited since is another matter.
            if state in FINAL:
                session.execute(update(models.Process).where(models.Process.id == process).values(ended_at=at))
            session.execute(
                update(models.Process)
                .where(models.Process.id == process, models.Process.state.not_in(FINAL))
                .values(state=state, why=why)
            )

        self._writer.record("processes.state", write)

    def server_assigned(self, process: str, pid: int, start_time: int, generation: int) -> None:
        statement = (
            update(models.Process)
            .where(models.Process.id == process)
            .values(server_pid=pid, server_start_time=start_time, generation=generation)
        )
        self._writer.record("processes.assign", lambda session: session.execute(statement))

    def cut(self, process: str, cut: Cut) -> None:
        values = cut.model_dump(exclude={"type", "off_device"}) | {"process_id": process, "at": time.time()}

        def write(session: Session) -> None:
            row = insert(models.JournalSegment).values(**values)
            session.execute(row.on_conflict_do_update(index_elements=["process_id", "number"], set_=values))
            if cut.number % 100 == 0:
                old = models.JournalSegment.number <= cut.number - SEGMENTS_KEPT
                session.execute(delete(models.JournalSegment).where(models.JournalSegment.process_id == process, old))

        self._writer.record("segments.add", write)

    def fault(self, process: str, fault: FaultRecord) -> None:
        values = asdict(fault)
        values["at"] = wall(values.pop("t"))
        statement = insert(models.Fault).values(process_id=process, **values)
        self._writer.record("faults.add", lambda session: session.execute(statement))

    def recovery(self, process: str, recovery: RecoveryRecord) -> None:
        values = asdict(recovery)
        occurred = values.pop("occurred")
        values["at"] = wall(occurred)
        values["detected_ms"] = (values.pop("detected") - occurred) / 1e6
        expected = values.pop("expected")
        values["expected_ms"] = None if expected is None else expected / 1e6
        for phase in PHASES:
            reached = values.pop(phase)
            values[f"{phase}_ms"] = None if reached is None else (reached - occurred) / 1e6
        values["story"] = "\n".join(recovery.story)
        values["process_id"] = process
        row = insert(models.Recovery).values(**values)
        statement = row.on_conflict_do_update(index_elements=["process_id", "number"], set_=values)
        self._writer.record("recoveries.save", lambda session: session.execute(statement))

    def migration(self, record: MigrationRecord) -> None:
        work = migration_work(record)
        self._writer.record("migrations.save", work)

    def migration_intent(self, record: MigrationRecord, done: Callable[[str | None], None]) -> None:
        loop = asyncio.get_running_loop()

        def written(future: Future[Any]) -> None:
            failure = future.exception()
            with contextlib.suppress(RuntimeError):  # the loop is closed: the daemon has left
                loop.call_soon_threadsafe(done, None if failure is None else str(failure))

        self._writer.submit("migrations.intent", migration_work(record)).add_done_callback(written)


def migration_work(record: MigrationRecord) -> Callable[[Session], None]:
    """Writes the record and where its process lives, in the one transaction that it is called in."""
    values: dict[str, Any] = {
        "id": record.id, "operation_id": record.operation, "process_id": record.process, "kind": record.kind,
        "engine": record.engine, "source": record.source, "target": record.target, "state": record.state,
        "phase": record.phase,
        "total_bytes": record.total_bytes, "processed_bytes": record.processed_bytes,
        "bytes_per_s": record.bytes_per_s, "dirty_bytes_per_s": record.dirty_bytes_per_s,
        "max_downtime_ms": record.max_downtime_ms, "expected_downtime_ms": record.expected_downtime_ms,
        "expected_downtime_basis": record.expected_downtime_basis,
        "downtime_ms": record.downtime_ms, "setup_ms": record.setup_ms, "path": record.path,
        "code": record.code, "error": record.error,
        "process_location": record.location, "started_at": wall(record.started),
        "ended_at": None if record.ended is None else wall(record.ended),
    }  # fmt: skip
    if record.phases:  # otherwise an earlier daemon's record is only brought to its end
        values["phases"] = phases_of(record)
        values["iterations"] = [
            {
                "n": i.number,
                "copied_bytes": i.copied_bytes,
                "dirty_bytes": i.dirty_bytes,
                "ms": round(i.ms, 3),
                "loading_ms": round(i.loading_ms, 3),
            }
            for i in record.iterations
        ]
    if record.target_pid is not None:
        values |= {"target_pid": record.target_pid, "target_start_time": record.target_start_time}
    lives: dict[str, Any] = {"location": record.location}
    if record.location == "device" and record.device:
        lives["device"] = record.device

    def write(session: Session) -> None:
        row = insert(models.Migration).values(**{"phases": [], "iterations": []} | values)
        session.execute(row.on_conflict_do_update(index_elements=["id"], set_=values))
        session.execute(update(models.Process).where(models.Process.id == record.process).values(**lives))

    return write


def phases_of(record: MigrationRecord) -> list[dict[str, Any]]:
    """Each with its time of day, and how long it took; null while it lasts."""
    ends = [phase.at for phase in record.phases[1:]] + [record.ended]
    return [
        {"name": phase.name, "at": wall(phase.at), "ms": None if end is None else round((end - phase.at) / 1e6, 3)}
        for phase, end in zip(record.phases, ends, strict=True)
    ]


def live_processes(session: Session) -> list[LiveProcess]:
    """The processes that the last daemon left behind."""
    found = []
    rows = session.execute(
        select(models.Process, models.Job)
        .join(models.Job, models.Process.job_id == models.Job.id)
        .where(models.Process.state.not_in((*FINAL, "native", UNPROTECTED)))
    )
    for process, job in rows:
        faults = session.scalars(select(models.Fault.number).where(models.Fault.process_id == process.id)).all()
        recoveries = session.scalars(
            select(models.Recovery.number).where(models.Recovery.process_id == process.id)
        ).all()
        found.append(
            LiveProcess(
                row=ProcessRow(
                    id=process.id, job=process.job_id, pid=process.pid, start_time=process.start_time,
                    uid=process.uid, gid=process.gid, command=process.command, device=process.device,
                ),
                job=job_row(job), state=process.state, server_pid=process.server_pid,
                server_start_time=process.server_start_time, faults=max(faults, default=0),
                recoveries=max(recoveries, default=0), migration=_under_way(session, process.id),
            )
        )  # fmt: skip
    return found


def unprotected_processes(session: Session) -> list[tuple[ProcessRow, JobRow]]:
    """Those that the last daemon had found, and whose end it has not seen."""
    query = select(models.Process, models.Job).join(models.Job, models.Process.job_id == models.Job.id)
    rows = session.execute(query.where(models.Process.state == UNPROTECTED))
    return [
        (
            ProcessRow(
                id=process.id, job=process.job_id, pid=process.pid, start_time=process.start_time, uid=process.uid,
                gid=process.gid, command=process.command, device=process.device,
            ),
            job_row(job),
        )
        for process, job in rows
    ]  # fmt: skip


def launched_jobs(session: Session) -> list[JobRow]:
    """Whose runners may still be there."""
    query = select(models.Job).where(models.Job.runner_pid.is_not(None), ~models.Job.stopped)
    return [job_row(job) for job in session.scalars(query.order_by(models.Job.created_at.desc()).limit(1000))]


def _under_way(session: Session, process: str) -> MigrationRecord | None:
    query = select(models.Migration).where(models.Migration.process_id == process, models.Migration.state == "running")
    row = session.scalars(query.order_by(models.Migration.number.desc())).first()
    if row is None:
        return None
    return MigrationRecord(
        id=row.id, kind=cast(Kind, row.kind), process=process, operation=row.operation_id, source=row.source,
        target=row.target, engine=row.engine, started=time.monotonic_ns() - int((time.time() - row.started_at) * 1e9),
        phase=cast(Phase, row.phase), target_pid=row.target_pid, target_start_time=row.target_start_time,
        total_bytes=row.total_bytes, processed_bytes=row.processed_bytes, bytes_per_s=row.bytes_per_s,
        dirty_bytes_per_s=row.dirty_bytes_per_s, max_downtime_ms=row.max_downtime_ms,
        expected_downtime_ms=row.expected_downtime_ms, expected_downtime_basis=row.expected_downtime_basis,
        setup_ms=row.setup_ms, path=cast(Path | None, row.path),
        location=cast(Location, row.process_location),
    )  # fmt: skip


def job_row(job: models.Job) -> JobRow:
    return JobRow(
        id=job.id, name=job.name, command=job.command, uid=job.uid, device=job.device, registered=job.registered,
        token_hash=None if job.stopped else job.token_hash, hang_timeout=job.hang_timeout, strict=job.strict,
        runner_pid=job.runner_pid, runner_start=job.runner_start,
    )  # fmt: skip


def configure_devices(session: Session, names: list[str], memory_bytes: int) -> None:
    session.execute(update(models.Device).values(configured=False))
    for name in names:
        kind, _, ordinal = name.partition(":")
        session.merge(
            models.Device(
                id=name, kind=kind, ordinal=int(ordinal), configured=True, memory_bytes=memory_bytes or None,
                seen_at=time.time(),
            )
        )  # fmt: skip


def cordoned_devices(session: Session) -> dict[str, str]:
    """Devices that take no new process, and why."""
    query = select(models.Device.id, models.Device.cordon_reason).where(models.Device.cordoned)
    return {row.id: row.cordon_reason for row in session.execute(query)}


class DeviceLearner:
    """What devices are called, as their programs see them; known once a program has had one."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._known: dict[str, Description] = {}

    def uuid(self, device: str) -> str | None:
        known = self._known.get(device)
        return None if known is None else known.uuid

    def __call__(self, process: Process) -> None:
        if process.memory is None:
            return
        described = descriptions(process.memory.journal.fileno())
        for name, description in zip(devices_of(process.row.device), described, strict=False):
            if self._known.get(name) != description:
                self._known[name] = description
                statement = (
                    update(models.Device)
                    .where(models.Device.id == name)
                    .values(uuid=description.uuid, name=description.name, memory_bytes=description.total_bytes)
                )
                self._writer.record("devices.learn", lambda session, statement=statement: session.execute(statement))  # type: ignore[misc]
