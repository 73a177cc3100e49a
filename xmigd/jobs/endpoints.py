"""Jobs: what `xmigctl run` starts."""

from __future__ import annotations

import asyncio
from typing import Annotated
from urllib.parse import urlencode

from fastapi import Path, Query, Request, Response
from pydantic import TypeAdapter

from xmigd.api import preconditions
from xmigd.api.cached import Cached
from xmigd.api.dependencies import AnyCaller, BeforeNumber, Id, Limit, OperatingCaller, provided
from xmigd.api.preconditions import IfMatch
from xmigd.api.routing import make_router
from xmigd.errors import Forbidden, Invalid
from xmigd.ipc import pidfd as pidfds
from xmigd.ipc.exits import End
from xmigd.jobs.repository import Conditions
from xmigd.jobs.schemas import (
    LABEL_KEY,
    LABEL_WORDS,
    Armed,
    InjectRequest,
    JobChange,
    JobExit,
    JobInfo,
    JobMade,
    JobMovable,
    JobRequest,
    JobState,
    LogLineInfo,
    StopAnswer,
)
from xmigd.jobs.service import Jobs, Sort
from xmigd.schemas import EXACT, written
from xmigd.text import INVISIBLE
from xmigd.users import uid_of

router = make_router("/v1/jobs")
JOBS = TypeAdapter(list[JobInfo])
JobId = Annotated[str, Path(max_length=64)]
LABEL = f"{LABEL_KEY[:-1]}(=[^{INVISIBLE}]*)?$"
Label = Annotated[str, Query(max_length=319, pattern=LABEL), written(LABEL, LABEL_WORDS)]
TheJobs = Annotated[Jobs, provided(Jobs)]


LINKS = {
    name: {"operationId": name, "parameters": {"job": "$response.body#/id"}}
    for name in ("get_job", "change_job", "stop_job", "inject_fault", "report_exit")
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
    made = await jobs.make(wanted, uid=caller.uid, runner=runner, is_operator=caller.is_operator)
    request.state.secret = True
    job = made.job
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    return JobMade(
        id=job.id, name=job.name, command=job.command, uid=job.uid, device=job.device, registered=True,
        hang_timeout=job.hang_timeout, replica_policy=job.replica_policy, created_at=made.created_at,
        state="created", processes=0, strict=job.strict, nodes=job.nodes.split(",") if job.nodes else [],
        unprotected=0, faults=0, recoveries=0, labels=wanted.labels, external_id=job.external_id,
        priority=job.priority, reserved_bytes=job.reserved_bytes, memory_quota=job.memory_quota,
        walltime_s=job.walltime_s,
        watched=made.watched, preload=made.preload,
        library_path=made.library_path, environment=made.environment, network=made.network,
        # JAX keeps what it has got otherwise, and no snapshot can tell what of it is in use (docs/decisions/0030).
        defaults={"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async", **made.defaults},
    )  # fmt: skip


@router.get(
    "",
    operation_id="list_jobs",
    response_model=list[JobInfo],
    responses={
        200: {
            "headers": {
                "Link": {
                    "schema": {"type": "string"},
                    "description": '</v1/jobs?...&cursor=...>; rel="next": the next page. Not there: this is the last',
                }
            }
        }
    },
)
async def list_jobs(
    jobs: TheJobs,
    cached: Annotated[Cached, provided(Cached)],
    caller: AnyCaller,
    request: Request,
    live: bool = False,
    state: Annotated[list[JobState], Query(max_length=6, description="one of these; may be given again")] = [],  # noqa: B006
    user: Annotated[str | None, Query(max_length=64, description="a name, or a number")] = None,
    label: Annotated[
        list[Label], Query(max_length=16, description="KEY=VALUE, or KEY for any value; all of them, if given again")
    ] = [],  # noqa: B006
    external_id: Annotated[str | None, Query(max_length=255)] = None,
    device: Annotated[
        str | None, Query(max_length=64, pattern=r"^[a-z]+:[0-9]+$", description="that it is on, or is to be")
    ] = None,
    sort: Annotated[
        Sort, Query(description="created: the newest first; name; memory: the most first; state: created, running, ...")
    ] = "created",
    reverse: bool = False,
    cursor: Annotated[str | None, Query(max_length=2048, description="from the `Link` of the page before")] = None,
    before: Annotated[
        str | None, Query(max_length=32, description="those that are older than this one; with sort=created only")
    ] = None,
    limit: Limit = 100,
) -> Response:
    """Jobs, newest first if nothing else is requested. `live`: only those of which a process lives. A list of several
    pages goes on behind `Link`; each job comes once, also if it ends meanwhile."""
    if before is not None and (sort != "created" or reverse or cursor is not None):
        raise Invalid("before: it goes with the newest first only", hint="follow Link, or send cursor instead")
    conditions = Conditions(
        owner=caller.owner, live=live, states=tuple(state), external_id=external_id, device=device,
        uid=None if user is None else await asyncio.to_thread(uid_of, user),
        labels=tuple((key, value if given else None) for key, given, value in (each.partition("=") for each in label)),
    )  # fmt: skip

    def make() -> tuple[bytes, dict[str, str]]:
        rows, following = jobs.page(
            conditions, sort=sort, reverse=reverse, before=before, cursor=cursor, limit=limit
        )  # fmt: skip
        headers = {}
        if following is not None:
            given = [pair for pair in request.query_params.multi_items() if pair[0] not in ("cursor", "before")]
            headers["Link"] = f'</v1/jobs?{urlencode([*given, ("cursor", following)])}>; rel="next"'
        return JOBS.dump_json(JOBS.validate_python(rows)), headers

    if sort in ("memory", "state"):  # memory is not in the database, and an order is remembered for one caller
        body, headers = await asyncio.to_thread(make)
        return Response(body, headers=headers, media_type="application/json")
    return await cached.json(("jobs", conditions, sort, reverse, before, cursor, limit), make)


@router.get("/{job}", operation_id="get_job")
def get_job(jobs: TheJobs, caller: AnyCaller, job: JobId, response: Response) -> JobInfo:
    """One job. Its `ETag` is for a PATCH."""
    return _tagged(jobs.find(job, caller), response)


@router.patch("/{job}", operation_id="change_job")
async def change_job(
    jobs: TheJobs, caller: OperatingCaller, job: JobId, change: JobChange, if_match: IfMatch, response: Response
) -> JobInfo:
    """Change its labels and what its scheduler calls it, also when it is over."""
    check = lambda version: preconditions.check(if_match, version)  # noqa: E731
    return _tagged(await jobs.change(job, change, check=check, caller=caller), response)


def _tagged(info: JobInfo, response: Response) -> JobInfo:
    response.headers["ETag"] = preconditions.etag(info.version)
    return info


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
