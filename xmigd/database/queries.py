"""What is asked of the database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from sqlalchemy import ColumnElement, ScalarSelect, and_, exists, func, or_, select, tuple_
from sqlalchemy.orm import Session

from xmigd.database.models import Device, Fault, Job, JournalSegment, Migration, Process, Recovery
from xmigd.users import user_name

MigrationSort = Literal["newest", "oldest", "downtime", "copied"]
_SORTS: dict[MigrationSort, tuple[ColumnElement[Any], ...]] = {
    "newest": (Migration.number.expression,),
    "oldest": (Migration.number.expression,),
    "downtime": (func.coalesce(Migration.downtime_ms, -1), Migration.number.expression),
    "copied": (func.coalesce(Migration.processed_bytes, -1), Migration.number.expression),
}
LIVE = ("starting", "running", "recovering", "suspended", "losing", "draining", "unprotected")


def _count(model: type[Fault] | type[Recovery]) -> ScalarSelect[int]:
    return select(func.count()).where(model.process_id == Process.id).correlate(Process).scalar_subquery()


def devices(session: Session) -> Sequence[Device]:
    return session.scalars(select(Device).order_by(Device.kind, Device.ordinal)).all()


def job(session: Session, job_id: str) -> Job | None:
    return session.get(Job, job_id)


def jobs(
    session: Session, *, job_id: str | None = None, owner: int | None = None, before: str | None = None,
    live: bool = False, limit: int = 100,
) -> list[dict[str, Any]]:  # fmt: skip
    """Jobs, newest first, each with what its processes make of it. `owner`: this user's; `before`: older than this;
    `live`: of which a process lives."""
    query = select(Job).order_by(Job.created_at.desc(), Job.id).limit(limit)
    if owner is not None:
        query = query.where(Job.uid == owner)
    if before is not None:
        made = select(Job.created_at).where(Job.id == before).scalar_subquery()
        query = query.where(or_(Job.created_at < made, and_(Job.created_at == made, Job.id > before)))
    if live:
        query = query.where(exists().where(Process.job_id == Job.id, Process.state.in_(LIVE)))
    if job_id is not None:
        query = query.where(Job.id == job_id)
    rows = session.scalars(query).all()
    ids = [row.id for row in rows]
    states: dict[str, dict[str, int]] = {}
    of_jobs = select(Process.job_id, Process.state, func.count()).where(Process.job_id.in_(ids))
    for its_job, state, count in session.execute(of_jobs.group_by(Process.job_id, Process.state)):
        states.setdefault(its_job, {})[state] = count
    holders = select(Process.job_id, func.count()).where(Process.job_id.in_(ids), Process.unprotected != "")
    unprotected: dict[str, int] = {row[0]: row[1] for row in session.execute(holders.group_by(Process.job_id))}
    faults, recoveries = _totals(session, Fault, ids), _totals(session, Recovery, ids)
    last = select(Process.job_id, func.max(Process.ended_at)).where(Process.job_id.in_(ids)).group_by(Process.job_id)
    ended = {row[0]: row[1] for row in session.execute(last)}
    return [
        _job(row, states.get(row.id, {}), ended.get(row.id))
        | {
            "unprotected": unprotected.get(row.id, 0),
            "faults": faults.get(row.id, 0),
            "recoveries": recoveries.get(row.id, 0),
        }
        for row in rows
    ]


def _totals(session: Session, model: type[Fault] | type[Recovery], jobs: list[str]) -> dict[str, int]:
    query = select(Process.job_id, func.count()).join(model, model.process_id == Process.id)
    found = session.execute(query.where(Process.job_id.in_(jobs)).group_by(Process.job_id))
    return {row[0]: row[1] for row in found}


def _job(row: Job, states: dict[str, int], last: float | None) -> dict[str, Any]:
    """`states`: how many of its processes are in each. `last`: when the last of them ended."""
    live = sum(count for state, count in states.items() if state in LIVE)
    runs = row.runner_pid is not None and row.ended_at is None
    if live:
        state = "suspended" if states.get("suspended", 0) == live else "running"
    elif "lost" in states:
        state = "lost"
    elif row.stopped:
        state = "stopped"
    elif runs and states:
        state = "running"  # a script between two programs
    else:
        state = "ended" if states or row.ended_at is not None else "created"
    over = not live and not runs and state != "created"
    ended_at = max((at for at in (row.ended_at, last) if at is not None), default=None) if over else None
    return {
        "id": row.id, "name": row.name, "command": row.command, "uid": row.uid,
        "user": user_name(row.uid), "device": row.device,
        "registered": row.registered, "hang_timeout": row.hang_timeout, "created_at": row.created_at, "state": state,
        "processes": live, "suspended": states.get("suspended", 0), "ended_at": ended_at,
        "duration_s": None if ended_at is None else max(0.0, ended_at - row.created_at),
        "exit_code": row.exit_code, "exit_signal": row.exit_signal, "strict": row.strict,
    }  # fmt: skip


def processes(
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


def migrations(
    session: Session, *, migration_id: str | None = None, process_id: str | None = None, job_id: str | None = None,
    state: str | None = None, kind: str | None = None, owner: int | None = None, before: str | None = None,
    sort: MigrationSort = "newest", limit: int = 100,
) -> list[dict[str, Any]]:  # fmt: skip
    """Moves, suspensions and resumptions; the longest downtime or the most bytes first, if so sorted. `before`: what
    comes after this one in that order."""
    by = _SORTS[sort]
    rising = sort == "oldest"
    query = (
        select(Migration, Process.job_id, Job.name, Job.uid)
        .join(Process, Migration.process_id == Process.id)
        .join(Job, Process.job_id == Job.id)
        .order_by(*(column.asc() if rising else column.desc() for column in by))
        .limit(limit)
    )
    for column, value in (
        (Migration.id, migration_id), (Migration.process_id, process_id), (Process.job_id, job_id),
        (Migration.state, state), (Migration.kind, kind), (Job.uid, owner),
    ):  # fmt: skip
        if value is not None:
            query = query.where(column == value)
    if before is not None:
        its = tuple_(*(select(column).where(Migration.id == before).scalar_subquery() for column in by))
        query = query.where(tuple_(*by) > its if rising else tuple_(*by) < its)
    return [
        columns(row) | {"job_id": job, "job_name": name, "owner": uid} for row, job, name, uid in session.execute(query)
    ]


def segments(session: Session, process_id: str, limit: int = 100) -> Sequence[JournalSegment]:
    query = select(JournalSegment).where(JournalSegment.process_id == process_id)
    return session.scalars(query.order_by(JournalSegment.number.desc()).limit(limit)).all()


def faults(
    session: Session, *, job_id: str | None = None, process_id: str | None = None, before: int | None = None,
    limit: int = 100, owner: int | None = None, fault: int | None = None, acknowledged: bool | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    query = _history(Fault, job_id, process_id, owner, before, limit)
    if fault is not None:
        query = query.where(Fault.id == fault)
    if acknowledged is not None:
        query = query.where(Fault.acknowledged_at.is_not(None) == acknowledged)
    return [columns(row) | {"job_id": its_job, "job_name": name} for row, its_job, name in session.execute(query)]


def recoveries(
    session: Session, *, job_id: str | None, process_id: str | None, before: int | None, limit: int,
    owner: int | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    found = []
    for row, its_job, name in session.execute(_history(Recovery, job_id, process_id, owner, before, limit)):
        exact = None if row.differing is None else row.differing == 0
        story = row.story.split("\n") if row.story else []
        found.append(columns(row) | {"job_id": its_job, "job_name": name, "exact": exact, "story": story})
    return found


def _history(
    model: type[Fault] | type[Recovery], job_id: str | None, process_id: str | None, owner: int | None,
    before: int | None, limit: int,
) -> Any:  # fmt: skip
    conditions: list[ColumnElement[bool]] = []
    if owner is not None:
        conditions.append(Process.job_id.in_(select(Job.id).where(Job.uid == owner)))
    if job_id is not None:
        conditions.append(Process.job_id == job_id)
    if process_id is not None:
        conditions.append(Process.id == process_id)
    if before is not None:
        conditions.append(model.id < before)
    return (
        select(model, Process.job_id, Job.name)
        .join(Process, model.process_id == Process.id)
        .join(Job, Process.job_id == Job.id)
        .where(*conditions)
        .order_by(model.id.desc())
        .limit(limit)
    )


def columns(row: Any) -> dict[str, Any]:
    return {column.key: getattr(row, column.key) for column in row.__table__.columns}
