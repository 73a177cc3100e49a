"""What the database knows of ranks: where their processes were, and their recoveries."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from xmigd.database.models import Process, Recovery


@dataclass(frozen=True, slots=True)
class Place:
    pid: int
    device: str
    state: str


def places(session: Session, processes: Collection[str]) -> dict[str, Place]:
    query = select(Process.id, Process.pid, Process.device, Process.state).where(Process.id.in_(processes))
    return {id: Place(pid, device, state) for id, pid, device, state in session.execute(query)}


def recoveries(session: Session, jobs: Collection[str], limit: int) -> list[dict[str, Any]]:
    """Of these jobs' processes, newest first."""
    query = (
        select(
            Recovery.id, Recovery.process_id, Recovery.cause, Recovery.fault, Recovery.outcome, Recovery.attempts,
            Recovery.at, Recovery.detected_ms, Recovery.standby_ready_ms, Recovery.mapped_ms, Recovery.restored_ms,
            Recovery.replayed_ms, Recovery.resumed_ms,
        )
        .join(Process, Recovery.process_id == Process.id)
        .where(Process.job_id.in_(jobs))
        .order_by(Recovery.id.desc())
        .limit(limit)
    )  # fmt: skip
    return [dict(row) for row in session.execute(query).mappings()]
