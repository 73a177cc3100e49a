"""Operations in the database."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from sqlalchemy import insert, select, update
from sqlalchemy.orm import Session

from xmigd.database.models import IdempotencyKey, Operation

OperationState = Literal["pending", "running", "succeeded", "failed", "cancelled"]
ACTIVE: tuple[OperationState, ...] = ("pending", "running")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRow:
    """An operation as it is at one moment. Times are Unix seconds; what is not known is None."""

    id: str
    kind: str
    state: OperationState
    phase: str
    subject_type: str
    subject_id: str
    job_id: str | None
    owner: int | None
    requestor: str
    request: dict[str, Any]
    created_at: float
    started_at: float | None = None
    ended_at: float | None = None
    may_cancel: bool
    may_cancel_why: str = ""
    progress: dict[str, Any] | None = None
    result: dict[str, Any] | None = None
    error: dict[str, Any] | None = None

    @property
    def active(self) -> bool:
        return self.state in ACTIVE

    def as_dict(self) -> dict[str, Any]:
        """As REST shows it."""
        shown = asdict(self)
        for hidden in ("owner", "request"):
            del shown[hidden]
        return shown | {"subject": {"type": shown.pop("subject_type"), "id": shown.pop("subject_id")}}


def _row(model: Operation) -> OperationRow:
    return OperationRow(**{each.name: getattr(model, each.name) for each in fields(OperationRow)})


def add(session: Session, row: OperationRow) -> None:
    session.execute(insert(Operation).values(**asdict(row)))


def name_in_key(session: Session, caller: str, key: str, operation: str) -> None:
    """The request with this Idempotency-Key began it; or an earlier one, of which it is a part."""
    of_row = (IdempotencyKey.caller == caller) & (IdempotencyKey.key == key) & IdempotencyKey.operation_id.is_(None)
    session.execute(update(IdempotencyKey).where(of_row).values(operation_id=operation))


def save(session: Session, row: OperationRow) -> None:
    """Does nothing to one that is over: a save that had to wait for the disk comes too late."""
    query = update(Operation).where(Operation.id == row.id, Operation.state.in_(ACTIVE))
    session.execute(query.values(**asdict(row)))


def get(session: Session, operation: str) -> OperationRow | None:
    found = session.scalars(select(Operation).where(Operation.id == operation)).one_or_none()
    return None if found is None else _row(found)


def active(session: Session) -> list[OperationRow]:
    query = select(Operation).where(Operation.state.in_(ACTIVE)).order_by(Operation.number)
    return [_row(model) for model in session.scalars(query)]


def find(
    session: Session,
    *,
    state: str | None = None,
    kind: str | None = None,
    subject: str | None = None,
    job: str | None = None,
    owner: int | None = None,
    before: str | None = None,
    limit: int = 100,
) -> Sequence[OperationRow]:
    """Newest first. `owner`: what concerns this user's jobs or was requested by them; None: everything."""
    query = select(Operation).order_by(Operation.number.desc()).limit(limit)
    for column, value in (
        (Operation.state, state), (Operation.kind, kind), (Operation.subject_id, subject), (Operation.job_id, job),
        (Operation.owner, owner),
    ):  # fmt: skip
        if value is not None:
            query = query.where(column == value)
    if before is not None:
        number = select(Operation.number).where(Operation.id == before).scalar_subquery()
        query = query.where(Operation.number < number)
    return [_row(model) for model in session.scalars(query)]
