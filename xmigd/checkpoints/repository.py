"""Checkpoints in the database."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sqlalchemy import delete, func, literal_column, or_, select, update
from sqlalchemy.orm import Session

from xmigd.database.models import Checkpoint, CheckpointPolicy, Job, PartRemoval, UnmirroredCheckpoint
from xmigd.database.rows import columns
from xmigd.store.objects import Damaged


def add(session: Session, values: dict[str, Any]) -> None:
    session.add(Checkpoint(**values))


def page(
    session: Session, *, checkpoint: str | None = None, job: str | None = None, owner: int | None = None,
    before: str | None = None, limit: int = 100, whole: bool = True,
) -> list[dict[str, Any]]:  # fmt: skip
    """The newest first. A part of one that is not `whole` is none; these are apart."""
    query = select(Checkpoint).where(Checkpoint.whole.is_(whole))
    query = query.order_by(Checkpoint.created_at.desc(), Checkpoint.id).limit(limit)
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


def remove(session: Session, checkpoint: str, *, mirrored: bool, elsewhere: Iterable[str] = ()) -> None:
    """`mirrored`: the mirror may have it, or a part of it, and it is to be removed there, too. `elsewhere`: other nodes
    with parts of it."""
    session.execute(delete(Checkpoint).where(Checkpoint.id == checkpoint))
    if mirrored:
        session.merge(UnmirroredCheckpoint(id=checkpoint))
    for node in elsewhere:
        session.merge(PartRemoval(checkpoint=checkpoint, node=node))


# Parts of checkpoints of several nodes.


def parts(session: Session) -> list[tuple[str, list[str]]]:
    """Those of which it is not known whether all others exist: the id, and the nodes."""
    query = select(Checkpoint.id, Checkpoint.nodes).where(Checkpoint.whole.is_(False))
    return [(id, (nodes or "").split(",")) for id, nodes in session.execute(query)]


def is_whole(session: Session, checkpoint: str) -> None:
    session.execute(update(Checkpoint).where(Checkpoint.id == checkpoint).values(whole=True))


def remove_part(session: Session, checkpoint: str) -> None:
    """Of one that is not whole."""
    session.execute(delete(Checkpoint).where(Checkpoint.id == checkpoint, Checkpoint.whole.is_(False)))


def removals(session: Session, node: str) -> list[str]:
    """Checkpoints whose parts this other node is to remove."""
    return list(session.scalars(select(PartRemoval.checkpoint).where(PartRemoval.node == node)))


def removed_elsewhere(session: Session, checkpoint: str, node: str) -> None:
    session.execute(delete(PartRemoval).where(PartRemoval.checkpoint == checkpoint, PartRemoval.node == node))


def by_policy(session: Session, job: str) -> list[tuple[str, bool]]:
    """Those that were made of this job without a request, the last one first: the id, and whether it is on the disk.
    In the order in which they were written: a clock may have been set back."""
    made = select(Checkpoint.id, Checkpoint.on_disk).where(Checkpoint.job_id == job, Checkpoint.by_policy)
    made = made.where(Checkpoint.whole).order_by(literal_column("rowid").desc())
    return [(row[0], row[1]) for row in session.execute(made)]


def newest(session: Session, jobs: list[str], now: float) -> dict[str, float]:
    """When the newest one of each of these jobs was made. What is later than now is from before the clock was set
    back."""
    query = select(Checkpoint.job_id, func.max(Checkpoint.created_at))
    query = query.where(Checkpoint.job_id.in_(jobs), Checkpoint.created_at <= now, Checkpoint.whole)
    return {row[0]: row[1] for row in session.execute(query.group_by(Checkpoint.job_id))}


def begun(session: Session, jobs: list[str]) -> dict[str, float]:
    """When each of these jobs began."""
    return {row[0]: row[1] for row in session.execute(select(Job.id, Job.created_at).where(Job.id.in_(jobs)))}


def unmirrored(session: Session, mirror: str) -> list[tuple[str, str]]:
    """Those that are not in this mirror, the oldest first: the id, and the hash of the manifest."""
    missing = or_(Checkpoint.mirrored_in.is_(None), Checkpoint.mirrored_in != mirror)
    query = select(Checkpoint.id, Checkpoint.manifest).where(missing, Checkpoint.whole)
    return [(id, manifest) for id, manifest in session.execute(query.order_by(Checkpoint.created_at, Checkpoint.id))]


def mirrored(session: Session, checkpoint: str, mirror: str) -> None:
    session.execute(update(Checkpoint).where(Checkpoint.id == checkpoint).values(mirrored_in=mirror))


def unsettled(session: Session) -> list[tuple[str, str, int]]:
    """Those that are in host memory only, the oldest first: the id, the hash of the manifest, and the owner."""
    query = select(Checkpoint.id, Checkpoint.manifest, Checkpoint.uid).where(Checkpoint.on_disk.is_(False))
    return [(row[0], row[1], row[2]) for row in session.execute(query.order_by(Checkpoint.created_at, Checkpoint.id))]


def settled(session: Session, checkpoint: str, stored_bytes: int) -> None:
    """It is on the disk now, and took so many bytes there."""
    values = {"on_disk": True, "stored_bytes": Checkpoint.stored_bytes + stored_bytes}
    session.execute(update(Checkpoint).where(Checkpoint.id == checkpoint).values(values))


def to_unmirror(session: Session) -> list[str]:
    """Those that were removed here, and not from the mirror yet."""
    return list(session.scalars(select(UnmirroredCheckpoint.id)))


def unmirror(session: Session, checkpoints: list[str]) -> None:
    """They are removed from the mirror, too."""
    session.execute(delete(UnmirroredCheckpoint).where(UnmirroredCheckpoint.id.in_(checkpoints)))


def document(folder: Path, checkpoint: str, expected: str) -> bytes:
    """The manifest in this folder, which has this hash. Raises Damaged."""
    try:
        found = (folder / f"{checkpoint}.json").read_bytes()
    except OSError as error:
        raise Damaged(f"the manifest of checkpoint {checkpoint[:12]} cannot be read: {error.strerror}") from None
    if hashlib.sha256(found).hexdigest() != expected:
        raise Damaged(f"the manifest of checkpoint {checkpoint[:12]} is not the one that was written")
    return found


def policies(session: Session) -> list[dict[str, Any]]:
    return [columns(row) for row in session.scalars(select(CheckpointPolicy))]


def policy(session: Session, job: str) -> dict[str, Any] | None:
    row = session.get(CheckpointPolicy, job)
    return None if row is None else columns(row)


def set_policy(session: Session, values: dict[str, Any]) -> None:
    session.merge(CheckpointPolicy(**values))


def remove_policy(session: Session, job: str) -> None:
    session.execute(delete(CheckpointPolicy).where(CheckpointPolicy.job_id == job))
