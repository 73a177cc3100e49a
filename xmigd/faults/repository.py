"""Faults and recoveries in the database."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from xmigd.database.models import Fault, Job, Process, Recovery
from xmigd.database.rows import columns, monotonic, wall
from xmigd.process.events import RecoveryRecord


def page(
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


# --- recoveries as rows: their moments are milliseconds since the fault there -----------------------------------------

PHASES = ("standby_ready", "mapped", "restored", "replayed", "resumed")


def recovery_values(process: str, recovery: RecoveryRecord) -> dict[str, Any]:
    values = asdict(recovery)
    occurred = values.pop("occurred")
    values["at"] = wall(occurred)
    values["detected_ms"] = (values.pop("detected") - occurred) / 1e6
    expected = values.pop("expected")
    values["expected_ms"] = None if expected is None else expected / 1e6
    for phase in PHASES:
        reached = values.pop(phase)
        values[f"{phase}_ms"] = None if reached is None else (reached - occurred) / 1e6
    values["story"] = "\n".join(recovery.story)
    values["process_id"] = process
    return values


def recovery_record(row: Mapping[str, Any]) -> RecoveryRecord:
    """And back."""
    values = {name: value for name, value in row.items() if name not in ("id", "process_id", "at")}
    occurred = monotonic(row["at"])
    values["detected"] = occurred + round(values.pop("detected_ms") * 1e6)
    expected = values.pop("expected_ms")
    values["expected"] = None if expected is None else round(expected * 1e6)
    for phase in PHASES:
        reached = values.pop(f"{phase}_ms")
        values[phase] = None if reached is None else occurred + round(reached * 1e6)
    values["story"] = row["story"].split("\n")
    return RecoveryRecord(occurred=occurred, **values)
