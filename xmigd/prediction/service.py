"""Predictions of jobs: a model of jobs that have ended, trained again in the background when there are enough new ones.

A prediction itself takes less than a millisecond. Nobody waits for a training, except for the first one, and for a
while, whoever requests a prediction of a job.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace

from sqlalchemy import select

from xmigd import log
from xmigd.database.models import Job
from xmigd.database.reader import Reader
from xmigd.errors import Conflict
from xmigd.prediction import repository
from xmigd.prediction.features import Known, Past, Subject
from xmigd.prediction.first_minutes import FirstMinutes
from xmigd.prediction.model import LEAST_JOBS, Model, Predicted, Remaining, Target
from xmigd.prediction.scaling import Measured, points_of, scaled
from xmigd.prediction.schemas import JobPrediction, JobScaling, MeasuredSteps, PredictedQuantity, ScaledStep
from xmigd.prediction.trainer import MOST_JOBS, NOT_INSTALLED, is_installed, trained

logger = log.get("prediction")

READ_EVERY = 10.0  # seconds: the history is not read more often
AGAIN_AFTER = 0.1  # share of new jobs with which the model is trained again
AGAIN_LEAST = 10  # new jobs, at least
AFTER_FAILURE = 60.0  # seconds after which a training that has failed is tried again
WAITED = 20.0  # seconds, for the first training
BEING_TRAINED = "the model is being trained; request it again in some seconds"


class Predictions:
    """Lives in the event loop's thread."""

    def __init__(self, *, reader: Reader, profiles: FirstMinutes) -> None:
        self._reader = reader
        self._profiles = profiles
        self._known = Known()
        self._jobs: list[Past] = []
        self._read_at = -READ_EVERY
        self._model: Model | None = None
        self._last: tuple[float, float] = (0.0, 0.0)  # of what the model was trained with: jobs, end of the last
        self._why = ""  # the last training failed
        self._failed_at = -AFTER_FAILURE
        self._training: asyncio.Task[None] | None = None
        self._reading = asyncio.Lock()
        self._scaling = asyncio.Lock()  # one solver at a time, however many requests there are

    async def of_job(self, job: str) -> JobPrediction:
        """The caller sees the job. Raises Conflict: it is over."""
        await self._refresh(wait=True)
        subject, over = await asyncio.to_thread(self._subject, job)
        if subject is None or over:
            raise Conflict(f"job {job[:64]!r} is over", code="job_over", hint="xmigctl job show says how long it took")
        now = time.time()
        subject, elapsed = self._measured(job, subject), max(0.0, now - subject.started_at)
        remaining = self._predict("remaining", subject, elapsed)
        peak = self._predict("peak", subject, elapsed)
        profile = self._profiles.of(job)
        if profile is not None and peak.p50 is not None and peak.p90 is not None:  # it has had so much already
            peak = Predicted(p50=max(peak.p50, profile.peak_bytes), p90=max(peak.p90, profile.peak_bytes))
        return JobPrediction(
            job_id=job, at=now, elapsed_s=elapsed, remaining_s=_shown(remaining), peak_bytes=_shown(peak),
            basis=self._basis(subject),
        )  # fmt: skip

    async def scaling(self, job: str, devices: Sequence[int]) -> JobScaling:
        """The caller sees the job."""
        measured = await asyncio.to_thread(self._steps, job)
        jobs = Counter(each.devices for each in measured)
        async with self._scaling:
            found = await scaled(measured, list(dict.fromkeys(devices)))
        return JobScaling(
            job_id=job,
            measured=[
                MeasuredSteps(devices=point.devices, jobs=jobs[point.devices], step_ms=point.step_ms)
                for point in points_of(measured)
            ],
            steps=[ScaledStep.model_validate(asdict(each)) for each in found],
        )  # fmt: skip

    async def remaining(self, jobs: Iterable[str]) -> dict[str, Remaining]:
        """Of those of which it is known. Waits for no training."""
        await self._refresh(wait=False)
        if self._model is None:
            return {}
        found, now = {}, time.time()
        for job, subject in (await asyncio.to_thread(self._subjects, list(jobs))).items():
            predicted = self._predict("remaining", self._measured(job, subject), max(0.0, now - subject.started_at))
            if predicted.p50 is not None and predicted.p90 is not None:
                found[job] = Remaining(p50=predicted.p50, p90=predicted.p90)
        return found

    async def peak_bytes(self, subject: Subject) -> int | None:
        """The P90 of a job that is about to begin; None: unknown. Waits for no training."""
        await self._refresh(wait=False)
        found = self._predict("peak", subject, 0.0).p90
        return None if found is None else int(found)

    async def stop(self) -> None:
        if self._training is not None:
            self._training.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._training

    # --- the model ----------------------------------------------------------------------------------------------------

    def _predict(self, target: Target, subject: Subject, elapsed: float) -> Predicted:
        if not is_installed():
            return Predicted(unknown=NOT_INSTALLED)
        if self._model is not None:
            return self._model.predict(target, self._known, subject, elapsed)
        if len(self._jobs) < LEAST_JOBS:
            return Predicted(unknown=f"{len(self._jobs)} jobs have ended; {LEAST_JOBS} are needed")
        return Predicted(unknown=self._why or BEING_TRAINED)

    def _measured(self, job: str, subject: Subject) -> Subject:
        """With what is not written down yet."""
        profile = self._profiles.of(job)
        if profile is None or subject.minute_bytes is not None:
            return subject
        return replace(
            subject, devices=max(subject.devices, profile.devices), minute_bytes=profile.minute_bytes,
            minute_calls=profile.minute_calls,
        )  # fmt: skip

    def _basis(self, subject: Subject) -> str:
        if self._model is None:
            return "nothing"
        return (
            f"quantile regression over {self._model.jobs} ended jobs of this node, calibrated with "
            f"{self._model.calibrated} of them; features from the last {self._known.similar(subject)} of this user"
        )  # fmt: skip

    async def _refresh(self, *, wait: bool) -> None:
        """`wait`: for the training, if there is no model yet."""
        if not is_installed():
            return
        async with self._reading:
            if time.monotonic() - self._read_at >= READ_EVERY:
                self._jobs, self._known = await asyncio.to_thread(self._history)
                self._read_at = time.monotonic()
        if self._training is None and self._is_old() and time.monotonic() - self._failed_at >= AFTER_FAILURE:
            self._training = asyncio.get_running_loop().create_task(self._train(self._jobs))
        if wait and self._model is None and self._training is not None:
            await asyncio.wait({self._training}, timeout=WAITED)

    def _is_old(self) -> bool:
        if len(self._jobs) < LEAST_JOBS:
            return False
        if self._model is None:
            return True
        jobs, last = self._last
        return sum(past.ended_at > last for past in self._jobs) >= max(AGAIN_LEAST, AGAIN_AFTER * jobs)

    async def _train(self, jobs: Sequence[Past]) -> None:
        began = time.monotonic()
        try:
            model, self._why = await trained(jobs)
        except Exception as error:  # no memory for a process, say
            logger.exception("the training failed")
            model, self._why = None, f"the training failed ({type(error).__name__})"
        finally:
            self._training = None
        if model is None:
            self._failed_at = time.monotonic()
            logger.warning("no model of jobs", why=self._why)
            return
        self._model, self._last = model, (len(jobs), jobs[-1].ended_at)
        logger.info("a model of jobs was trained", jobs=model.jobs, seconds=round(time.monotonic() - began, 1))

    # --- in a thread --------------------------------------------------------------------------------------------------

    def _history(self) -> tuple[list[Past], Known]:
        with self._reader.session() as session:
            jobs = repository.past(session, MOST_JOBS)
        known = Known()
        for past in jobs:
            known.add(past)
        return jobs, known

    def _subject(self, job: str) -> tuple[Subject | None, bool]:
        with self._reader.session() as session:
            return repository.subject(session, job), repository.is_over(session, job)

    def _steps(self, job: str) -> list[Measured]:
        with self._reader.session() as session:
            return repository.measured(session, job)

    def _subjects(self, jobs: list[str]) -> dict[str, Subject]:
        with self._reader.session() as session:
            found = {job: repository.subject(session, job) for job in dict.fromkeys(jobs)}
        return {job: subject for job, subject in found.items() if subject is not None}

    def started_at(self, jobs: Iterable[str]) -> dict[str, float]:
        """When these began, Unix seconds. For a thread."""
        with self._reader.session() as session:
            query = select(Job.id, Job.created_at).where(Job.id.in_(list(jobs)))
            return dict(session.execute(query).tuples().all())


def _shown(predicted: Predicted) -> PredictedQuantity:
    return PredictedQuantity(p50=predicted.p50, p90=predicted.p90, unknown=predicted.unknown)
