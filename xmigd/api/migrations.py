"""Moves, suspensions, resumptions; the plans before them; drains."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from xmigd.api.context import AnyCaller, Id, Limit, Node, OperatingCaller, OperatorCaller, TheNode
from xmigd.api.operations import ACCEPTED, accepted
from xmigd.api.schemas import Answer, OperationInfo
from xmigd.driver_checkpoint.service import PREFIX
from xmigd.errors import Conflict, NotFound
from xmigd.migrations import repository
from xmigd.migrations.service import where
from xmigd.security.callers import Caller
from xmigd.supervisor.process import Process
from xmigd.text import VISIBLE

router = APIRouter(prefix="/v1")
ProcessId = Annotated[str, Path(max_length=64)]
Engine = Literal["proxy", "driver"]


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PlanRequest(Request):
    process: Annotated[str, Field(max_length=64)]
    engine: Engine = "proxy"


class ReasonInfo(Answer):
    code: str
    text: str


class TargetInfo(Answer):
    device: str
    allowed: bool
    reasons: list[ReasonInfo]
    room_bytes: int | None
    expected_downtime_ms: float | None = Field(default=None, description="how long the program would stand still")
    expected_downtime_basis: str | None = Field(default=None, description="what that is estimated from")


class PlanInfo(Answer):
    process: str
    engine: str
    source: str = Field(description="its device; of a suspended process host or file")
    live_bytes: int | None = Field(description="that its last cut holds: what is copied")
    held_bytes: int = Field(description="device memory that it has")
    free_bytes: int | None = Field(description="of that, what it does not use now: not copied")
    targets: list[TargetInfo]


class MoveRequest(Request):
    process: Annotated[str, Field(max_length=64)]
    target: Annotated[str, Field(max_length=64)]
    engine: Engine = "proxy"
    max_downtime_ms: Annotated[float | None, Field(gt=0, le=3_600_000)] = None


class SuspendRequest(Request):
    to: Literal["host", "file"] = "host"


class ResumeRequest(Request):
    device: Annotated[str | None, Field(max_length=64)] = None


class DrainRequest(Request):
    reason: Annotated[str, Field(max_length=500, pattern=VISIBLE)] = ""


class PhaseInfo(Answer):
    name: str
    at: float
    ms: float | None


class IterationInfo(Answer):
    n: int
    copied_bytes: int
    dirty_bytes: int
    ms: float
    loading_ms: float | None = Field(
        default=None, description="of the program's code, after copying; not known of moves by earlier versions"
    )


class MigrationInfo(Answer):
    """A move, a suspension or a resumption. What is not known is null."""

    id: str
    operation_id: str | None
    process_id: str
    job_id: str
    job_name: str
    engine: str
    kind: Literal["move", "suspend", "resume"]
    source: str
    target: str
    state: Literal["running", "done", "failed", "cancelled"]
    phase: str
    phases: list[PhaseInfo]
    iterations: list[IterationInfo]
    total_bytes: int | None
    processed_bytes: int | None
    remaining_bytes: int | None
    bytes_per_s: float | None
    dirty_bytes_per_s: float | None
    max_downtime_ms: float | None
    expected_downtime_ms: float | None
    expected_downtime_basis: str | None
    downtime_ms: float | None
    setup_ms: float | None
    path: Literal["peer", "host"] | None = Field(
        description="of a move: from device to device, or through host memory where they cannot reach each other"
    )
    code: str | None
    error: str | None
    process_location: str
    started_at: float
    ended_at: float | None


def shown(row: dict[str, Any]) -> MigrationInfo:
    remaining = None
    if row["total_bytes"] is not None and row["processed_bytes"] is not None:
        remaining = max(0, row["total_bytes"] - row["processed_bytes"])
    place = row["process_location"]
    if place != "moving":
        place = where(place, row["kind"], moved=row["state"] == "done")
    hidden = ("number", "owner", "target_pid", "target_start_time")
    values = {name: value for name, value in row.items() if name not in hidden}
    return MigrationInfo.model_validate(values | {"remaining_bytes": remaining, "process_location": place})


def is_native(process: str, engine: Engine = "driver") -> bool:
    """Was it not started under xMIG? Raises Conflict for engine=proxy, which cannot move it."""
    if not process.startswith(PREFIX):
        return False
    if engine != "driver":
        raise Conflict(f"{process[:64]} was not started under xMIG", code="engine_not_possible", hint="engine: driver")
    return True


def _controlled(node: Node, caller: Caller, process: str) -> Process:
    found = node.supervisor.processes.get(process)
    if found is None or not caller.sees(found.job.uid):
        raise NotFound(f"there is no running process {process[:64]!r}", hint="xmigctl ps lists them")
    return found


@router.post("/migration-plans", operation_id="plan_migration")
async def plan_migration(node: TheNode, caller: AnyCaller, request: PlanRequest) -> PlanInfo:
    """Where a process may be moved, or resumed, and why not elsewhere. Changes nothing. With engine=driver a program
    that was not started under xMIG is named by its pid, pid:1234."""
    if is_native(request.process, request.engine):
        plan = await node.native.plan(request.process, caller.owner)
    else:
        plan = await node.moves.plan(_controlled(node, caller, request.process), request.engine)
    targets = [asdict(target) | {"allowed": target.allowed} for target in plan.targets]
    return PlanInfo.model_validate(asdict(plan) | {"free_bytes": plan.free_bytes, "targets": targets})


@router.post("/migrations", operation_id="start_migration", status_code=202, responses=ACCEPTED)
async def start_migration(
    node: TheNode, caller: OperatingCaller, request: MoveRequest, response: Response
) -> OperationInfo:
    """Move a process to another device while it runs. `max_downtime_ms`: give it up rather than let it stand longer.
    With engine=driver a program that was not started under xMIG, pid:1234, which stands still meanwhile."""
    if is_native(request.process, request.engine):
        row = await node.native.move(request.process, request.target, uid=caller.owner, requestor=caller.name)
        return accepted(row, response)
    row = await node.moves.move(
        _controlled(node, caller, request.process), request.target, engine=request.engine,
        max_downtime_ms=request.max_downtime_ms, requestor=caller.name,
    )  # fmt: skip
    return accepted(row, response)


@router.get("/migrations", operation_id="list_migrations")
def list_migrations(
    node: TheNode,
    caller: AnyCaller,
    process: Id = None,
    job: Id = None,
    state: Literal["running", "done", "failed", "cancelled"] | None = None,
    kind: Literal["move", "suspend", "resume"] | None = None,
    sort: Annotated[repository.Sort, Query(description="downtime: the longest first; copied: the most")] = ("newest"),
    before: Annotated[str | None, Query(max_length=32, description="those that come after this one")] = None,
    limit: Limit = 100,
) -> list[MigrationInfo]:
    """Moves, suspensions and resumptions with their statistics."""
    with node.read() as session:
        rows = repository.page(
            session, process_id=process, job_id=job, state=state, kind=kind, owner=caller.owner, before=before,
            sort=sort, limit=limit,
        )  # fmt: skip
    return [shown(row) for row in rows]


@router.get("/migrations/{migration}", operation_id="get_migration")
def get_migration(node: TheNode, caller: AnyCaller, migration: ProcessId) -> MigrationInfo:
    """One of them."""
    with node.read() as session:
        rows = repository.page(session, migration_id=migration, owner=caller.owner)
    if not rows:
        raise NotFound(f"there is no migration {migration!r}", hint="GET /v1/migrations lists them")
    return shown(rows[0])


@router.post("/processes/{process}:suspend", operation_id="suspend_process", status_code=202, responses=ACCEPTED)
async def suspend_process(
    node: TheNode, caller: OperatingCaller, process: ProcessId, request: SuspendRequest, response: Response
) -> OperationInfo:
    """Bring its state to host memory or to files and give its device back. The program waits in its next call. One that
    was not started under xMIG is named by its pid, pid:1234; its state goes to host memory."""
    if is_native(process):
        if request.to != "host":
            raise Conflict("the driver saves to host memory only", code="engine_not_possible", hint="to: host")
        return accepted(await node.native.suspend(process, uid=caller.owner, requestor=caller.name), response)
    row = await node.moves.suspend(_controlled(node, caller, process), request.to, requestor=caller.name)
    return accepted(row, response)


@router.post("/processes/{process}:resume", operation_id="resume_process", status_code=202, responses=ACCEPTED)
async def resume_process(
    node: TheNode, caller: OperatingCaller, process: ProcessId, request: ResumeRequest, response: Response
) -> OperationInfo:
    """Let a suspended process go on, on its device or on another one."""
    if is_native(process):
        row = await node.native.resume(process, request.device, uid=caller.owner, requestor=caller.name)
        return accepted(row, response)
    row = await node.moves.resume(_controlled(node, caller, process), request.device, requestor=caller.name)
    return accepted(row, response)


@router.post("/devices/{device}:drain", operation_id="drain_device", status_code=202, responses=ACCEPTED)
async def drain_device(
    node: TheNode, caller: OperatorCaller, device: ProcessId, request: DrainRequest, response: Response
) -> OperationInfo:
    """Cordon it and move every process off it, one after the other."""
    if device not in node.settings.device_names:
        raise NotFound(f"there is no device {device!r}", hint="GET /v1/devices lists them")
    row = await node.moves.drain(device, reason=request.reason or "drained", requestor=caller.name)
    return accepted(row, response)
