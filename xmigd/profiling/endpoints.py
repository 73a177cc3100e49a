"""Profiles and traces of jobs."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import Path, Query, Response
from starlette.responses import FileResponse

from xmigd.api.dependencies import AnyCaller, OperatingCaller, provided
from xmigd.api.routing import make_router
from xmigd.errors import NotFound
from xmigd.operations.endpoints import ACCEPTED, accepted
from xmigd.operations.schemas import OperationInfo
from xmigd.processes.service import Processes
from xmigd.profiling.profiles import Profiles
from xmigd.profiling.report import report
from xmigd.profiling.schemas import JobProfile, TraceInfo, TraceRequest
from xmigd.profiling.traces import Traces

router = make_router("/v1")
TheTraces = Annotated[Traces, provided(Traces)]
TheProfiles = Annotated[Profiles, provided(Profiles)]
TheProcesses = Annotated[Processes, provided(Processes)]
JobId = Annotated[str, Path(max_length=64)]
TraceId = Annotated[str, Path(max_length=64)]
FILE: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "JSON in the Trace Event Format, which Perfetto opens.",
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
}


@router.get("/jobs/{job}/profile", operation_id="get_profile")
def get_profile(
    profiles: TheProfiles, caller: AnyCaller, job: JobId,
    limit: Annotated[int, Query(ge=1, le=1024, description="operations, those with the most time")] = 50,
) -> JobProfile:  # fmt: skip
    """Where a job's time on its devices goes: its operations, memory, steps. Durations are of samples, shares are
    estimates that say so."""
    watched = [one for one in profiles.of_job(job) if caller.sees(one.uid)]
    if not watched:
        why = "" if profiles.every else ": profiles are switched off (profile_every)"
        raise NotFound(
            f"there is no profile of job {job[:64]!r}{why}",
            hint="those of running jobs are there after two seconds, and the last that are over",
        )
    return report(job, watched, profiles.every, limit)


@router.post("/jobs/{job}/traces", operation_id="create_trace", status_code=202, responses=ACCEPTED)
async def create_trace(
    traces: TheTraces, processes: TheProcesses, caller: OperatingCaller, job: JobId, response: Response,
    request: TraceRequest,
) -> OperationInfo:  # fmt: skip
    """Write down all that a job's devices do for some seconds: kernels, copies, graphs, collectives. It goes on
    running. The file is there when the operation has succeeded."""
    row = await traces.start(processes.of_job(caller, job), request.seconds, requestor=caller.name)
    return accepted(row, response)


@router.get("/jobs/{job}/traces", operation_id="list_traces")
def list_traces(traces: TheTraces, caller: AnyCaller, job: JobId) -> list[TraceInfo]:
    """Traces that can be fetched, newest first."""
    return traces.of_job(caller, job)


@router.get("/traces/{trace}", operation_id="get_trace", response_class=FileResponse, responses=FILE)
async def get_trace(traces: TheTraces, caller: AnyCaller, trace: TraceId) -> FileResponse:
    """The file of a trace."""
    path = await asyncio.to_thread(traces.find, caller, trace)
    return FileResponse(path, media_type="application/json", filename=f"xmig-trace-{trace[:12]}.json")
