"""Checkpoints in the database."""

from __future__ import annotations

from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from xmigd.database.models import Checkpoint
from xmigd.database.rows import columns


def add(session: Session, values: dict[str, Any]) -> None:
    session.add(Checkpoint(**values))


def page(
    session: Session, *, checkpoint: str | None = None, job: str | None = None, owner: int | None = None,
    before: str | None = None, limit: int = 100,
) -> list[dict[str, Any]]:  # fmt: skip
    """The newest first."""
    query = select(Checkpoint).order_by(Checkpoint.created_at.desc(), Checkpoint.id).limit(limit)
    for column, value in ((Checkpoint.id, checkpoint), (Checkpoint.job_id, job), (Checkpoint.uid, owner)):
        if value is not None:
            query = query.where(column == value)
    if before is not None:
        made = select(Checkpoint.created_at).where(Checkpoint.id == before).correlate(None).scalar_subquery()
        query = query.where(Checkpoint.created_at < made)
    return [columns(row) for row in session.scalars(query)]


def every(session: Session) -> list[tuple[str, str]]:
    """All of them: the id, and the hash of the manifest."""
    return [(id, manifest) for id, manifest in session.execute(select(Checkpoint.id, Checkpoint.manifest))]


def remove(session: Session, checkpoint: str) -> None:
    session.execute(delete(Checkpoint).where(Checkpoint.id == checkpoint))
