"""What the database says of the store: which snapshots are kept, and which objects they need."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from xmigd.database.models import Process, StoredPart, StoredSnapshot
from xmigd.store.manifest import Manifest

Key = tuple[str, int]  # process, number


def add(session: Session, manifest: Manifest, manifest_hash: str) -> None:
    """A snapshot that was taken again after a recovery takes the place of the earlier one."""
    if session.get(Process, manifest.process) is None:
        return  # its row has not been written, or is gone: the next sweep finds the files
    same = (StoredSnapshot.process_id == manifest.process, StoredSnapshot.number == manifest.number)
    session.execute(delete(StoredSnapshot).where(*same))
    row = StoredSnapshot(
        process_id=manifest.process, number=manifest.number, position=manifest.position, sequence=manifest.sequence,
        journal_from=manifest.journal_from, manifest=manifest_hash, at=manifest.at,
    )  # fmt: skip
    session.add(row)
    session.flush()
    session.add_all(StoredPart(snapshot_id=row.id, **part.model_dump()) for part in manifest.parts)


def latest(session: Session, process: str) -> StoredSnapshot | None:
    query = (
        select(StoredSnapshot)
        .where(StoredSnapshot.process_id == process)
        .order_by(StoredSnapshot.number.desc())
        .limit(1)
    )
    return session.scalars(query).first()


def known(session: Session) -> tuple[set[Key], set[str]]:
    """All that is kept: manifests and objects."""
    keys = {
        (process, number)
        for process, number in session.execute(select(StoredSnapshot.process_id, StoredSnapshot.number))
    }
    return keys, set(session.scalars(select(StoredPart.hash).distinct()))


def stored_bytes(session: Session) -> int:
    """Of all objects, each once."""
    each = select(func.max(StoredPart.stored_bytes).label("size")).group_by(StoredPart.hash).subquery()
    return session.scalar(select(func.coalesce(func.sum(each.c.size), 0))) or 0


def remove(session: Session, ids: Sequence[int]) -> tuple[list[Key], list[str]]:
    """Forget these snapshots. Returns their manifests, and the objects that nobody needs any more."""
    if not ids:
        return [], []
    of_them = StoredSnapshot.id.in_(ids)
    keys = [(p, n) for p, n in session.execute(select(StoredSnapshot.process_id, StoredSnapshot.number).where(of_them))]
    hashes = set(session.scalars(select(StoredPart.hash).where(StoredPart.snapshot_id.in_(ids)).distinct()))
    session.execute(delete(StoredSnapshot).where(of_them))
    still = set(session.scalars(select(StoredPart.hash).where(StoredPart.hash.in_(hashes)).distinct()))
    return keys, sorted(hashes - still)


def superfluous(session: Session, *, snapshots: int, days: float) -> list[int]:
    """Stored snapshots beyond the number per process, and those that are too old. The newest of a process that may
    still run stays, however old."""
    ranked = select(
        StoredSnapshot.id, StoredSnapshot.at, Process.ended_at,
        func.row_number()
        .over(partition_by=StoredSnapshot.process_id, order_by=StoredSnapshot.number.desc())
        .label("rank"),
    ).join(Process, Process.id == StoredSnapshot.process_id).subquery()  # fmt: skip
    too_old = (ranked.c.at < time.time() - days * 86400) & ((ranked.c.rank > 1) | ranked.c.ended_at.is_not(None))
    return list(session.scalars(select(ranked.c.id).where((ranked.c.rank > snapshots) | too_old)))


def oldest(session: Session, limit: int = 16) -> list[int]:
    """Those to go when room is needed: of processes that have ended first, then the oldest."""
    query = (
        select(StoredSnapshot.id)
        .join(Process, Process.id == StoredSnapshot.process_id)
        .order_by(Process.ended_at.is_(None), StoredSnapshot.at)
        .limit(limit)
    )
    return list(session.scalars(query))


def of_process(session: Session, process: str) -> dict[int, dict[str, Any]]:
    """By snapshot: what is kept of it."""
    query = (
        select(
            StoredSnapshot.number, func.sum(StoredPart.stored_bytes), func.count().filter(StoredPart.kind == "image"),
        )
        .join(StoredPart, StoredPart.snapshot_id == StoredSnapshot.id)
        .where(StoredSnapshot.process_id == process)
        .group_by(StoredSnapshot.number)
    )  # fmt: skip
    return {number: {"stored_bytes": size, "images": images} for number, size, images in session.execute(query)}
