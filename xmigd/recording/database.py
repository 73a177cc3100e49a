"""xmigd.records.Records on the database."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from sqlalchemy import delete, update
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.orm import Session

from xmigd.database import models
from xmigd.database.rows import wall
from xmigd.database.writer import Writer
from xmigd.faults.repository import recovery_values
from xmigd.ipc.exits import End
from xmigd.ipc.messages import Snapshot
from xmigd.jobs import repository as jobs
from xmigd.logs import repository as logs
from xmigd.migrations import repository as migrations
from xmigd.process.events import FaultRecord, RecoveryRecord
from xmigd.process.migration_events import MigrationRecord
from xmigd.processes.states import FINAL, UNPROTECTED
from xmigd.records import JobRow, LogLine, ProcessRow

SEGMENTS_KEPT = 1000


class DatabaseRecords:
    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def job_made(self, job: JobRow) -> None:
        model = jobs.job_model(job)
        self._writer.record("jobs.made", lambda session: jobs.made(session, model))

    def job_ended(self, job: str, end: End, at: float) -> None:
        self._writer.record("jobs.end", lambda session: jobs.end(session, job, end, at))

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

    def process_device(self, process: str, device: str) -> None:
        statement = update(models.Process).where(models.Process.id == process).values(device=device)
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

    def snapshot(self, process: str, snapshot: Snapshot) -> None:
        values = snapshot.model_dump(exclude={"type", "off_device", "round"})
        values |= {"process_id": process, "at": time.time()}

        def write(session: Session) -> None:
            row = insert(models.JournalSegment).values(**values)
            session.execute(row.on_conflict_do_update(index_elements=["process_id", "number"], set_=values))
            if snapshot.number % 100 == 0:
                old = models.JournalSegment.number <= snapshot.number - SEGMENTS_KEPT
                session.execute(delete(models.JournalSegment).where(models.JournalSegment.process_id == process, old))

        self._writer.record("segments.add", write)

    def fault(self, process: str, fault: FaultRecord) -> None:
        values = asdict(fault)
        values["at"] = wall(values.pop("t"))
        statement = insert(models.Fault).values(process_id=process, **values)
        self._writer.record("faults.add", lambda session: session.execute(statement))

    def recovery(self, process: str, recovery: RecoveryRecord) -> None:
        values = recovery_values(process, recovery)
        row = insert(models.Recovery).values(**values)
        statement = row.on_conflict_do_update(index_elements=["process_id", "number"], set_=values)
        self._writer.record("recoveries.save", lambda session: session.execute(statement))

    def migration(self, record: MigrationRecord) -> None:
        work = migrations.saving(record)
        self._writer.record("migrations.save", work)

    def migration_intent(self, record: MigrationRecord, done: Callable[[str | None], None]) -> None:
        loop = asyncio.get_running_loop()

        def written(future: Future[Any]) -> None:
            failure = future.exception()
            with contextlib.suppress(RuntimeError):  # the loop is closed: the daemon has left
                loop.call_soon_threadsafe(done, None if failure is None else str(failure))

        self._writer.submit("migrations.intent", migrations.saving(record)).add_done_callback(written)
