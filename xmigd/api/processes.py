"""Processes, and what happened to them: cuts, faults, recoveries."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query

from xmigd.api.context import LocalCaller, Node, TheNode, check_may_control
from xmigd.api.schemas import FaultInfo, Position, ProcessInfo, RebindRequest, RecoveryInfo, SegmentInfo
from xmigd.database import queries
from xmigd.errors import NotFound
from xmigd.supervisor.process import Process

router = APIRouter(prefix="/v1")
Limit = Annotated[int, Query(ge=1, le=1000)]


def _info(node: Node, row: dict[str, Any]) -> ProcessInfo:
    """What the database knows, and what only the supervisor does."""
    info = ProcessInfo.model_validate(row)
    live = node.supervisor.processes.get(info.id)
    if live is None:
        return info
    info.state = live.state
    info.server_pid = live.server_pid
    info.generation = live.generation
    info.standby = live.standby_state
    info.held_bytes = sum(handle.size for handle in live.handles.values())
    info.shadow_bytes = live.shadow_bytes
    info.server_bytes = live.device_bytes
    if live.last_cut is not None:
        info.cuts, info.live_bytes = live.last_cut.number, live.last_cut.live_bytes
    return info


async def _processes(node: Node, **conditions: Any) -> list[ProcessInfo]:
    def read() -> list[dict[str, Any]]:
        with node.read() as session:
            return queries.processes(session, **conditions)

    return [_info(node, row) for row in await asyncio.to_thread(read)]


@router.get("/processes")
async def list_processes(
    node: TheNode, job: str | None = None, live: bool = False, limit: Limit = 100
) -> list[ProcessInfo]:
    """Programs with their servers, newest first."""
    return await _processes(node, job_id=job, live=live, limit=limit)


@router.get("/processes/{process}")
async def get_process(node: TheNode, process: str) -> ProcessInfo:
    """One program with its server."""
    found = await _processes(node, process_id=process)
    if not found:
        raise NotFound(f"there is no process {process!r}", hint="xmigctl ps lists them")
    return found[0]


@router.post("/processes/{process}:pause")
async def pause_process(node: TheNode, caller: LocalCaller, process: str) -> Position:
    """Stop its server between two records, drained. The program may now be dumped, and restored as another process."""
    return Position(position=await _controlled(node, caller, process).pause())


@router.post("/processes/{process}:continue")
async def continue_process(node: TheNode, caller: LocalCaller, process: str) -> Position:
    """Go on after a pause."""
    return Position(position=await _controlled(node, caller, process).resume())


@router.post("/processes/{process}:rebind")
async def rebind_process(node: TheNode, caller: LocalCaller, process: str, request: RebindRequest) -> Position:
    """Go on after a pause in which the program was restored from a dump, with the memory that it has mapped now."""
    return Position(position=await _controlled(node, caller, process).resume(request.pid))


def _controlled(node: Node, caller: LocalCaller, process: str) -> Process:
    found = node.supervisor.processes.get(process)
    if found is None:
        raise NotFound(f"there is no running process {process!r}", hint="xmigctl ps lists them")
    check_may_control(caller, found.row.uid)
    return found


@router.get("/processes/{process}/segments")
def list_segments(node: TheNode, process: str, limit: Limit = 100) -> list[SegmentInfo]:
    """The journal's segments, one per cut, newest first."""
    with node.read() as session:
        return [SegmentInfo.model_validate(row) for row in queries.segments(session, process, limit)]


@router.get("/faults")
def list_faults(
    node: TheNode, job: str | None = None, process: str | None = None, before: int | None = None, limit: Limit = 100
) -> list[FaultInfo]:
    """Faults, newest first; `before`: those with a smaller id."""
    with node.read() as session:
        rows = queries.faults(session, job_id=job, process_id=process, before=before, limit=limit)
        return [FaultInfo.model_validate(row) for row in rows]


@router.get("/recoveries")
def list_recoveries(
    node: TheNode, job: str | None = None, process: str | None = None, before: int | None = None, limit: Limit = 100
) -> list[RecoveryInfo]:
    """Recoveries, newest first; `before`: those with a smaller id."""
    with node.read() as session:
        rows = queries.recoveries(session, job_id=job, process_id=process, before=before, limit=limit)
        return [RecoveryInfo.model_validate(row) for row in rows]
