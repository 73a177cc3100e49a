"""Processes and their journals' segments in the database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ScalarSelect, func, select
from sqlalchemy.orm import Session

from xmigd.database import models
from xmigd.database.models import Fault, Job, JournalSegment, Process, Recovery
from xmigd.database.rows import columns
from xmigd.faults.repository import recovery_record
from xmigd.jobs.repository import job_row
from xmigd.migrations.repository import under_way
from xmigd.process.events import RecoveryRecord
from xmigd.processes.states import FINAL, LIVE, UNPROTECTED
from xmigd.records import JobRow, LiveProcess, ProcessRow
from xmigd.users import user_name


def page(
    session: Session, *, process_id: str | None = None, job_id: str | None = None, owner: int | None = None,
    live: bool = False, before: str | None = None, limit: int = 100,
) -> list[dict[str, Any]]:  # fmt: skip
    query = (
        select(Process, Job.name, _count(Fault), _count(Recovery))
        .join(Job, Process.job_id == Job.id)
        .order_by(Process.started_at.desc())
        .limit(limit)
    )
    if process_id is not None:
        query = query.where(Process.id == process_id)
    if job_id is not None:
        query = query.where(Process.job_id == job_id)
    if owner is not None:
        query = query.where(Job.uid == owner)
    if before is not None:
        started = select(Process.started_at).where(Process.id == before).correlate(None).scalar_subquery()
        query = query.where(Process.started_at < started)
    if live:
        query = query.where(Process.state.in_(LIVE))
    return [
        columns(process)
        | {"job_name": name, "user": user_name(process.uid), "faults": faults, "recoveries": recoveries}
        for process, name, faults, recoveries in session.execute(query)
    ]


def _count(model: type[Fault] | type[Recovery]) -> ScalarSelect[int]:
    return select(func.count()).where(model.process_id == Process.id).correlate(Process).scalar_subquery()


def segments(session: Session, process_id: str, limit: int = 100) -> Sequence[JournalSegment]:
    query = select(JournalSegment).where(JournalSegment.process_id == process_id)
    return session.scalars(query.order_by(JournalSegment.number.desc()).limit(limit)).all()


def of_job(session: Session, job: str) -> list[ProcessRow]:
    """All of its processes, as they came."""
    rows = session.scalars(select(Process).where(Process.job_id == job).order_by(Process.started_at, Process.id))
    return [_row(row) for row in rows]


def _row(process: Process) -> ProcessRow:
    return ProcessRow(
        id=process.id, job=process.job_id, pid=process.pid, start_time=process.start_time, uid=process.uid,
        gid=process.gid, command=process.command, device=process.device, origin=process.origin,
    )  # fmt: skip


def live_ones(session: Session) -> list[LiveProcess]:
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
                row=_row(process), job=job_row(job), state=process.state, server_pid=process.server_pid,
                server_start_time=process.server_start_time, faults=max(faults, default=0),
                recoveries=max(recoveries, default=0), why=process.why, migration=under_way(session, process.id),
                recovery=_unfinished(session, process.id),
            )
        )  # fmt: skip
    return found


def _unfinished(session: Session, process: str) -> RecoveryRecord | None:
    """The recovery of which the last daemon has not written the end."""
    query = select(Recovery).where(Recovery.process_id == process, Recovery.outcome == "running")
    row = session.scalars(query.order_by(Recovery.number.desc()).limit(1)).first()
    return None if row is None else recovery_record(columns(row))


def unprotected_ones(session: Session) -> list[tuple[ProcessRow, JobRow]]:
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
