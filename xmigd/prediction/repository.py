"""Jobs that have ended, and what was measured of jobs, in the database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import case, exists, func, select
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.orm import Session

from xmigd.database.models import Device, Job, JobLabel, JobProfile, Process
from xmigd.devices.names import devices_of
from xmigd.prediction.features import Past, Subject
from xmigd.prediction.scaling import Measured, is_usable, kind_of
from xmigd.processes.states import LIVE

MOST_OF_USER = 500  # jobs: nobody makes the others' forgotten
STEPS = ("step_devices", "step_ms", "collectives")


def save(session: Session, profiles: Sequence[dict[str, Any]]) -> None:
    """Of jobs that may be gone by now. A restarted daemon has not seen what the last one has: the most counts."""
    there = set(session.scalars(select(Job.id).where(Job.id.in_([each["job_id"] for each in profiles]))))
    for profile in profiles:
        if profile["job_id"] not in there:
            continue
        statement = insert(JobProfile).values(profile)
        known, new = JobProfile, statement.excluded
        known_steps = JobProfile.__table__.c
        session.execute(
            statement.on_conflict_do_update(
                index_elements=["job_id"],
                set_={
                    "devices": func.max(known.devices, new.devices),
                    "peak_bytes": func.max(known.peak_bytes, new.peak_bytes),
                    "minute_bytes": func.coalesce(known.minute_bytes, new.minute_bytes),
                    "minute_calls": func.coalesce(known.minute_calls, new.minute_calls),
                    # What belongs together: of one moment, the last.
                    **{name: case((new.step_ms.is_not(None), new[name]), else_=known_steps[name]) for name in STEPS},
                },
            )
        )  # fmt: skip


def past(session: Session, most: int) -> list[Past]:
    """The last jobs that have ended by themselves, in the order of their ends. Left out: jobs that were stopped or
    lost, or went on from a checkpoint. Those have not run as long as they would have, or not here."""
    of_job = Process.job_id == Job.id
    last = select(func.max(Process.ended_at)).where(of_job).correlate(Job).scalar_subquery()
    ended_at = func.max(func.coalesce(Job.ended_at, last), func.coalesce(last, Job.ended_at))
    over = (
        select(
            Job.id, ended_at.label("ended_at"),
            func.row_number().over(partition_by=Job.uid, order_by=ended_at.desc()).label("place"),
        )
        .where(
            exists().where(of_job), ~exists().where(of_job, Process.state.in_((*LIVE, "lost"))), ~Job.stopped,
            Job.exit_signal.is_(None), Job.restored_from.is_(None), ended_at.is_not(None),
            Job.runner_pid.is_(None) | Job.ended_at.is_not(None),
        )
        .subquery()
    )  # fmt: skip
    query = (
        select(Job, over.c.ended_at, JobProfile)
        .join(over, over.c.id == Job.id)
        .outerjoin(JobProfile, JobProfile.job_id == Job.id)
        .where(over.c.place <= MOST_OF_USER)
        .order_by(over.c.ended_at.desc())
        .limit(most)
    )
    rows = session.execute(query).all()
    labels = labels_of(session, [job.id for job, _, _ in rows])
    return [
        Past(
            subject=subject_of(job, profile, labels.get(job.id, ())), seconds=max(0.0, at - job.created_at),
            peak_bytes=None if profile is None else profile.peak_bytes,
        )
        for job, at, profile in reversed(rows)
    ]  # fmt: skip


def measured(session: Session, job_id: str) -> list[Measured]:
    """The steps of this job and of those that are alike, on devices of the same name; the newest first."""
    job = session.get(Job, job_id)
    models = models_of(session, [job_id]).get(job_id)
    if job is None or models is None:
        return []
    own = session.get(JobProfile, job_id)
    ran_on = number_of_devices(job.device) if own is None else own.step_devices or own.devices
    kind = kind_of(job.name, job.command, ran_on)
    query = (
        select(Job, JobProfile)
        .join(JobProfile, JobProfile.job_id == Job.id)
        .where(Job.uid == job.uid, JobProfile.step_ms.is_not(None))
        .order_by(Job.created_at.desc())
        .limit(MOST_OF_USER)
    )
    there = [
        (other.id, profile) for other, profile in session.execute(query).tuples()
        if is_usable(profile.step_ms) and profile.step_devices
        and kind_of(other.name, other.command, profile.step_devices) == kind
    ]  # fmt: skip
    of_others = models_of(session, [other for other, _ in there])
    return [
        Measured(devices=profile.step_devices or 1, step_ms=profile.step_ms or 0.0, collectives=profile.collectives)
        for other, profile in there if of_others.get(other) == models
    ]  # fmt: skip


def models_of(session: Session, jobs: Sequence[str]) -> dict[str, set[str]]:
    """The names of the devices on which their processes are or were, such as a GPU's model."""
    names = {device.id: device.name or device.kind for device in session.scalars(select(Device))}
    found: dict[str, set[str]] = {}
    for job, device in session.execute(select(Process.job_id, Process.device).where(Process.job_id.in_(jobs))):
        found.setdefault(job, set()).update(names.get(each, each) for each in devices_of(device))
    return found


def subject(session: Session, job_id: str) -> Subject | None:
    job = session.get(Job, job_id)
    if job is None:
        return None
    return subject_of(job, session.get(JobProfile, job_id), labels_of(session, [job_id]).get(job_id, ()))


def subject_of(job: Job, profile: JobProfile | None, labels: Sequence[tuple[str, str]]) -> Subject:
    return Subject(
        user=str(job.uid), name=job.name, command=job.command, labels=tuple(labels),
        devices=number_of_devices(job.device) if profile is None else profile.devices, started_at=job.created_at,
        walltime=job.walltime_s,
        minute_bytes=None if profile is None else profile.minute_bytes,
        minute_calls=None if profile is None else profile.minute_calls,
    )  # fmt: skip


def number_of_devices(device: str | None) -> int:
    return 1 if device is None else device.count(",") + 1


def labels_of(session: Session, jobs: Sequence[str]) -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    for start in range(0, len(jobs), 500):
        query = select(JobLabel).where(JobLabel.job_id.in_(jobs[start : start + 500]))
        for label in session.scalars(query.order_by(JobLabel.key)):
            found.setdefault(label.job_id, []).append((label.key, label.value))
    return found


def is_over(session: Session, job_id: str) -> bool:
    of_job = Process.job_id == job_id
    lives = session.scalar(select(exists().where(of_job, Process.state.in_(LIVE))))
    begun = session.scalar(select(exists().where(of_job)))
    job = session.get(Job, job_id)
    runs = job is not None and job.runner_pid is not None and job.ended_at is None
    return job is None or job.stopped or (not lives and not runs and (bool(begun) or job.ended_at is not None))
