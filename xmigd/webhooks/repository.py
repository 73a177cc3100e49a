"""Webhooks and their dead letters in the database."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.orm import Session

from xmigd.database.models import DeadLetter, Event, Job, Webhook

MOST_LETTERS = 10_000  # of one webhook; the oldest make room


def listed(session: Session) -> Sequence[Webhook]:
    return session.scalars(select(Webhook).order_by(Webhook.created_at.desc(), Webhook.id)).all()


def letters(
    session: Session, webhook: str, *, before: int | None = None, queued: bool | None = None, limit: int = 100,
    rising: bool = False,
) -> Sequence[DeadLetter]:  # fmt: skip
    query = select(DeadLetter).where(DeadLetter.webhook_id == webhook).limit(limit)
    query = query.order_by(DeadLetter.number if rising else DeadLetter.number.desc())
    if before is not None:
        query = query.where(DeadLetter.number < before)
    if queued is not None:
        query = query.where(DeadLetter.queued.is_(queued))
    return session.scalars(query).all()


def counts(session: Session) -> dict[str, int]:
    """Dead letters by webhook."""
    query = select(DeadLetter.webhook_id, func.count()).group_by(DeadLetter.webhook_id)
    return {row[0]: row[1] for row in session.execute(query)}


def following(session: Session, position: int, limit: int) -> list[dict[str, Any]]:
    """Events after this one, the oldest first, as they are sent; with what the job's scheduler calls it."""
    query = select(Event, Job.external_id).outerjoin(Job, Job.id == Event.job_id)
    rows = session.execute(query.where(Event.id > position).order_by(Event.id).limit(limit))
    return [document(event) | {"external_id": external_id} for event, external_id in rows]


def document(event: Event) -> dict[str, Any]:
    return {
        "id": event.id, "type": event.type, "subject": {"type": event.subject_type, "id": event.subject_id},
        "job_id": event.job_id, "at": event.at, "data": event.data,
    }  # fmt: skip


def proceed(session: Session, webhook: str, position: int, *, delivered: int = 0) -> None:
    """Everything up to there has been delivered, or is a dead letter."""
    query = update(Webhook).where(Webhook.id == webhook)
    session.execute(query.values(position=position, delivered=Webhook.delivered + delivered))


def bury(session: Session, webhook: str, events: Sequence[Mapping[str, Any]], attempts: int, error: str) -> None:
    """As dead letters, for which the oldest make room if there are too many."""
    if session.get(Webhook, webhook) is None:  # it is removed
        return
    now = time.time()
    rows = [
        {"webhook_id": webhook, "event_id": event["id"], "event": dict(event), "attempts": attempts, "error": error,
         "queued": False, "at": now}
        for event in events
    ]  # fmt: skip
    session.execute(insert(DeadLetter), rows)
    query = select(DeadLetter.number).where(DeadLetter.webhook_id == webhook).order_by(DeadLetter.number.desc())
    if (last := session.scalars(query.offset(MOST_LETTERS).limit(1)).first()) is not None:
        of_hook = (DeadLetter.webhook_id == webhook) & (DeadLetter.number <= last)
        gone = session.scalar(select(func.count()).select_from(DeadLetter).where(of_hook)) or 0
        session.execute(delete(DeadLetter).where(of_hook))
        session.execute(update(Webhook).where(Webhook.id == webhook).values(dropped=Webhook.dropped + gone))


def queue(session: Session, webhook: str, numbers: Sequence[int] | None) -> int:
    """These dead letters, or all, are to be sent again. Returns how many there are."""
    query = update(DeadLetter).where(DeadLetter.webhook_id == webhook)
    if numbers is not None:
        query = query.where(DeadLetter.number.in_(numbers))
    found: Any = session.execute(query.values(queued=True))
    return int(found.rowcount)


def sent_again(session: Session, letter: DeadLetter, error: str | None) -> None:
    of_letter = DeadLetter.number == letter.number
    if error is None:
        session.execute(delete(DeadLetter).where(of_letter))
        proceed = update(Webhook).where(Webhook.id == letter.webhook_id)
        session.execute(proceed.values(delivered=Webhook.delivered + 1))
    else:
        values = {"queued": False, "attempts": DeadLetter.attempts + 1, "error": error}
        session.execute(update(DeadLetter).where(of_letter).values(**values))
