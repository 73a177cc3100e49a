"""Faults, and the recoveries from them."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query, Response

from xmigd.api import preconditions
from xmigd.api.dependencies import AnyCaller, BeforeNumber, Id, Limit, OperatingCaller, provided
from xmigd.api.routing import make_router
from xmigd.database.reader import Reader
from xmigd.faults import repository
from xmigd.faults.schemas import FaultInfo, RecoveryInfo
from xmigd.faults.service import Faults

router = make_router("/v1")
FaultId = Annotated[int, Path(ge=0, lt=1 << 63)]
TheFaults = Annotated[Faults, provided(Faults)]
TheReader = Annotated[Reader, provided(Reader)]


@router.get("/faults", operation_id="list_faults")
def list_faults(
    reader: TheReader,
    caller: AnyCaller,
    job: Id = None,
    process: Id = None,
    before: BeforeNumber = None,
    limit: Limit = 100,
    acknowledged: Annotated[bool | None, Query(description="only those that somebody has, or nobody")] = None,
) -> list[FaultInfo]:
    """Faults, newest first."""
    with reader.session() as session:
        rows = repository.page(
            session, job_id=job, process_id=process, owner=caller.owner, before=before, limit=limit,
            acknowledged=acknowledged,
        )  # fmt: skip
    return [FaultInfo.model_validate(row) for row in rows]


@router.get("/faults/{fault}", operation_id="get_fault")
def get_fault(faults: TheFaults, caller: AnyCaller, fault: FaultId, response: Response) -> FaultInfo:
    """One fault. Its `ETag` changes when it is acknowledged."""
    return _tagged(faults.find(fault, caller), response)


@router.post("/faults/{fault}:ack", operation_id="acknowledge_fault")
async def acknowledge_fault(
    faults: TheFaults, caller: OperatingCaller, fault: FaultId, response: Response
) -> FaultInfo:
    """Say that you have seen to it. It changes nothing else; the first who says so is remembered."""
    return _tagged(await faults.acknowledge(fault, caller), response)


def _tagged(info: FaultInfo, response: Response) -> FaultInfo:
    response.headers["ETag"] = preconditions.etag(1 if info.acknowledged_at is None else 2)
    return info


@router.get("/recoveries", operation_id="list_recoveries")
def list_recoveries(
    reader: TheReader,
    caller: AnyCaller,
    job: Id = None,
    process: Id = None,
    before: BeforeNumber = None,
    limit: Limit = 100,
) -> list[RecoveryInfo]:
    """Recoveries, newest first."""
    with reader.session() as session:
        rows = repository.recoveries(
            session, job_id=job, process_id=process, owner=caller.owner, before=before, limit=limit
        )
    return [RecoveryInfo.model_validate(row) for row in rows]
