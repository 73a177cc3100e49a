"""What the database says of the store: which cuts are kept, and which objects they need."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from xmigd.database.models import KeptCut, KeptPart, Process
from xmigd.store.manifest import Manifest

Key = tuple[str, int]  # process, number


def add(session: Session, manifest: Manifest, manifest_hash: str) -> None:
    """A cut that was taken again after a recovery takes the place of the earlier one."""
    if session.get(Process, manifest.process) is None:
        return  # its row has not been written, or is gone: the next sweep finds the files
    same = (KeptCut.process_id == manifest.process, KeptCut.number == manifest.number)
    session.execute(delete(KeptCut).where(*same))
    row = KeptCut(
        process_id=manifest.process, number=manifest.number, position=manifest.position, sequence=manifest.sequence,
        journal_from=manifest.journal_from, manifest=manifest_hash, at=manifest.at,
    )  # fmt: skip
    session.add(row)
    session.flush()
    session.add_all(KeptPart(kept_id=row.id, **part.model_dump()) for part in manifest.parts)


def latest(session: Session, process: str) -> KeptCut | None:
    query = select(KeptCut).where(KeptCut.process_id == process).order_by(KeptCut.number.desc()).limit(1)
    return session.scalars(query).first()


def known(session: Session) -> tuple[set[Key], set[str]]:
    """All that is kept: manifests and objects."""
    keys = {(process, number) for process, number in session.execute(select(KeptCut.process_id, KeptCut.number))}
    return keys, set(session.scalars(select(KeptPart.hash).distinct()))


def stored_bytes(session: Session) -> int:
    """Of all objects, each once."""
    each = select(func.max(KeptPart.stored_bytes).label("size")).group_by(KeptPart.hash).subquery()
    return session.scalar(select(func.coalesce(func.sum(each.c.size), 0))) or 0


def remove(session: Session, ids: Sequence[int]) -> tuple[list[Key], list[str]]:
    """Forget these cuts. Returns their manifests, and the objects that nobody needs any more."""
    if not ids:
        return [], []
    of_them = KeptCut.id.in_(ids)
    keys = [(p, n) for p, n in session.execute(select(KeptCut.process_id, KeptCut.number).where(of_them))]
    hashes = set(session.scalars(select(KeptPart.hash).where(KeptPart.kept_id.in_(ids)).distinct()))
    session.execute(delete(KeptCut).where(of_them))
    still = set(session.scalars(select(KeptPart.hash).where(KeptPart.hash.in_(hashes)).distinct()))
    return keys, sorted(hashes - still)


def superfluous(session: Session, *, cuts: int, days: float) -> list[int]:
    """Kept cuts beyond the number per process, and those that are too old. The newest of a process that may still run
    stays, however old."""
    ranked = select(
        KeptCut.id, KeptCut.at, Process.ended_at,
        func.row_number().over(partition_by=KeptCut.process_id, order_by=KeptCut.number.desc()).label("rank"),
    ).join(Process, Process.id == KeptCut.process_id).subquery()  # fmt: skip
    too_old = (ranked.c.at < time.time() - days * 86400) & ((ranked.c.rank > 1) | ranked.c.ended_at.is_not(None))
    return list(session.scalars(select(ranked.c.id).where((ranked.c.rank > cuts) | too_old)))


def oldest(session: Session, limit: int = 16) -> list[int]:
    """Those to go when room is needed: of processes that have ended first, then the oldest."""
    query = (
        select(KeptCut.id)
        .join(Process, Process.id == KeptCut.process_id)
        .order_by(Process.ended_at.is_(None), KeptCut.at)
        .limit(limit)
    )
    return list(session.scalars(query))


def of_process(session: Session, process: str) -> dict[int, dict[str, Any]]:
    """By cut: what is kept of it."""
    query = (
        select(
            KeptCut.number, func.sum(KeptPart.stored_bytes), func.count().filter(KeptPart.kind == "image"),
        )
        .join(KeptPart, KeptPart.kept_id == KeptCut.id)
        .where(KeptCut.process_id == process)
        .group_by(KeptCut.number)
    )  # fmt: skip
    return {number: {"kept_bytes": size, "images": images} for number, size, images in session.execute(query)}
