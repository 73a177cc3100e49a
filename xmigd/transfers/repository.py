"""Transfers in the database."""

from __future__ import annotations

import time
from typing import Any, cast

from sqlalchemy import or_, select, update
from sqlalchemy.orm import Session

from xmigd.database.models import Transfer
from xmigd.database.rows import columns
from xmigd.failpoints import Write

# Of an `out`: the program is here, and is to go on here, until it is `committed`; from then on the peer may have it.
# Of an `in`: nothing of it runs before `going`.
OVER = ("done", "failed", "running", "dropped")


def name_of(values: dict[str, Any]) -> Write:
    """The write that changes a transfer so: each state has its own, at which a test lets the daemon die."""
    return cast(Write, f"transfers.{values.get('state', 'note')}")


def add(session: Session, values: dict[str, Any]) -> None:
    defaults = {
        "why": "",
        "peer_informed": False,
        "rounds": [],
        "processes": [],
        "devices": [],
        "pids": [],
        "took": {},
        "created_at": time.time(),
    }
    session.add(Transfer(**defaults | values))


def change(session: Session, transfer: str, values: dict[str, Any], *, only_in: tuple[str, ...] = ()) -> bool:
    """`only_in`: states; in another one nothing is changed. Returns whether it was."""
    query = update(Transfer).where(Transfer.id == transfer)
    if only_in:
        query = query.where(Transfer.state.in_(only_in))
    if values.get("state") in OVER:
        values = {"ended_at": time.time()} | values
    found: Any = session.execute(query.values(**values))
    return bool(found.rowcount)


def get(session: Session, transfer: str) -> dict[str, Any] | None:
    row = session.get(Transfer, transfer)
    return None if row is None else columns(row)


def page(
    session: Session, *, transfer: str | None = None, job: str | None = None, owner: int | None = None,
    direction: str | None = None, before: str | None = None, limit: int = 100,
) -> list[dict[str, Any]]:  # fmt: skip
    """The newest first."""
    query = select(Transfer).order_by(Transfer.created_at.desc(), Transfer.id).limit(limit)
    for column, value in (
        (Transfer.id, transfer), (Transfer.job_id, job), (Transfer.uid, owner), (Transfer.direction, direction),
    ):  # fmt: skip
        if value is not None:
            query = query.where(column == value)
    if before is not None:
        began = select(Transfer.created_at).where(Transfer.id == before).correlate(None).scalar_subquery()
        query = query.where(Transfer.created_at < began)
    return [columns(row) for row in session.scalars(query)]


def unfinished(session: Session) -> list[dict[str, Any]]:
    """Those that are not over, and outgoing ones of whose outcome the peer was not informed."""
    owed = (Transfer.direction == "out") & Transfer.peer_informed.is_(False)
    return [columns(row) for row in session.scalars(select(Transfer).where(or_(Transfer.state.not_in(OVER), owed)))]
