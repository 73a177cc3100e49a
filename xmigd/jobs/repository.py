"""Jobs in the database."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

from sqlalchemy import (
    ColumnElement,
    ScalarSelect,
    Select,
    and_,
    case,
    delete,
    exists,
    func,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.orm import Session

from xmigd.database import models
from xmigd.database.models import Fault, Job, JobLabel, Process, Recovery
from xmigd.devices.names import devices_of
from xmigd.ipc.exits import End
from xmigd.processes.states import LIVE
from xmigd.records import JobRow, Priority, ReplicaPolicy
from xmigd.text import harmless
from xmigd.users import user_name

ADDING = insert(models.Base.metadata.tables["jobs"])  # made once: to make it takes longer than to execute it


SLURM = "slurm:"  # before the number of a job, as `xmigctl slurm task` names it
KUBERNETES = "k8s:"  # before namespace, name and uid of a pod, as the adapter names it


def find(session: Session, job_id: str) -> Job | None:
    return session.get(Job, job_id)


def number_of_slurm(external_id: str | None) -> str | None:
    """Slurm's number of a job that it has started. None: it has not."""
    if external_id is None or not external_id.startswith(SLURM):
        return None
    return external_id.removeprefix(SLURM)


def allocated_to(external_id: str | None) -> str | None:
    """Whom, in words for people, a scheduler that counts devices has given some to. It hears of no move, and may give
    the next device to somebody else. None: there is no such scheduler."""
    if (number := number_of_slurm(external_id)) is not None:
        return f"Slurm's job {harmless(number, 40)}"
    if external_id is not None and external_id.startswith(KUBERNETES):
        pod = external_id.removeprefix(KUBERNETES).rpartition("/")[0]
        return f"Kubernetes' pod {harmless(pod, 80)}"
    return None


