"""Jobs: what `xmigctl run` starts."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import TypeAdapter
from sqlalchemy import update
from sqlalchemy.orm import Session

from xmigd.api.context import AnyCaller, BeforeId, BeforeNumber, Id, Limit, Node, OperatingCaller, TheNode
from xmigd.api.schemas import (
    EXACT,
    Armed,
    InjectRequest,
    JobExit,
    JobInfo,
    JobMade,
    JobRequest,
    LogLineInfo,
    StopAnswer,
)
from xmigd.database import models
from xmigd.errors import Forbidden, Invalid, NotFound
from xmigd.ipc import pidfd as pidfds
from xmigd.ipc.exits import End
from xmigd.jobs import repository
from xmigd.logs import repository as logs
from xmigd.recording.published import publish_job, publish_job_end
from xmigd.security.callers import Caller
from xmigd.text import harmless

router = APIRouter(prefix="/v1/jobs")
JOBS = TypeAdapter(list[JobInfo])
JobId = Annotated[str, Path(max_length=64)]


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
    node: TheNode, caller: OperatingCaller, wanted: JobRequest, request: Request, response: Response
) -> JobMade:
    """Register a job. The answer says how to start its programs; the token is shown only here."""
    if caller.uid is None:
        raise Forbidden(
            "a job belongs to a user, and this token to none", code="needs_user",
            hint="use the local socket, or a token that was made for a user (uid)",
        )  # fmt: skip
    supervisor = node.supervisor
    name = wanted.name or harmless(wanted.command.split(" ", 1)[0].rpartition("/")[2], 255) or "job"
    peer = request.state.peer
    runner = None
    if wanted.watch and peer is not None:
        pid = peer[0].pid
        runner = (pid, pidfds.start_time(pid))
    job, token = supervisor.make_job(
        name=name, command=wanted.command, uid=caller.uid, device=wanted.device, visible=wanted.visible_devices,
        hang_timeout=wanted.hang_timeout, strict=wanted.strict, runner=runner,
    )  # fmt: skip
    request.state.secret = True
    model = repository.job_model(job)
    created_at = model.created_at
    await asyncio.wrap_future(node.writer.submit("jobs.add", lambda session: session.add(model)))
    supervisor.register_job(job)
    publish_job(node.bus, job)
    if runner is not None:
        supervisor.runners.watch(job.id, *runner)
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    return JobMade(
        id=job.id, name=job.name, command=job.command, uid=job.uid, device=job.device, registered=True,
        hang_timeout=job.hang_timeout, created_at=created_at, state="created", processes=0, strict=job.strict,
        unprotected=0, faults=0, recoveries=0, watched=runner is not None and supervisor.runners.tells,
        preload=":".join(map(str, node.shims)), library_path=str(node.settings.names_folder),
        environment={
            "XMIG_JOB": f"{job.id}:{token}",
            "XMIG_SOCKET": str(node.settings.client_socket),
            # Triton links what it compiles against libcuda.so.1; without a driver's it would not find one.
            "TRITON_LIBCUDA_PATH": str(node.shims[0].parent),
        },
        # JAX keeps what it has got otherwise, and no snapshot can tell what of it is in use (docs/decisions/0030).
        defaults={"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"},
    )  # fmt: skip


@router.get("", operation_id="list_jobs", response_model=list[JobInfo])
async def list_jobs(
    node: TheNode, caller: AnyCaller, live: bool = False, before: BeforeId = None, limit: Limit = 100
) -> Response:
    """Jobs, newest first. `live`: only those of which a process lives."""

    def make() -> bytes:
        with node.read() as session:
            rows = repository.page(session, owner=caller.owner, live=live, before=before, limit=limit)
        return JOBS.dump_json(JOBS.validate_python(rows))

    return await node.cached.json(("jobs", caller.owner, live, before, limit), make)


@router.get("/{job}", operation_id="get_job")
def get_job(node: TheNode, caller: AnyCaller, job: JobId) -> JobInfo:
    """One job."""
    with node.read() as session:
        found = repository.page(session, job_id=job, owner=caller.owner)
    if not found:
        raise NotFound(f"there is no job {job!r}", hint="xmigctl ps lists them")
    info = JobInfo.model_validate(found[0])
    now = time.monotonic_ns()
    stalls = [process.stall() for process in node.supervisor.processes_of(job)]
    info.expected_stall_ms = max((each.expected(now) / 1e6 for each in stalls if each is not None), default=None)
    return info


@router.get("/{job}/logs", operation_id="list_log_lines")
async def list_log_lines(
    node: TheNode,
    caller: AnyCaller,
    job: JobId,
    process: Id = None,
    after: Annotated[int | None, Query(ge=0, le=EXACT, description="what followed this line")] = None,
    before: BeforeNumber = None,
    limit: Limit = 100,
) -> list[LogLineInfo]:
    """What xMIG has to say about a job, oldest first: the newest lines, or those before or after one. A job's last 1000
    are kept."""
    node.supervisor.collect_lines(job)

    def read() -> list[LogLineInfo]:
        with node.read() as session:
            if not repository.page(session, job_id=job, owner=caller.owner):
                raise NotFound(f"there is no job {job!r}", hint="xmigctl ps --all lists them")
            rows = logs.page(session, job, after=after, before=before, process=process, limit=limit)
            return [LogLineInfo.model_validate(row) for row in rows]

    return await asyncio.to_thread(read)


@router.delete("/{job}", operation_id="stop_job", status_code=202)
async def stop_job(node: TheNode, caller: OperatingCaller, job: JobId) -> StopAnswer:
    """Stop its programs: SIGTERM, and SIGKILL after a grace. No other process can join it any more."""
    await _check_owner(node, caller, job)

    def write(session: Session) -> None:
        session.execute(update(models.Job).where(models.Job.id == job).values(stopped=True))

    await asyncio.wrap_future(node.writer.submit("jobs.stop", write))
    count = node.supervisor.stop_job(job, f"{caller.name} stopped the job")
    return StopAnswer(job=job, signalled=count)


@router.post("/{job}:exited", operation_id="report_exit", status_code=202)
async def report_exit(node: TheNode, caller: OperatingCaller, job: JobId, end: JobExit) -> JobInfo:
    """With what the program ended that was started for this job, by who has waited for it. It is believed once."""
    if (end.exit_code is None) == (end.exit_signal is None):
        raise Invalid("a program ends with an exit code or by a signal", hint="give one of exit_code and exit_signal")
    await _check_owner(node, caller, job)
    its, at = End(end.exit_code, end.exit_signal), time.time()
    await asyncio.wrap_future(node.writer.submit("jobs.end", lambda session: repository.end(session, job, its, at)))
    publish_job_end(node.bus, job, its)
    return await asyncio.to_thread(get_job, node, caller, job)


@router.post("/{job}/faults:inject", operation_id="inject_fault", status_code=202)
async def inject_fault(node: TheNode, caller: OperatingCaller, job: JobId, request: InjectRequest) -> list[Armed]:
    """Arm a fault in the job's servers; it strikes once. For tests and drills."""
    await _check_owner(node, caller, job)
    armed = node.supervisor.inject(
        job, point=request.point, kind=request.kind, sequence=request.sequence, error=request.error,
        process=request.process,
    )  # fmt: skip
    return [Armed(process=process.row.id, injection=injection) for process, injection in armed]


async def _check_owner(node: Node, caller: Caller, job: str) -> None:
    def owner() -> int | None:
        with node.read() as session:
            found = repository.find(session, job)
            return None if found is None else found.uid

    uid = await asyncio.to_thread(owner)
    if uid is None:
        raise NotFound(f"there is no job {job!r}", hint="xmigctl ps lists them")
    caller.check_sees(uid, "job", job, hint="xmigctl ps lists them")
