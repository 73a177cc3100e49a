"""Programs with their servers."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path

from xmigd.api.cached import Cached
from xmigd.api.dependencies import AnyCaller, BeforeId, Id, Limit, OperatingCaller, provided
from xmigd.api.routing import make_router
from xmigd.processes.schemas import Position, ProcessInfo, RebindRequest, SegmentInfo
from xmigd.processes.service import Processes

router = make_router("/v1/processes")
ProcessId = Annotated[str, Path(max_length=64)]
TheProcesses = Annotated[Processes, provided(Processes)]


@router.get("", operation_id="list_processes")
async def list_processes(
    processes: TheProcesses,
    cached: Annotated[Cached, provided(Cached)],
    caller: AnyCaller,
    job: Id = None,
    live: bool = False,
    before: BeforeId = None,
    limit: Limit = 100,
) -> list[ProcessInfo]:
    """Programs with their servers, newest first."""
    conditions = {"owner": caller.owner, "job_id": job, "live": live, "before": before, "limit": limit}
    rows = await cached.found(("processes", *conditions.values()), lambda: processes.rows(**conditions))
    return processes.infos(rows)


@router.get("/{process}", operation_id="get_process")
async def get_process(processes: TheProcesses, caller: AnyCaller, process: ProcessId) -> ProcessInfo:
    """One program with its server."""
    return await processes.find(process, caller)


@router.post("/{process}:pause", operation_id="pause_process")
async def pause_process(processes: TheProcesses, caller: OperatingCaller, process: ProcessId) -> Position:
    """Stop its server between two records, drained. The program may now be dumped, and restored as another process."""
    return Position(position=await processes.controlled(caller, process).pause())


@router.post("/{process}:continue", operation_id="continue_process")
async def continue_process(processes: TheProcesses, caller: OperatingCaller, process: ProcessId) -> Position:
    """Go on after a pause."""
    return Position(position=await processes.controlled(caller, process).unpause())


@router.post("/{process}:rebind", operation_id="rebind_process")
async def rebind_process(
    processes: TheProcesses, caller: OperatingCaller, process: ProcessId, request: RebindRequest
) -> Position:
    """Go on after a pause in which the program was restored from a dump, with the memory that it has mapped now."""
    return Position(position=await processes.controlled(caller, process).unpause(request.pid))


@router.get("/{process}/segments", operation_id="list_segments")
def list_segments(
    processes: TheProcesses, caller: AnyCaller, process: ProcessId, limit: Limit = 100
) -> list[SegmentInfo]:
    """The journal's segments, one per snapshot, newest first, and what of them is kept in the store."""
    return processes.segments(process, caller, limit)