def allocated(session: Session, ids: Iterable[str]) -> dict[str, str]:
    """`allocated_to` of those of these jobs that have a place in an allocation."""
    rows = session.execute(select(Job.id, Job.external_id).where(Job.id.in_(ids), Job.external_id.is_not(None)))
    return {id: whom for id, name in rows if (whom := allocated_to(name)) is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Which jobs are meant; what is empty or None means all."""

    job_id: str | None = None
    owner: int | None = None  # whose jobs the caller sees
    live: bool = False  # a process of it lives
    states: tuple[str, ...] = ()  # one of these
    uid: int | None = None
    labels: tuple[tuple[str, str | None], ...] = ()  # all of these; value None: any
    external_id: str | None = None
    device: str | None = None  # kind:ordinal, that it names or that a process of it is on


def _processes(*which: ColumnElement[bool]) -> ScalarSelect[int]:
    return select(func.count()).where(Process.job_id == Job.id, *which).correlate(Job).scalar_subquery()


_LIVE, _SUSPENDED = _processes(Process.state.in_(LIVE)), _processes(Process.state == "suspended")
_ANY, _LOST = _processes(), _processes(Process.state == "lost")
STATE: ColumnElement[str] = case(
    (_LIVE > 0, case((_SUSPENDED == _LIVE, "suspended"), else_="running")),
    (_LOST > 0, "lost"),
    (Job.stopped, "stopped"),
    (and_(Job.runner_pid.is_not(None), Job.ended_at.is_(None), _ANY > 0), "running"),  # between two programs
    (or_(_ANY > 0, Job.ended_at.is_not(None)), "ended"),
    else_="created",
)
Sort = Literal["created", "name"]
# The natural order of each, as (column, does it fall); the id makes it total.
_ORDERS: dict[Sort, tuple[tuple[ColumnElement[Any], bool], ...]] = {
    "created": ((Job.created_at.expression, True), (Job.id.expression, False)),
    "name": ((Job.name.expression, False), (Job.id.expression, False)),
}


def page(
    session: Session, conditions: Conditions, *, sort: Sort = "created", reverse: bool = False,
    after: tuple[Any, str] | None = None, before: str | None = None, limit: int = 100,
) -> list[dict[str, Any]]:  # fmt: skip
    """Jobs in this order, each with what its processes make of it. `after`: what follows this value of the sorted
    column and this id; `before`: what is older than this job."""
    order = [(column, falls != reverse) for column, falls in _ORDERS[sort]]
    query = _matching(conditions).order_by(*(column.desc() if falls else column for column, falls in order))
    if before is not None:
        made = select(Job.created_at).where(Job.id == before).scalar_subquery()
        query = query.where(or_(Job.created_at < made, and_(Job.created_at == made, Job.id > before)))
    if after is not None:
        (first, first_falls), (second, second_falls) = order
        query = query.where(or_(
            first < after[0] if first_falls else first > after[0],
            and_(first == after[0], second < after[1] if second_falls else second > after[1]),
        ))  # fmt: skip
    return details(session, list(session.scalars(query.limit(limit))))


def keys(session: Session, conditions: Conditions) -> list[tuple[str, str]]:
    """Every job that is meant, the newest first: its id, and its state."""
    query = _matching(conditions).add_columns(STATE).order_by(Job.created_at.desc(), Job.id)
    return [(id, state) for id, state in session.execute(query)]


def _matching(conditions: Conditions) -> Select[Any]:
    query = select(Job.id)
    for column, value in (
        (Job.id, conditions.job_id), (Job.uid, conditions.owner), (Job.uid, conditions.uid),
        (Job.external_id, conditions.external_id),
    ):  # fmt: skip
        if value is not None:
            query = query.where(column == value)
    if conditions.live:
        query = query.where(exists().where(Process.job_id == Job.id, Process.state.in_(LIVE)))
    if conditions.states:
        query = query.where(STATE.in_(conditions.states))
    for key, value in conditions.labels:
        label = exists().where(JobLabel.job_id == Job.id, JobLabel.key == key)
        query = query.where(label if value is None else label.where(JobLabel.value == value))
    if conditions.device is not None:
        here = exists().where(Process.job_id == Job.id, _names(Process.device, conditions.device))
        query = query.where(or_(here, and_(_ANY == 0, _names(Job.device, conditions.device))))
    return query


def _names(column: Any, device: str) -> ColumnElement[bool]:
    """`cpu:0,1` names cpu:1."""
    kind, _, ordinal = device.partition(":")
    listed = "," + func.substr(column, len(kind) + 2) + ","
    return and_(column.startswith(f"{kind}:", autoescape=True), listed.contains(f",{ordinal},", autoescape=True))


def details(session: Session, ids: Sequence[str]) -> list[dict[str, Any]]:
    """Of these jobs, in this order; those that are gone are left out."""
    rows = {
        row.id: (row, state, live, suspended)
        for row, state, live, suspended in session.execute(select(Job, STATE, _LIVE, _SUSPENDED).where(Job.id.in_(ids)))
    }
    holders = select(Process.job_id, func.count()).where(Process.job_id.in_(ids), Process.unprotected != "")
    unprotected: dict[str, int] = {row[0]: row[1] for row in session.execute(holders.group_by(Process.job_id))}
    faults, recoveries = _totals(session, Fault, ids), _totals(session, Recovery, ids)
    last = select(Process.job_id, func.max(Process.ended_at)).where(Process.job_id.in_(ids)).group_by(Process.job_id)
    ended = {row[0]: row[1] for row in session.execute(last)}
    had: dict[str, dict[bool, set[str]]] = {}
    places = select(Process.job_id, Process.state.in_(LIVE), Process.device).where(Process.job_id.in_(ids)).distinct()
    for job, lives, device in session.execute(places):
        had.setdefault(job, {}).setdefault(bool(lives), set()).update(devices_of(device))
    labels: dict[str, dict[str, str]] = {}
    for label in session.scalars(select(JobLabel).where(JobLabel.job_id.in_(ids)).order_by(JobLabel.key)):
        labels.setdefault(label.job_id, {})[label.key] = label.value
    return [
        _job(*rows[id], ended.get(id))
        | {
            "unprotected": unprotected.get(id, 0),
            "faults": faults.get(id, 0),
            "recoveries": recoveries.get(id, 0),
            "labels": labels.get(id, {}),
            "devices": _in_order(had.get(id, {})),
        }
        for id in ids
        if id in rows
    ]


def _in_order(had: Mapping[bool, set[str]]) -> list[str]:
    """Devices of those that live; of a job without any, of all that have ended."""
    return sorted(had.get(True) or had.get(False) or (), key=lambda name: (len(name), name))


def _totals(session: Session, model: type[Fault] | type[Recovery], jobs: Sequence[str]) -> dict[str, int]:
    query = select(Process.job_id, func.count()).join(model, model.process_id == Process.id)
    found = session.execute(query.where(Process.job_id.in_(jobs)).group_by(Process.job_id))
    return {row[0]: row[1] for row in found}


def _job(row: Job, state: str, live: int, suspended: int, last: float | None) -> dict[str, Any]:
    """`live`, `suspended`: how many processes are. `last`: when the last of them ended."""
    runs = row.runner_pid is not None and row.ended_at is None
    over = not live and not runs and state != "created"
    ended_at = max((at for at in (row.ended_at, last) if at is not None), default=None) if over else None
    return {
        "id": row.id, "name": row.name, "command": row.command, "uid": row.uid,
        "user": user_name(row.uid), "device": row.device,
        "registered": row.registered, "hang_timeout": row.hang_timeout,
        "replica_policy": row.replica_policy, "created_at": row.created_at, "state": state,
        "processes": live, "suspended": suspended, "ended_at": ended_at,
        "duration_s": None if ended_at is None else max(0.0, ended_at - row.created_at),
        "exit_code": row.exit_code, "exit_signal": row.exit_signal, "strict": row.strict,
        "nodes": row.nodes.split(",") if row.nodes else [], "external_id": row.external_id,
        "restored_from": row.restored_from, "priority": row.priority, "reserved_bytes": row.reserved_bytes,
        "memory_quota": row.memory_quota, "sm_share": row.sm_share, "walltime_s": row.walltime_s,
        "version": row.version,
    }  # fmt: skip


def add(session: Session, job: JobRow, created_at: float, labels: Mapping[str, str]) -> None:
    session.execute(ADDING, {**asdict(job), "created_at": created_at})
    if labels:
        session.execute(insert(JobLabel), [{"job_id": job.id, "key": k, "value": v} for k, v in labels.items()])


def made(session: Session, job: models.Job) -> None:
    """One that a process has brought. One that was restored is for its scheduler what the job before was."""
    earlier = None if job.restored_from is None else session.get(Job, job.restored_from)
    if earlier is not None and earlier.uid == job.uid:
        job.external_id, job.priority = earlier.external_id, earlier.priority
    session.merge(job)
    if earlier is not None:
        session.flush()
        for label in session.scalars(select(JobLabel).where(JobLabel.job_id == earlier.id)).all():
            session.merge(JobLabel(job_id=job.id, key=label.key, value=label.value))


def change(session: Session, job: Job, labels: Mapping[str, str | None], values: Mapping[str, Any], most: int) -> bool:
    """Labels by their keys; None removes one. False: there would be more than `most`, and nothing is changed."""
    query = select(JobLabel).where(JobLabel.job_id == job.id)
    merged: dict[str, str | None] = {label.key: label.value for label in session.scalars(query)}
    kept = {key: value for key, value in (merged | {**labels}).items() if value is not None}
    if len(kept) > most:
        return False
    session.execute(delete(JobLabel).where(JobLabel.job_id == job.id))
    if kept:
        session.execute(insert(JobLabel), [{"job_id": job.id, "key": k, "value": v} for k, v in kept.items()])
    session.execute(update(Job).where(Job.id == job.id).values(version=Job.version + 1, **values))
    return True


def job_model(job: JobRow) -> models.Job:
    return models.Job(**asdict(job), created_at=time.time())


def job_row(job: models.Job) -> JobRow:
    return JobRow(
        id=job.id, name=job.name, command=job.command, uid=job.uid, device=job.device, registered=job.registered,
        token_hash=None if job.stopped else job.token_hash, hang_timeout=job.hang_timeout,
        replica_policy=cast(ReplicaPolicy | None, job.replica_policy), strict=job.strict,
        runner_pid=job.runner_pid, runner_start=job.runner_start, nodes=job.nodes, external_id=job.external_id,
        restored_from=job.restored_from, priority=cast(Priority, job.priority), reserved_bytes=job.reserved_bytes,
        memory_quota=job.memory_quota, sm_share=job.sm_share, walltime_s=job.walltime_s,
    )  # fmt: skip


def end(session: Session, job: str, end: End, at: float) -> None:
    """Who saw nothing leaves what is known; who saw something is believed once."""
    statement = update(models.Job).where(models.Job.id == job)
    session.execute(statement.values(ended_at=func.coalesce(models.Job.ended_at, at)))
    if end.code is not None or end.signal is not None:
        unknown = statement.where(models.Job.exit_code.is_(None), models.Job.exit_signal.is_(None))
        session.execute(unknown.values(exit_code=end.code, exit_signal=end.signal))


def runners(session: Session) -> list[tuple[str, int, int]]:
    """Jobs whose runner the last daemon watched: with its pid and start."""
    query = select(models.Job.id, models.Job.runner_pid, models.Job.runner_start)
    query = query.where(models.Job.runner_pid.is_not(None), models.Job.ended_at.is_(None))
    return [(job, pid, started or 0) for job, pid, started in session.execute(query) if pid is not None]


def reserving(session: Session) -> list[tuple[JobRow, float]]:
    """Jobs with a reservation that may not be over, and when each was made."""
    query = select(models.Job).where(
        models.Job.reserved_bytes.is_not(None), models.Job.ended_at.is_(None), ~models.Job.stopped
    )
    return [(job_row(job), job.created_at) for job in session.scalars(query)]


def launched(session: Session) -> list[JobRow]:
    """Whose runners may still be there."""
    query = select(models.Job).where(models.Job.runner_pid.is_not(None), ~models.Job.stopped)
    return [job_row(job) for job in session.scalars(query.order_by(models.Job.created_at.desc()).limit(1000))]
