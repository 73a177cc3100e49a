"""Jobs in the database."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any, cast

from sqlalchemy import and_, exists, func, insert, or_, select, update
from sqlalchemy.orm import Session

from xmigd.database import models
from xmigd.database.models import Fault, Job, Process, Recovery
from xmigd.ipc.exits import End
from xmigd.processes.states import LIVE
from xmigd.records import JobRow, ReplicaPolicy
from xmigd.users import user_name

ADDING = insert(models.Base.metadata.tables["jobs"])  # made once: to make it takes longer than to execute it


def find(session: Session, job_id: str) -> Job | None:
    return session.get(Job, job_id)


def page(
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
        "registered": row.registered, "hang_timeout": row.hang_timeout,
        "replica_policy": row.replica_policy, "created_at": row.created_at, "state": state,
        "processes": live, "suspended": states.get("suspended", 0), "ended_at": ended_at,
        "duration_s": None if ended_at is None else max(0.0, ended_at - row.created_at),
        "exit_code": row.exit_code, "exit_signal": row.exit_signal, "strict": row.strict,
        "nodes": row.nodes.split(",") if row.nodes else [],
    }  # fmt: skip


def add(session: Session, job: JobRow, created_at: float) -> None:
    session.execute(ADDING, {**asdict(job), "created_at": created_at})


def job_model(job: JobRow) -> models.Job:
    return models.Job(**asdict(job), created_at=time.time())


def job_row(job: models.Job) -> JobRow:
    return JobRow(
        id=job.id, name=job.name, command=job.command, uid=job.uid, device=job.device, registered=job.registered,
        token_hash=None if job.stopped else job.token_hash, hang_timeout=job.hang_timeout,
        replica_policy=cast(ReplicaPolicy | None, job.replica_policy), strict=job.strict,
        runner_pid=job.runner_pid, runner_start=job.runner_start, nodes=job.nodes,
    )  # fmt: skip


def end(session: Session, job: str, end: End, at: float) -> None:
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


def launched(session: Session) -> list[JobRow]:
    """Whose runners may still be there."""
    query = select(models.Job).where(models.Job.runner_pid.is_not(None), ~models.Job.stopped)
    return [job_row(job) for job in session.scalars(query.order_by(models.Job.created_at.desc()).limit(1000))]
