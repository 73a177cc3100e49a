"""Moves, suspensions, resumptions; the plans before them; drains."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import Path, Query, Response

from xmigd.api.dependencies import AnyCaller, Id, Limit, OperatingCaller, OperatorCaller, provided
from xmigd.api.routing import make_router
from xmigd.database.reader import Reader
from xmigd.devices.names import together
from xmigd.driver_checkpoint.service import PREFIX, DriverMoves
from xmigd.errors import Conflict, Invalid, NotFound
from xmigd.migrations import repository
from xmigd.migrations.drains import Drains, Step, Ways
from xmigd.migrations.schemas import (
    DrainPlanInfo,
    DrainPlanRequest,
    DrainRequest,
    DrainStep,
    DrainWays,
    Engine,
    MigrationInfo,
    MoveRequest,
    PlaceInfo,
    PlanInfo,
    PlanRequest,
    ReasonInfo,
    ResumeRequest,
    SuspendRequest,
    TargetInfo,
)
from xmigd.migrations.service import Moves, where
from xmigd.operations.endpoints import ACCEPTED, accepted
from xmigd.operations.schemas import OperationInfo
from xmigd.processes.service import Processes
from xmigd.supervisor.process import Process
from xmigd.transfers.service import Elsewhere, Transfers, is_node

router = make_router("/v1")
ProcessId = Annotated[str, Path(max_length=64)]
TheMoves = Annotated[Moves, provided(Moves)]
TheDrains = Annotated[Drains, provided(Drains)]
TheDriverMoves = Annotated[DriverMoves, provided(DriverMoves)]
TheProcesses = Annotated[Processes, provided(Processes)]
TheTransfers = Annotated[Transfers, provided(Transfers)]
TheReader = Annotated[Reader, provided(Reader)]


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


def elsewhere(process: Process, plan: Elsewhere) -> PlanInfo:
    """What a peer has answered."""
    processes = [place.process for place in plan.places]
    lasts = [one.last_snapshot for one in processes]
    known = [last.live_bytes for last in lasts if last is not None]
    live = sum(known) if len(known) == len(lasts) else None
    held = sum(one.program_bytes for one in processes)
    places = [
        PlaceInfo(
            process=place.process.row.id, source=place.process.row.device, device=place.device,
            reasons=[ReasonInfo(code=why.code, text=why.text) for why in place.reasons],
        )
        for place in plan.places
    ]  # fmt: skip
    return PlanInfo(
        process=process.row.id, engine="proxy", source=together(one.row.device for one in processes),
        live_bytes=live, held_bytes=held, free_bytes=None if live is None else max(0, held - live), places=places,
        becomes=plan.becomes,
        targets=[TargetInfo.model_validate(asdict(target) | {"allowed": target.allowed}) for target in plan.targets],
    )  # fmt: skip


@router.post("/migration-plans", operation_id="plan_migration")
async def plan_migration(
    moves: TheMoves, native: TheDriverMoves, transfers: TheTransfers, processes: TheProcesses, caller: AnyCaller,
    request: PlanRequest,
) -> PlanInfo:  # fmt: skip
    """Where a process may be moved, or resumed, and why not elsewhere. Changes nothing. With engine=driver a program
    that was not started under xMIG is named by its pid, pid:1234."""
    if is_native(request.process, request.engine):
        plan = await native.plan(request.process, caller.owner)
    elif request.node is not None:
        caller.check_operator()
        process = processes.controlled(caller, request.process)
        return elsewhere(process, await transfers.plan(process, request.node))
    else:
        plan = await moves.plan(
            processes.controlled(caller, request.process), request.engine, leaves_allocation=request.leave_allocation
        )
    targets = [asdict(target) | {"allowed": target.allowed} for target in plan.targets]
    return PlanInfo.model_validate(asdict(plan) | {"free_bytes": plan.free_bytes, "targets": targets})


@router.post("/migrations", operation_id="start_migration", status_code=202, responses=ACCEPTED)
async def start_migration(
    moves: TheMoves,
    native: TheDriverMoves,
    transfers: TheTransfers,
    processes: TheProcesses,
    caller: OperatingCaller,
    request: MoveRequest,
    response: Response,
) -> OperationInfo:
    """Move a process to another device while it runs; with target `NODE` or `NODE/DEVICES` all processes of its job to
    another node.
    `max_downtime_ms`: give it up rather than let it stand longer. `leave_allocation`: also a job that a scheduler has
    given its devices (`scheduled`). With engine=driver a program that was not started
    under xMIG, pid:1234, which stands still meanwhile."""
    if is_native(request.process, request.engine):
        row = await native.move(request.process, request.target, uid=caller.owner, requestor=caller.name)
        return accepted(row, response)
    if is_node(request.target):
        caller.check_operator()
        row = await transfers.move(
            processes.controlled(caller, request.process), request.target, max_downtime_ms=request.max_downtime_ms,
            requestor=caller.name, publish=request.publish,
        )  # fmt: skip
        return accepted(row, response)
    if request.publish:
        raise Invalid("ports are published with a move to another node: on this one they stay as they are")
    row = await moves.move(
        processes.controlled(caller, request.process), request.target, engine=request.engine,
        max_downtime_ms=request.max_downtime_ms, requestor=caller.name, leaves_allocation=request.leave_allocation,
    )  # fmt: skip
    return accepted(row, response)


@router.get("/migrations", operation_id="list_migrations")
def list_migrations(
    reader: TheReader,
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
    with reader.session() as session:
        rows = repository.page(
            session, process_id=process, job_id=job, state=state, kind=kind, owner=caller.owner, before=before,
            sort=sort, limit=limit,
        )  # fmt: skip
    return [shown(row) for row in rows]


@router.get("/migrations/{migration}", operation_id="get_migration")
def get_migration(reader: TheReader, caller: AnyCaller, migration: ProcessId) -> MigrationInfo:
    """One of them."""
    with reader.session() as session:
        rows = repository.page(session, migration_id=migration, owner=caller.owner)
    if not rows:
        raise NotFound(f"there is no migration {migration!r}", hint="xmigctl migrations lists them")
    return shown(rows[0])


@router.post("/processes/{process}:suspend", operation_id="suspend_process", status_code=202, responses=ACCEPTED)
async def suspend_process(
    moves: TheMoves,
    native: TheDriverMoves,
    processes: TheProcesses,
    caller: OperatingCaller,
    process: ProcessId,
    request: SuspendRequest,
    response: Response,
) -> OperationInfo:
    """Bring its state to host memory or to files and give its device back. The program waits in its next call. With a
    rank all ranks of its group are suspended. A program that was not started under xMIG is named by its pid, pid:1234;
    its state goes to host memory."""
    if is_native(process):
        if request.to != "host":
            raise Conflict("the driver saves to host memory only", code="engine_not_possible", hint="to: host")
        return accepted(await native.suspend(process, uid=caller.owner, requestor=caller.name), response)
    row = await moves.suspend([processes.controlled(caller, process)], request.to, requestor=caller.name)
    return accepted(row, response)


@router.post("/processes/{process}:resume", operation_id="resume_process", status_code=202, responses=ACCEPTED)
async def resume_process(
    moves: TheMoves,
    native: TheDriverMoves,
    processes: TheProcesses,
    caller: OperatingCaller,
    process: ProcessId,
    request: ResumeRequest,
    response: Response,
) -> OperationInfo:
    """Let a suspended process go on, on its device or on another one; a rank with all that were suspended with it."""
    if is_native(process):
        row = await native.resume(process, next(iter(request.chosen), None), uid=caller.owner, requestor=caller.name)
        return accepted(row, response)
    row = await moves.resume(
        [processes.controlled(caller, process)], request.chosen, requestor=caller.name,
        leaves_allocation=request.leave_allocation,
    )  # fmt: skip
    return accepted(row, response)


@router.post("/jobs/{job}:suspend", operation_id="suspend_job", status_code=202, responses=ACCEPTED)
async def suspend_job(
    moves: TheMoves, processes: TheProcesses, caller: OperatingCaller, job: ProcessId, request: SuspendRequest,
    response: Response,
) -> OperationInfo:  # fmt: skip
    """All processes of a job: their state goes to host memory or to files, their devices are given back. Ranks that
    share communicators are suspended as one."""
    row = await moves.suspend_job(processes.of_job(caller, job), request.to, requestor=caller.name)
    return accepted(row, response)


@router.post("/jobs/{job}:resume", operation_id="resume_job", status_code=202, responses=ACCEPTED)
async def resume_job(
    moves: TheMoves, processes: TheProcesses, caller: OperatingCaller, job: ProcessId, request: ResumeRequest,
    response: Response,
) -> OperationInfo:  # fmt: skip
    """Let all processes of a suspended job go on, on their devices or on others. Ranks that share communicators go on
    together, or none of them does."""
    row = await moves.resume_job(
        processes.of_job(caller, job), request.chosen, requestor=caller.name,
        leaves_allocation=request.leave_allocation,
    )  # fmt: skip
    return accepted(row, response)


@router.post("/devices/{device}:drain", operation_id="drain_device", status_code=202, responses=ACCEPTED)
async def drain_device(
    drains: TheDrains, caller: OperatorCaller, device: ProcessId, request: DrainRequest, response: Response
) -> OperationInfo:
    """Cordon it and move every process off it, one after the other: to another device of this node, or to one of
    `nodes`. `otherwise`: what becomes of a job that cannot move, with all of its processes. `within_seconds`: what has
    not left by then stays where it is; `parts` of the operation's progress say of each process what became of it."""
    row = await drains.drain(
        device, reason=request.reason, requestor=caller.name, within=request.within_seconds,
        ways=_ways(request),
    )  # fmt: skip
    return accepted(row, response)


