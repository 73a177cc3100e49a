"""Moves, suspensions and resumptions in the database."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal, cast

from sqlalchemy import ColumnElement, func, select, tuple_, update
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.orm import Session

from xmigd.database import models
from xmigd.database.models import Job, Migration, Process
from xmigd.database.rows import columns, wall
from xmigd.process.migration_events import Kind, Location, MigrationRecord, Path, Phase

Sort = Literal["newest", "oldest", "downtime", "copied"]
_SORTS: dict[Sort, tuple[ColumnElement[Any], ...]] = {
    "newest": (Migration.number.expression,),
    "oldest": (Migration.number.expression,),
    "downtime": (func.coalesce(Migration.downtime_ms, -1), Migration.number.expression),
    "copied": (func.coalesce(Migration.processed_bytes, -1), Migration.number.expression),
}


def page(
    session: Session, *, migration_id: str | None = None, process_id: str | None = None, job_id: str | None = None,
    state: str | None = None, kind: str | None = None, owner: int | None = None, before: str | None = None,
    sort: Sort = "newest", limit: int = 100,
) -> list[dict[str, Any]]:  # fmt: skip
    """Moves, suspensions and resumptions; the longest downtime or the most bytes first, if so sorted. `before`: what
    comes after this one in that order."""
    by = _SORTS[sort]
    rising = sort == "oldest"
    query = (
        select(Migration, Process.job_id, Job.name, Job.uid)
        .join(Process, Migration.process_id == Process.id)
        .join(Job, Process.job_id == Job.id)
        .order_by(*(column.asc() if rising else column.desc() for column in by))
        .limit(limit)
    )
    for column, value in (
        (Migration.id, migration_id), (Migration.process_id, process_id), (Process.job_id, job_id),
        (Migration.state, state), (Migration.kind, kind), (Job.uid, owner),
    ):  # fmt: skip
        if value is not None:
            query = query.where(column == value)
    if before is not None:
        its = tuple_(*(select(column).where(Migration.id == before).scalar_subquery() for column in by))
        query = query.where(tuple_(*by) > its if rising else tuple_(*by) < its)
    return [
        columns(row) | {"job_id": job, "job_name": name, "owner": uid} for row, job, name, uid in session.execute(query)
    ]


def saving(record: MigrationRecord) -> Callable[[Session], None]:
    """Writes the record and where its process lives, in the one transaction that it is called in."""
    values: dict[str, Any] = {
        "id": record.id, "operation_id": record.operation, "process_id": record.process, "kind": record.kind,
        "engine": record.engine, "source": record.source, "target": record.target, "state": record.state,
        "phase": record.phase,
        "total_bytes": record.total_bytes, "processed_bytes": record.processed_bytes,
        "bytes_per_s": record.bytes_per_s, "dirty_bytes_per_s": record.dirty_bytes_per_s,
        "max_downtime_ms": record.max_downtime_ms, "expected_downtime_ms": record.expected_downtime_ms,
        "expected_downtime_basis": record.expected_downtime_basis,
        "downtime_ms": record.downtime_ms, "setup_ms": record.setup_ms, "path": record.path,
        "code": record.code, "error": record.error,
        "process_location": record.location, "started_at": wall(record.started),
        "ended_at": None if record.ended is None else wall(record.ended),
    }  # fmt: skip
    if record.phases:  # otherwise an earlier daemon's record is only brought to its end
        values["phases"] = phases_of(record)
        values["iterations"] = [
            {
                "n": i.number,
                "copied_bytes": i.copied_bytes,
                "dirty_bytes": i.dirty_bytes,
                "ms": round(i.ms, 3),
                "loading_ms": round(i.loading_ms, 3),
            }
            for i in record.iterations
        ]
    if record.target_pid is not None:
        values |= {"target_pid": record.target_pid, "target_start_time": record.target_start_time}
    lives: dict[str, Any] = {"location": record.location}
    if record.location == "device" and record.device:
        lives["device"] = record.device

    def write(session: Session) -> None:
        row = insert(models.Migration).values(**{"phases": [], "iterations": []} | values)
        session.execute(row.on_conflict_do_update(index_elements=["id"], set_=values))
        session.execute(update(models.Process).where(models.Process.id == record.process).values(**lives))

    return write


def phases_of(record: MigrationRecord) -> list[dict[str, Any]]:
    """Each with its time of day, and how long it took; null while it lasts."""
    ends = [phase.at for phase in record.phases[1:]] + [record.ended]
    return [
        {"name": phase.name, "at": wall(phase.at), "ms": None if end is None else round((end - phase.at) / 1e6, 3)}
        for phase, end in zip(record.phases, ends, strict=True)
    ]


def under_way(session: Session, process: str) -> MigrationRecord | None:
    query = select(models.Migration).where(models.Migration.process_id == process, models.Migration.state == "running")
    row = session.scalars(query.order_by(models.Migration.number.desc())).first()
    if row is None:
        return None
    return MigrationRecord(
        id=row.id, kind=cast(Kind, row.kind), process=process, operation=row.operation_id, source=row.source,
        target=row.target, engine=row.engine, started=time.monotonic_ns() - int((time.time() - row.started_at) * 1e9),
        phase=cast(Phase, row.phase), target_pid=row.target_pid, target_start_time=row.target_start_time,
        total_bytes=row.total_bytes, processed_bytes=row.processed_bytes, bytes_per_s=row.bytes_per_s,
        dirty_bytes_per_s=row.dirty_bytes_per_s, max_downtime_ms=row.max_downtime_ms,
        expected_downtime_ms=row.expected_downtime_ms, expected_downtime_basis=row.expected_downtime_basis,
        setup_ms=row.setup_ms, path=cast(Path | None, row.path),
        location=cast(Location, row.process_location),
    )  # fmt: skip
