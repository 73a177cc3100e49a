"""Operations: what takes longer than a request."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import Path, Query, Response

from xmigd.api.dependencies import AnyCaller, BeforeId, Id, Limit, OperatingCaller, provided
from xmigd.api.routing import make_router
from xmigd.errors import Conflict
from xmigd.operations.repository import OperationRow, OperationState
from xmigd.operations.schemas import OperationInfo
from xmigd.operations.service import Operations
from xmigd.security.callers import Caller

router = make_router("/v1/operations")
OperationId = Annotated[str, Path(max_length=64)]
TheOperations = Annotated[Operations, provided(Operations)]

# What a handler that starts an operation declares: its 202 leads to the operation, its waiting and its cancelling.
LINKS: dict[str, Any] = {
    name: {"operationId": name, "parameters": {"operation": "$response.body#/id"}}
    for name in ("get_operation", "wait_for_operation", "cancel_operation")
}
ACCEPTED: dict[int | str, dict[str, Any]] = {
    202: {
        "model": OperationInfo,
        "description": "It is written down and under way; `Location` names the operation.",
        "headers": {
            "Location": {"schema": {"type": "string"}, "description": "/v1/operations/{id}"},
            "Retry-After": {"schema": {"type": "integer"}, "description": "seconds"},
        },
        "links": LINKS,
    },
    409: {"description": "Not in this state, or an operation of the same subject is under way."},
}


def accepted(row: OperationRow, response: Response) -> OperationInfo:
    """The answer to a request that started an operation (status 202)."""
    response.headers["Location"] = f"/v1/operations/{row.id}"
    response.headers["Retry-After"] = "1"
    return shown(row)


def shown(row: OperationRow) -> OperationInfo:
    return OperationInfo.model_validate(row.as_dict())


def _visible(row: OperationRow, caller: Caller) -> OperationRow:
    caller.check_sees(row.owner, "operation", row.id, hint="xmigctl op list lists them")
    return row


async def _find(operations: Operations, caller: Caller, operation: str) -> OperationRow:
    return _visible(await asyncio.to_thread(operations.get, operation), caller)


@router.get("", operation_id="list_operations")
def list_operations(
    operations: TheOperations,
    caller: AnyCaller,
    state: OperationState | None = None,
    kind: Annotated[str | None, Query(max_length=32)] = None,
    subject: Annotated[str | None, Query(max_length=64, description="the subject's id")] = None,
    job: Id = None,
    before: BeforeId = None,
    limit: Limit = 100,
) -> list[OperationInfo]:
    """Operations, newest first."""
    rows = operations.find(
        state=state, kind=kind, subject=subject, job=job, owner=caller.owner, before=before, limit=limit
    )
    return [shown(row) for row in rows]


@router.get("/{operation}", operation_id="get_operation")
async def get_operation(operations: TheOperations, caller: AnyCaller, operation: OperationId) -> OperationInfo:
    """One operation."""
    return shown(await _find(operations, caller, operation))


@router.get("/{operation}/wait", operation_id="wait_for_operation")
async def wait_for_operation(
    operations: TheOperations,
    caller: AnyCaller,
    operation: OperationId,
    timeout: Annotated[float, Query(ge=0, le=300)] = 30,
) -> OperationInfo:
    """The operation once it is over, or as it is after `timeout` seconds."""
    row = await _find(operations, caller, operation)
    if row.active:
        row = await operations.wait(operation, timeout) or await _find(operations, caller, operation)
    return shown(row)


@router.delete("/{operation}", operation_id="cancel_operation", status_code=202, responses=ACCEPTED)
async def cancel_operation(
    operations: TheOperations, caller: OperatingCaller, operation: OperationId, response: Response
) -> OperationInfo:
    """Ask it to end. It says itself, as `cancelled`, when it has; refused past the point of no return."""
    row = await _find(operations, caller, operation)
    if not row.active:
        raise Conflict(f"the operation has {row.state} already", code="operation_over", operation=row.id)
    return accepted(operations.cancel(operation), response)