@router.post("/node:drain", operation_id="drain_node", status_code=202, responses=ACCEPTED)
async def drain_node(
    drains: TheDrains, caller: OperatorCaller, request: DrainRequest, response: Response
) -> OperationInfo:  # fmt: skip
    """The same with all devices of this node, as one: nothing moves to another of them."""
    row = await drains.drain_node(
        reason=request.reason, requestor=caller.name, within=request.within_seconds, ways=_ways(request)
    )
    return accepted(row, response)


@router.post("/drain-plans", operation_id="plan_drain")
async def plan_drain(drains: TheDrains, _: OperatorCaller, request: DrainPlanRequest) -> DrainPlanInfo:
    """What would become of each process if these devices were drained now, and why it would not be moved. Asks the
    other nodes. Changes nothing. For operators."""
    devices = list(dict.fromkeys(request.devices))
    steps = [_step(step) for step in await drains.plan(devices, _ways(request))]
    moves = sum(step.how in ("move", "transfer") for step in steps)
    stuck = sum(step.how == "stuck" for step in steps)
    return DrainPlanInfo(
        devices=devices, moves=moves, preempted=len(steps) - moves - stuck, stuck=stuck, steps=steps
    )  # fmt: skip


def _ways(request: DrainWays) -> Ways:
    return Ways(nodes=tuple(request.nodes), otherwise=request.otherwise)


def _step(step: Step) -> DrainStep:
    process = step.process
    return DrainStep(
        process=process.row.id, job_id=process.job.id, job_name=process.job.name, source=process.row.device,
        how=step.how, target=step.target, needed_bytes=step.needed_bytes,
        expected_downtime_ms=step.expected_downtime_ms,
        reasons=[ReasonInfo(code=reason.code, text=reason.text) for reason in step.reasons],
    )  # fmt: skip
