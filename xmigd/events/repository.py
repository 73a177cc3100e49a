"""Events in the database."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import delete, func, insert, or_, select, text
from sqlalchemy.orm import Session

from xmigd.database.models import Event, Job


def insert_all(session: Session, rows: Sequence[dict[str, object]], first: int) -> None:
    """Rows as they happened; they get the ids from `first` on."""
    session.execute(insert(Event), [row | {"id": first + place} for place, row in enumerate(rows)])


def owners(session: Session, jobs: Sequence[str]) -> dict[str, int]:
    return {row.id: row.uid for row in session.execute(select(Job.id, Job.uid).where(Job.id.in_(jobs)))}


def newest(session: Session) -> int:
    """The last id that was ever given away; 0: none."""
    listed = session.execute(text("SELECT seq FROM sqlite_sequence WHERE name = 'events'")).scalar()
    return int(listed or 0)


def oldest(session: Session) -> int | None:
    return session.scalar(select(func.min(Event.id)))


def trim(session: Session, up_to: int) -> None:
    session.execute(delete(Event).where(Event.id <= up_to))


def page(
    session: Session, *, after: int | None = None, up_to: int | None = None, before: int | None = None,
    owner: int | None = None, limit: int = 100,
) -> Sequence[Event]:  # fmt: skip
    """With `after`: what followed it, oldest first. Otherwise the newest, newest first. `owner`: what concerns this
    user's jobs or the node; None: everything."""
    query = select(Event).limit(limit)
    query = query.where(Event.id > after).order_by(Event.id) if after is not None else query.order_by(Event.id.desc())
    if up_to is not None:
        query = query.where(Event.id <= up_to)
    if before is not None:
        query = query.where(Event.id < before)
    if owner is not None:
        query = query.where(or_(Event.owner == owner, Event.owner.is_(None)), Event.type != "audit")
    return session.scalars(query).all()
