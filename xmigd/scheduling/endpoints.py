"""What schedulers request: that a job makes room in time, that it continues, one thing for many jobs."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Response

from xmigd.api.dependencies import OperatingCaller, provided
from xmigd.api.routing import make_router
from xmigd.operations.endpoints import ACCEPTED, accepted
from xmigd.operations.schemas import OperationInfo
from xmigd.scheduling.bulk import Bulk
from xmigd.scheduling.schemas import BulkRequest, ContinueRequest, PreemptRequest
from xmigd.scheduling.service import Preemptions

router = make_router("/v1")
JobId = Annotated[str, Path(max_length=64)]
ThePreemptions = Annotated[Preemptions, provided(Preemptions)]
TheBulk = Annotated[Bulk, provided(Bulk)]


@router.post("/jobs/{job}:preempt", operation_id="preempt_job", status_code=202, responses=ACCEPTED)
async def preempt_job(
    preemptions: ThePreemptions, caller: OperatingCaller, job: JobId, request: PreemptRequest, response: Response
) -> OperationInfo:
    """Give a job's devices back within a deadline. The result says `how`: suspended, or as a checkpoint, with its id.
    If that is not done at the deadline, or not possible, the job goes on running, and the error says why."""
    row = await preemptions.preempt(caller, job, seconds=request.deadline_seconds, prefer=request.prefer)
    return accepted(row, response)


@router.post("/jobs/{job}:continue", operation_id="continue_job", status_code=202, responses=ACCEPTED)
async def continue_job(
    preemptions: ThePreemptions, caller: OperatingCaller, job: JobId, request: ContinueRequest, response: Response
) -> OperationInfo:
    """Let a job go on that was preempted: a resumption if it is suspended; otherwise it is restored from the checkpoint
    that its preemption left, as a job of its own with the same labels and external id, which the result names."""
    return accepted(await preemptions.continue_(caller, job, request.devices), response)


@router.post("/jobs:bulk", operation_id="act_on_jobs", status_code=202, responses=ACCEPTED)
async def act_on_jobs(
    bulk: TheBulk, caller: OperatingCaller, request: BulkRequest, response: Response
) -> OperationInfo:
    """The same for many jobs, by their ids or labels, a few at a time. The operation's result has an outcome for each
    job; it succeeds also if some of them fail."""
    return accepted(await bulk.start(caller, request), response)
