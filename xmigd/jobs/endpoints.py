"""Jobs: what `xmigctl run` starts."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query, Request, Response
from pydantic import TypeAdapter

from xmigd.api.cached import Cached
from xmigd.api.dependencies import AnyCaller, BeforeId, BeforeNumber, Id, Limit, OperatingCaller, provided
from xmigd.api.routing import make_router
from xmigd.errors import Forbidden, Invalid
from xmigd.ipc import pidfd as pidfds
from xmigd.ipc.exits import End
from xmigd.jobs.schemas import (
    Armed,
    InjectRequest,
    JobExit,
    JobInfo,
    JobMade,
    JobMovable,
    JobRequest,
    LogLineInfo,
    StopAnswer,
)
from xmigd.jobs.service import Jobs
from xmigd.schemas import EXACT

router = make_router("/v1/jobs")
JOBS = TypeAdapter(list[JobInfo])
JobId = Annotated[str, Path(max_length=64)]
TheJobs = Annotated[Jobs, provided(Jobs)]


LINKS = {
    name: {"operationId": name, "parameters": {"job": "$response.body#/id"}}
    for name in ("get_job", "stop_job", "inject_fault", "report_exit")
}


@router.post(
    "",
    operation_id="create_job",
    status_code=201,
    responses={201: {"description": "It is registered.", "links": LINKS}},
)
async def make_job(
    jobs: TheJobs, caller: OperatingCaller, wanted: JobRequest, request: Request, response: Response
) -> JobMade:
    """Register a job. The answer says how to start its programs; the token is shown only here."""
    if caller.uid is None:
        raise Forbidden(
            "a job belongs to a user, and this token to none", code="needs_user",
            hint="use the local socket, or a token that was made for a user (uid)",
        )  # fmt: skip
    peer = request.state.peer
    runner = (peer[0].pid, pidfds.start_time(peer[0].pid)) if wanted.watch and peer is not None else None
    made = await jobs.make(wanted, uid=caller.uid, runner=runner)
    request.state.secret = True
    job = made.job
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    return JobMade(
        id=job.id, name=job.name, command=job.command, uid=job.uid, device=job.device, registered=True,
        hang_timeout=job.hang_timeout, replica_policy=job.replica_policy, created_at=made.created_at,
        state="created", processes=0, strict=job.strict, nodes=job.nodes.split(",") if job.nodes else [],
        unprotected=0, faults=0, recoveries=0, watched=made.watched, preload=made.preload,
        library_path=made.library_path, environment=made.environment,
        # JAX keeps what it has got otherwise, and no snapshot can tell what of it is in use (docs/decisions/0030).
        defaults={"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"},
    )  # fmt: skip


@router.get("", operation_id="list_jobs", response_model=list[JobInfo])
async def list_jobs(
    jobs: TheJobs,
    cached: Annotated[Cached, provided(Cached)],
    caller: AnyCaller,
    live: bool = False,
    before: BeforeId = None,
    limit: Limit = 100,
) -> Response:
    """Jobs, newest first. `live`: only those of which a process lives."""

    def make() -> bytes:
        rows = jobs.page(caller.owner, live=live, before=before, limit=limit)
        return JOBS.dump_json(JOBS.validate_python(rows))

    return await cached.json(("jobs", caller.owner, live, before, limit), make)


@router.get("/{job}", operation_id="get_job")
def get_job(jobs: TheJobs, caller: AnyCaller, job: JobId) -> JobInfo:
    """One job."""
    return jobs.find(job, caller)


@router.get("/{job}/logs", operation_id="list_log_lines")
async def list_log_lines(
    jobs: TheJobs,
    caller: AnyCaller,
    job: JobId,
    process: Id = None,
    after: Annotated[int | None, Query(ge=0, le=EXACT, description="what followed this line")] = None,
    before: BeforeNumber = None,
    limit: Limit = 100,
) -> list[LogLineInfo]:
    """What xMIG has to say about a job, oldest first: the newest lines, or those before or after one. A job's last 1000
    are kept."""
    return await jobs.lines(job, caller, after=after, before=before, process=process, limit=limit)


@router.get("/{job}/movable", operation_id="get_movable")
async def get_movable(jobs: TheJobs, caller: AnyCaller, job: JobId) -> JobMovable:
    """What would stop its programs on this node from being dumped with CRIU, and from being restored on another node.
    Nothing is done to them; it is so at this moment."""
    return await jobs.movable(job, caller)


@router.delete("/{job}", operation_id="stop_job", status_code=202)
async def stop_job(jobs: TheJobs, caller: OperatingCaller, job: JobId) -> StopAnswer:
    """Stop its programs: SIGTERM, and SIGKILL after a grace. No other process can join it any more."""
    return StopAnswer(job=job, signalled=await jobs.stop(job, caller))


@router.post("/{job}:exited", operation_id="report_exit", status_code=202)
async def report_exit(jobs: TheJobs, caller: OperatingCaller, job: JobId, end: JobExit) -> JobInfo:
    """With what the program ended that was started for this job, by who has waited for it. It is believed once."""
    if (end.exit_code is None) == (end.exit_signal is None):
        raise Invalid("a program ends with an exit code or by a signal", hint="give one of exit_code and exit_signal")
    return await jobs.exited(job, caller, End(end.exit_code, end.exit_signal))


@router.post("/{job}/faults:inject", operation_id="inject_fault", status_code=202)
async def inject_fault(jobs: TheJobs, caller: OperatingCaller, job: JobId, request: InjectRequest) -> list[Armed]:
    """Arm a fault in the job's servers; it is injected once. For tests and drills."""
    armed = await jobs.inject(job, caller, request)
    return [Armed(process=process.row.id, injection=injection) for process, injection in armed]
