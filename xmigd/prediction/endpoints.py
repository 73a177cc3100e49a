"""Predictions of jobs."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Path, Query
from pydantic import Field

from xmigd.api.dependencies import AnyCaller, provided
from xmigd.api.routing import make_router
from xmigd.jobs.service import Jobs
from xmigd.prediction.scaling import MOST_DEVICES
from xmigd.prediction.schemas import JobPrediction, JobScaling
from xmigd.prediction.service import Predictions

router = make_router("/v1/jobs")
Count = Annotated[int, Field(ge=1, le=MOST_DEVICES)]


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


@router.get("/{job}/scaling", operation_id="get_job_scaling")
async def get_job_scaling(
    predictions: Annotated[Predictions, provided(Predictions)],
    jobs: Annotated[Jobs, provided(Jobs)],
    caller: AnyCaller,
    job: Annotated[str, Path(max_length=64)],
    devices: Annotated[list[Count], Query(max_length=32, description="numbers of devices")] = [1, 2, 4, 8],  # noqa: B006
) -> JobScaling:
    """How long a step of a job would take on other numbers of devices, from the steps of jobs of its user that differ
    only in that number. Each may be unknown, and says why. The job may be over."""
    await asyncio.to_thread(jobs.find, job, caller)
    return await predictions.scaling(job, devices)
