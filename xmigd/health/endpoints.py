"""Findings: what is wrong with a device, and what was done about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import Path

from xmigd.api.dependencies import AnyCaller, BeforeNumber, Limit, OperatorCaller, provided
from xmigd.api.routing import make_router
from xmigd.health.schemas import FindingInfo, Report
from xmigd.health.service import Health

router = make_router("/v1/devices")
DeviceId = Annotated[str, Path(max_length=64)]
TheHealth = Annotated[Health, provided(Health)]


@router.get("/{device}/findings", operation_id="list_findings")
def list_findings(
    health: TheHealth, _: AnyCaller, device: DeviceId, before: BeforeNumber = None, limit: Limit = 100
) -> Sequence[FindingInfo]:
    """What was found wrong with a device, newest first."""
    return health.page(device, before=before, limit=limit)


@router.post("/{device}/findings", operation_id="report_finding", status_code=201)
async def report_finding(health: TheHealth, caller: OperatorCaller, device: DeviceId, report: Report) -> FindingInfo:
    """Report what another agent has found: an Xid, or a finding with the rung of its answer. It is answered as if xMIG
    had found it itself. A drill is the same."""
    return await health.report(device, report, caller=caller)
