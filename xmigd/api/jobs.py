"""Jobs: what `xmigctl run` starts."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Response
from sqlalchemy import update
from sqlalchemy.orm import Session

from xmigd.api.context import LocalCaller, Node, TheNode, check_may_control
from xmigd.api.schemas import Armed, InjectRequest, JobInfo, JobMade, JobRequest, StopAnswer
from xmigd.database import models, queries
from xmigd.database.recorder import job_model
from xmigd.errors import NotFound

router = APIRouter(prefix="/v1/jobs")


@router.post("", status_code=201)
async def make_job(node: TheNode, caller: LocalCaller, request: JobRequest, response: Response) -> JobMade:
    """Register a job. The answer says how to start its programs; the token is shown only here."""
    supervisor = node.supervisor
    name = request.name or request.command.split(" ", 1)[0].rpartition("/")[2] or "job"
    job, token = supervisor.make_job(
        name=name, command=request.command, uid=caller.uid, device=request.device, hang_timeout=request.hang_timeout
    )
    model = job_model(job)
    created_at = model.created_at
    await asyncio.wrap_future(node.writer.submit(lambda session: session.add(model)))
    supervisor.register_job(job)
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    return JobMade(
        id=job.id, name=job.name, command=job.command, uid=job.uid, device=job.device, registered=True,
        hang_timeout=job.hang_timeout, created_at=created_at, state="created", processes=0, faults=0, recoveries=0,
        preload=":".join(map(str, node.shims)),
        environment={
            "XMIG_JOB": f"{job.id}:{token}",
            "XMIG_SOCKET": str(node.settings.client_socket),
            # Triton links what it compiles against libcuda.so.1; without a driver's it would not find one.
            "TRITON_LIBCUDA_PATH": str(node.shims[0].parent),
        },
    )  # fmt: skip


@router.get("")
def list_jobs(node: TheNode, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> list[JobInfo]:
    """Jobs, newest first."""
    with node.read() as session:
        return [JobInfo.model_validate(job) for job in queries.jobs(session, limit=limit)]


@router.get("/{job}")
def get_job(node: TheNode, job: str) -> JobInfo:
    """One job."""
    with node.read() as session:
        found = queries.jobs(session, job_id=job)
    if not found:
        raise NotFound(f"there is no job {job!r}", hint="xmigctl ps lists them")
    return JobInfo.model_validate(found[0])


@router.delete("/{job}", status_code=202)
async def stop_job(node: TheNode, caller: LocalCaller, job: str) -> StopAnswer:
    """Stop its programs: SIGTERM, and SIGKILL after a grace. No other process can join it any more."""
    await _check_owner(node, caller, job)

    def write(session: Session) -> None:
        session.execute(update(models.Job).where(models.Job.id == job).values(stopped=True))

    await asyncio.wrap_future(node.writer.submit(write))
    count = node.supervisor.stop_job(job, f"user {caller.uid} stopped the job")
    return StopAnswer(job=job, signalled=count)


@router.post("/{job}/faults:inject", status_code=202)
async def inject_fault(node: TheNode, caller: LocalCaller, job: str, request: InjectRequest) -> list[Armed]:
    """Arm a fault in the job's servers; it strikes once. For tests and drills."""
    await _check_owner(node, caller, job)
    armed = node.supervisor.inject(
        job, point=request.point, kind=request.kind, sequence=request.sequence, error=request.error,
        process=request.process,
    )  # fmt: skip
    return [Armed(process=process.row.id, injection=injection) for process, injection in armed]


async def _check_owner(node: Node, caller: LocalCaller, job: str) -> None:
    def owner() -> int | None:
        with node.read() as session:
            found = queries.job(session, job)
            return None if found is None else found.uid

    uid = await asyncio.to_thread(owner)
    if uid is None:
        raise NotFound(f"there is no job {job!r}", hint="xmigctl ps lists them")
    check_may_control(caller, uid)
