"""Devices in the database."""

from __future__ import annotations

import time
from collections.abc import Sequence

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from xmigd.database import models
from xmigd.database.models import Device


def listed(session: Session) -> Sequence[Device]:
    return session.scalars(select(Device).order_by(Device.kind, Device.ordinal)).all()


def configure(session: Session, names: list[str], memory_bytes: int) -> None:
    """`memory_bytes`: of each `cpu` device; 0: as its programs see it, which stays known."""
    session.execute(update(models.Device).values(configured=False))
    size = {"memory_bytes": memory_bytes} if memory_bytes else {}
    for name in names:
        kind, _, ordinal = name.partition(":")
        session.merge(
            models.Device(id=name, kind=kind, ordinal=int(ordinal), configured=True, seen_at=time.time(), **size)
        )


def cordon(session: Session, device: str, cordoned: bool, reason: str) -> None:
    session.execute(
        update(Device)
        .where(Device.id == device)
        .values(cordoned=cordoned, cordon_reason=reason, version=Device.version + 1)
    )


def cordoned(session: Session) -> dict[str, str]:
    """Devices that take no new process, and why."""
    query = select(models.Device.id, models.Device.cordon_reason).where(models.Device.cordoned)
    return {row.id: row.cordon_reason for row in session.execute(query)}
