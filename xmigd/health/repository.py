"""Findings in the database. One is open until it is closed: by xMIG, when NVML does not report it any more, or by
whoever uncordons the device."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from xmigd.database.models import Finding
from xmigd.health.grades import Found, Rung


def open_ones(session: Session, device: str | None = None) -> Sequence[Finding]:
    """Worst first."""
    query = select(Finding).where(Finding.closed_at.is_(None))
    if device is not None:
        query = query.where(Finding.device == device)
    return sorted(session.scalars(query), key=lambda row: (-Rung[row.rung], row.id))


def page(session: Session, device: str, *, before: int | None, limit: int) -> Sequence[Finding]:
    """Newest first."""
    query = select(Finding).where(Finding.device == device).order_by(Finding.id.desc()).limit(limit)
    return session.scalars(query if before is None else query.where(Finding.id < before)).all()


def add(session: Session, device: str, found: Found, source: str) -> tuple[Finding, bool]:
    """Is it new? One that is open is counted once more."""
    for row in open_ones(session, device):
        if row.code == found.code:
            row.count += 1
            row.last_at = time.time()
            return row, False
    now = time.time()
    row = Finding(
        device=device, code=found.code, text=found.text, rung=found.rung.name, source=source, first_at=now,
        last_at=now, count=1, answer=None, closed_at=None, closed_by=None,
    )  # fmt: skip
    session.add(row)
    session.flush()
    return row, True


def answered(session: Session, finding: int, answer: str) -> None:
    session.execute(update(Finding).where(Finding.id == finding).values(answer=answer))


def close(session: Session, device: str, by: str, *, only: Iterable[int] | None = None) -> None:
    """`only`: these; otherwise all that are open."""
    statement = update(Finding).where(Finding.device == device, Finding.closed_at.is_(None))
    if only is not None:
        statement = statement.where(Finding.id.in_(list(only)))
    session.execute(statement.values(closed_at=time.time(), closed_by=by[:255]))
