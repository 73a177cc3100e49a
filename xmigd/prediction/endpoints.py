"""Predictions of jobs."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Path

from xmigd.api.dependencies import AnyCaller, provided
from xmigd.api.routing import make_router
from xmigd.jobs.service import Jobs
from xmigd.prediction.schemas import JobPrediction
from xmigd.prediction.service import Predictions

router = make_router("/v1/jobs")


@router.get("/{job}/prediction", operation_id="get_job_prediction")
async def get_job_prediction(
    predictions: Annotated[Predictions, provided(Predictions)],
    jobs: Annotated[Jobs, provided(Jobs)],
    caller: AnyCaller,
    job: Annotated[str, Path(max_length=64)],
) -> JobPrediction:
    """How long a job will still run, and its peak of device memory, from jobs that have ended. Each may be unknown,
    and says why. The first request waits while a model is trained."""
    await asyncio.to_thread(jobs.find, job, caller)
    return await predictions.of_job(job)
