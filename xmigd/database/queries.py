"""What is asked of the database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, ScalarSelect, func, select
from sqlalchemy.orm import Session

from xmigd.database.models import Device, Fault, Job, JournalSegment, Process, Recovery

LIVE = ("starting", "running", "recovering", "losing", "draining")


def _count(model: type[Fault] | type[Recovery]) -> ScalarSelect[int]:
    return select(func.count()).where(model.process_id == Process.id).correlate(Process).scalar_subquery()


def devices(session: Session) -> Sequence[Device]:
    return session.scalars(select(Device).order_by(Device.kind, Device.ordinal)).all()


def job(session: Session, job_id: str) -> Job | None:
    return session.get(Job, job_id)


def jobs(session: Session, *, job_id: str | None = None, limit: int = 100) -> list[dict[str, Any]]:
    """Jobs, newest first, each with what its processes make of it."""
    query = select(Job).order_by(Job.created_at.desc()).limit(limit)
    if job_id is not None:
        query = query.where(Job.id == job_id)
    return [_job(session, row) for row in session.scalars(query)]


def _job(session: Session, row: Job) -> dict[str, Any]:
    of_job = Process.job_id == row.id
    states = session.scalars(select(Process.state).where(of_job)).all()

    def total(model: type[Fault] | type[Recovery]) -> int:
        query = select(func.count()).select_from(model).join(Process, model.process_id == Process.id).where(of_job)
        return session.scalar(query) or 0

    if any(state in LIVE for state in states):
        state = "running"
    elif "lost" in states:
        state = "lost"
    elif row.stopped:
        state = "stopped"
    else:
        state = "ended" if states else "created"
    return {
        "id": row.id, "name": row.name, "command": row.command, "uid": row.uid, "device": row.device,
        "registered": row.registered, "hang_timeout": row.hang_timeout, "created_at": row.created_at, "state": state,
        "processes": sum(state in LIVE for state in states), "faults": total(Fault), "recoveries": total(Recovery),
    }  # fmt: skip


def processes(
    session: Session, *, process_id: str | None = None, job_id: str | None = None, live: bool = False, limit: int = 100
) -> list[dict[str, Any]]:
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
    if live:
        query = query.where(Process.state.in_(LIVE))
    return [
        _columns(process) | {"job_name": name, "faults": faults, "recoveries": recoveries}
        for process, name, faults, recoveries in session.execute(query)
    ]


def segments(session: Session, process_id: str, limit: int = 100) -> Sequence[JournalSegment]:
    query = select(JournalSegment).where(JournalSegment.process_id == process_id)
    return session.scalars(query.order_by(JournalSegment.number.desc()).limit(limit)).all()


def faults(
    session: Session, *, job_id: str | None, process_id: str | None, before: int | None, limit: int
) -> list[dict[str, Any]]:
    return [
        _columns(fault) | {"job_id": its_job}
        for fault, its_job in session.execute(_history(Fault, job_id, process_id, before, limit))
    ]


def recoveries(
    session: Session, *, job_id: str | None, process_id: str | None, before: int | None, limit: int
) -> list[dict[str, Any]]:
    found = []
    for row, its_job in session.execute(_history(Recovery, job_id, process_id, before, limit)):
        exact = None if row.differing is None else row.differing == 0
        story = row.story.split("\n") if row.story else []
        found.append(_columns(row) | {"job_id": its_job, "exact": exact, "story": story})
    return found


def _history(
    model: type[Fault] | type[Recovery], job_id: str | None, process_id: str | None, before: int | None, limit: int
) -> Any:
    conditions: list[ColumnElement[bool]] = []
    if job_id is not None:
        conditions.append(Process.job_id == job_id)
    if process_id is not None:
        conditions.append(Process.id == process_id)
    if before is not None:
        conditions.append(model.id < before)
    return (
        select(model, Process.job_id)
        .join(Process, model.process_id == Process.id)
        .where(*conditions)
        .order_by(model.id.desc())
        .limit(limit)
    )


def _columns(row: Any) -> dict[str, Any]:
    return {column.key: getattr(row, column.key) for column in row.__table__.columns}
