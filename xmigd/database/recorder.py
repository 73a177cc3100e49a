"""xmigd.records.Records on the database."""

from __future__ import annotations

import time
from dataclasses import asdict

from sqlalchemy import delete, select, update
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.orm import Session

from xmigd.database import models
from xmigd.database.writer import Writer
from xmigd.records import JobRow, LiveProcess, ProcessRow
from xmigd.recovery.events import FaultRecord, RecoveryRecord
from xmigd.supervisor.messages import Cut

FINAL = ("lost", "ended")
SEGMENTS_KEPT = 1000
PHASES = ("standby_ready", "mapped", "restored", "redone", "resumed")


def job_model(job: JobRow) -> models.Job:
    return models.Job(**asdict(job), created_at=time.time())


def wall(monotonic_ns: int) -> float:
    """The time of day of a moment of CLOCK_MONOTONIC."""
    return time.time() - (time.monotonic_ns() - monotonic_ns) / 1e9


class DatabaseRecords:
    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def job_made(self, job: JobRow) -> None:
        model = job_model(job)
        self._writer.record(lambda session: session.merge(model))

    def process_started(self, process: ProcessRow) -> None:
        values = {
            **asdict(process), "state": "starting", "why": "a program has connected", "started_at": time.time(),
        }  # fmt: skip
        values["job_id"] = values.pop("job")
        self._writer.record(lambda session: session.execute(insert(models.Process).values(**values)))

    def process_moved(self, process: str, pid: int, start_time: int) -> None:
        statement = update(models.Process).where(models.Process.id == process).values(pid=pid, start_time=start_time)
        self._writer.record(lambda session: session.execute(statement))

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

        self._writer.record(write)

    def server_assigned(self, process: str, pid: int, start_time: int, generation: int) -> None:
        statement = (
            update(models.Process)
            .where(models.Process.id == process)
            .values(server_pid=pid, server_start_time=start_time, generation=generation)
        )
        self._writer.record(lambda session: session.execute(statement))

    def cut(self, process: str, cut: Cut) -> None:
        values = cut.model_dump(exclude={"type"}) | {"process_id": process, "at": time.time()}

        def write(session: Session) -> None:
            row = insert(models.JournalSegment).values(**values)
            session.execute(row.on_conflict_do_update(index_elements=["process_id", "number"], set_=values))
            if cut.number % 100 == 0:
                old = models.JournalSegment.number <= cut.number - SEGMENTS_KEPT
                session.execute(delete(models.JournalSegment).where(models.JournalSegment.process_id == process, old))

        self._writer.record(write)

    def fault(self, process: str, fault: FaultRecord) -> None:
        values = asdict(fault)
        values["at"] = wall(values.pop("t"))
        statement = insert(models.Fault).values(process_id=process, **values)
        self._writer.record(lambda session: session.execute(statement))

    def recovery(self, process: str, recovery: RecoveryRecord) -> None:
        values = asdict(recovery)
        occurred = values.pop("occurred")
        values["at"] = wall(occurred)
        values["detected_ms"] = (values.pop("detected") - occurred) / 1e6
        for phase in PHASES:
            reached = values.pop(phase)
            values[f"{phase}_ms"] = None if reached is None else (reached - occurred) / 1e6
        values["story"] = "\n".join(recovery.story)
        values["process_id"] = process
        row = insert(models.Recovery).values(**values)
        statement = row.on_conflict_do_update(index_elements=["process_id", "number"], set_=values)
        self._writer.record(lambda session: session.execute(statement))


def live_processes(session: Session) -> list[LiveProcess]:
    """The processes that the last daemon left behind."""
    found = []
    rows = session.execute(
        select(models.Process, models.Job)
        .join(models.Job, models.Process.job_id == models.Job.id)
        .where(models.Process.state.not_in(FINAL))
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
                recoveries=max(recoveries, default=0),
            )
        )  # fmt: skip
    return found


def job_row(job: models.Job) -> JobRow:
    return JobRow(
        id=job.id, name=job.name, command=job.command, uid=job.uid, device=job.device, registered=job.registered,
        token_hash=None if job.stopped else job.token_hash, hang_timeout=job.hang_timeout,
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
