"""Processes, and what happened to them: cuts, faults, recoveries."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any, cast

from fastapi import APIRouter, Path, Query, Response
from sqlalchemy import CursorResult, update
from sqlalchemy.orm import Session

from xmigd.api import preconditions
from xmigd.api.context import AnyCaller, BeforeId, BeforeNumber, Id, Limit, Node, OperatingCaller, TheNode
from xmigd.api.schemas import FaultInfo, Position, ProcessInfo, RebindRequest, RecoveryInfo, SegmentInfo
from xmigd.database import models
from xmigd.database.rows import columns
from xmigd.errors import NotFound
from xmigd.faults import repository as faults
from xmigd.processes import repository
from xmigd.security.callers import Caller
from xmigd.store import catalogue
from xmigd.supervisor.process import Process

router = APIRouter(prefix="/v1")
ProcessId = Annotated[str, Path(max_length=64)]
FaultId = Annotated[int, Path(ge=0, lt=1 << 63)]


def _info(node: Node, row: dict[str, Any]) -> ProcessInfo:
    """What the database knows, and what only the supervisor does."""
    info = ProcessInfo.model_validate(row)
    info.protected = not info.unprotected
    live = node.supervisor.processes.get(info.id)
    if live is None:
        return info
    info.state = live.state
    info.server_pid = live.server_pid
    info.generation = live.generation
    info.standby = live.standby_state
    info.standby_preloaded = live.standby_preloaded
    info.device, info.location, info.suspended = live.row.device, live.location, live.state == "suspended"
    info.held_bytes = sum(handle.size for handle in live.handles.values())
    info.shadow_bytes = live.shadow_bytes
    info.server_bytes = live.device_bytes
    if (stall := live.stall()) is not None:
        info.expected_stall_ms = stall.expected(time.monotonic_ns()) / 1e6
        info.stall_bound_ms, info.snapshots_ms = stall.bound / 1e6, stall.spent / 1e6
    if live.last_cut is not None:
        info.cuts, info.live_bytes = live.last_cut.number, live.last_cut.live_bytes
    return info


async def _processes(node: Node, **conditions: Any) -> list[ProcessInfo]:
    def read() -> list[dict[str, Any]]:
        with node.read() as session:
            return repository.page(session, **conditions)

    return [_info(node, row) for row in await asyncio.to_thread(read)]


@router.get("/processes", operation_id="list_processes")
async def list_processes(
    node: TheNode, caller: AnyCaller, job: Id = None, live: bool = False, before: BeforeId = None, limit: Limit = 100
) -> list[ProcessInfo]:
    """Programs with their servers, newest first."""
    return await _processes(node, owner=caller.owner, job_id=job, live=live, before=before, limit=limit)


@router.get("/processes/{process}", operation_id="get_process")
async def get_process(node: TheNode, caller: AnyCaller, process: ProcessId) -> ProcessInfo:
    """One program with its server."""
    found = await _processes(node, owner=caller.owner, process_id=process)
    if not found:
        raise NotFound(f"there is no process {process!r}", hint="xmigctl ps lists them")
    return found[0]


@router.post("/processes/{process}:pause", operation_id="pause_process")
async def pause_process(node: TheNode, caller: OperatingCaller, process: ProcessId) -> Position:
    """Stop its server between two records, drained. The program may now be dumped, and restored as another process."""
    return Position(position=await _controlled(node, caller, process).pause())


@router.post("/processes/{process}:continue", operation_id="continue_process")
async def continue_process(node: TheNode, caller: OperatingCaller, process: ProcessId) -> Position:
    """Go on after a pause."""
    return Position(position=await _controlled(node, caller, process).resume())


@router.post("/processes/{process}:rebind", operation_id="rebind_process")
async def rebind_process(
    node: TheNode, caller: OperatingCaller, process: ProcessId, request: RebindRequest
) -> Position:
    """Go on after a pause in which the program was restored from a dump, with the memory that it has mapped now."""
    return Position(position=await _controlled(node, caller, process).resume(request.pid))


def _controlled(node: Node, caller: Caller, process: str) -> Process:
    found = node.supervisor.processes.get(process)
    if found is None or not caller.sees(found.job.uid):
        raise NotFound(f"there is no running process {process!r}", hint="xmigctl ps lists them")
    return found


@router.get("/processes/{process}/segments", operation_id="list_segments")
def list_segments(node: TheNode, caller: AnyCaller, process: ProcessId, limit: Limit = 100) -> list[SegmentInfo]:
    """The journal's segments, one per cut, newest first, and what of them is kept in the store."""
    with node.read() as session:
        if not repository.page(session, process_id=process, owner=caller.owner):
            raise NotFound(f"there is no process {process!r}", hint="xmigctl ps lists them")
        kept = catalogue.of_process(session, process)
        rows = repository.segments(session, process, limit)
        return [SegmentInfo.model_validate(columns(row) | kept.get(row.number, {})) for row in rows]


