"""Queries of jobs' logs."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import delete, func, select
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.orm import Session

from xmigd.database.models import Job, LogLine
from xmigd.records import LogLine as Line

KEPT = 1000  # lines of a job; the oldest go first
TRIM_EVERY = 100


def add(session: Session, line: Line) -> None:
    """Of a job that is still remembered."""
    values = {
        "job_id": line.job, "process_id": line.process, "at": line.at, "source": line.source, "level": line.level,
        "text": line.text,
    }  # fmt: skip
    if session.get(Job, line.job) is None:
        return
    number = session.execute(insert(LogLine).values(**values).returning(LogLine.id)).scalar_one()
    if number % TRIM_EVERY == 0:
        trim(session, line.job)


def trim(session: Session, job: str) -> None:
    mine = select(LogLine.id).where(LogLine.job_id == job).order_by(LogLine.id.desc())
    oldest = session.scalar(mine.offset(KEPT - 1).limit(1))
    if oldest is not None:
        session.execute(delete(LogLine).where(LogLine.job_id == job, LogLine.id < oldest))


def page(
    session: Session, job: str, *, after: int | None = None, before: int | None = None, process: str | None = None,
    limit: int = 100,
) -> Sequence[LogLine]:  # fmt: skip
    """Oldest first: what followed `after`, or else the newest, of those before `before`."""
    query = select(LogLine).where(LogLine.job_id == job)
    if process is not None:
        query = query.where(LogLine.process_id == process)
    if before is not None:
        query = query.where(LogLine.id < before)
    if after is not None:
        return session.scalars(query.where(LogLine.id > after).order_by(LogLine.id).limit(limit)).all()
    return session.scalars(query.order_by(LogLine.id.desc()).limit(limit)).all()[::-1]


def count(session: Session, job: str) -> int:
    return session.scalar(select(func.count()).select_from(LogLine).where(LogLine.job_id == job)) or 0