@router.get("/faults", operation_id="list_faults")
def list_faults(
    node: TheNode,
    caller: AnyCaller,
    job: Id = None,
    process: Id = None,
    before: BeforeNumber = None,
    limit: Limit = 100,
    acknowledged: Annotated[bool | None, Query(description="only those that somebody has, or nobody")] = None,
) -> list[FaultInfo]:
    """Faults, newest first."""
    with node.read() as session:
        rows = faults.page(
            session, job_id=job, process_id=process, owner=caller.owner, before=before, limit=limit,
            acknowledged=acknowledged,
        )  # fmt: skip
    return [FaultInfo.model_validate(row) for row in rows]


@router.get("/faults/{fault}", operation_id="get_fault")
def get_fault(node: TheNode, caller: AnyCaller, fault: FaultId, response: Response) -> FaultInfo:
    """One fault. Its `ETag` changes when it is acknowledged."""
    return _fault(node, caller, fault, response)


@router.post("/faults/{fault}:ack", operation_id="acknowledge_fault")
async def acknowledge_fault(node: TheNode, caller: OperatingCaller, fault: FaultId, response: Response) -> FaultInfo:
    """Say that you have seen to it. It changes nothing else; the first who says so is remembered."""
    before = await asyncio.to_thread(_fault, node, caller, fault, response)
    statement = update(models.Fault).where(models.Fault.id == fault, models.Fault.acknowledged_at.is_(None))
    statement = statement.values(acknowledged_at=time.time(), acknowledged_by=caller.name[:255])

    def write(session: Session) -> bool:
        return cast(CursorResult[Any], session.execute(statement)).rowcount == 1

    if await asyncio.wrap_future(node.writer.submit("faults.acknowledge", write)):
        data = {"fault": fault, "by": caller.name}
        node.bus.publish("fault.acknowledged", "process", before.process_id, before.job_id, data)
    return await asyncio.to_thread(_fault, node, caller, fault, response)


def _fault(node: Node, caller: Caller, fault: int, response: Response) -> FaultInfo:
    with node.read() as session:
        rows = faults.page(session, fault=fault, owner=caller.owner)
    if not rows:
        raise NotFound(f"there is no fault {fault}", hint="GET /v1/faults lists them")
    response.headers["ETag"] = preconditions.etag(1 if rows[0]["acknowledged_at"] is None else 2)
    return FaultInfo.model_validate(rows[0])


@router.get("/recoveries", operation_id="list_recoveries")
def list_recoveries(
    node: TheNode,
    caller: AnyCaller,
    job: Id = None,
    process: Id = None,
    before: BeforeNumber = None,
    limit: Limit = 100,
) -> list[RecoveryInfo]:
    """Recoveries, newest first."""
    with node.read() as session:
        rows = faults.recoveries(
            session, job_id=job, process_id=process, owner=caller.owner, before=before, limit=limit
        )
    return [RecoveryInfo.model_validate(row) for row in rows]
