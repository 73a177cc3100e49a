"""Packing running jobs onto fewer devices: plans, their application, and the way back."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Response

from xmigd.api.dependencies import Limit, OperatorCaller, provided
from xmigd.api.routing import make_router
from xmigd.consolidation.schemas import ApplyRequest, ConsolidationPlan, ConsolidationRequest
from xmigd.consolidation.service import Consolidation
from xmigd.operations.endpoints import ACCEPTED, accepted
from xmigd.operations.schemas import OperationInfo

router = make_router("/v1/consolidation-plans")
PlanId = Annotated[str, Path(max_length=64)]
TheConsolidation = Annotated[Consolidation, provided(Consolidation)]


@router.post("", operation_id="plan_consolidation")
async def plan_consolidation(
    consolidation: TheConsolidation, caller: OperatorCaller, request: ConsolidationRequest
) -> ConsolidationPlan:
    """How running jobs can be packed, by which moves, and which cannot move and why. Changes nothing."""
    return (await consolidation.plan(request)).shown()


@router.get("", operation_id="list_consolidation_plans")
async def list_consolidation_plans(
    consolidation: TheConsolidation, caller: OperatorCaller, limit: Limit = 10
) -> list[ConsolidationPlan]:
    """The last plans, newest first. A restarted daemon has none."""
    return [plan.shown() for plan in consolidation.listed(limit)]


@router.get("/{plan}", operation_id="get_consolidation_plan")
async def get_consolidation_plan(
    consolidation: TheConsolidation, caller: OperatorCaller, plan: PlanId
) -> ConsolidationPlan:
    """One of them."""
    return consolidation.find(plan).shown()


@router.post("/{plan}/apply", operation_id="apply_consolidation_plan", status_code=202, responses=ACCEPTED)
async def apply_consolidation_plan(
    consolidation: TheConsolidation, caller: OperatorCaller, plan: PlanId, request: ApplyRequest, response: Response
) -> OperationInfo:
    """Move the processes as the plan says, one after the other. If one cannot be moved, or it is cancelled, all go
    back. Refused if the node has changed since (`plan_stale`)."""
    row = await consolidation.apply(
        consolidation.find(plan), guard_seconds=request.guard_seconds, requestor=caller.name
    )
    return accepted(row, response)


@router.post("/{plan}/undo", operation_id="undo_consolidation_plan", status_code=202, responses=ACCEPTED)
async def undo_consolidation_plan(
    consolidation: TheConsolidation, caller: OperatorCaller, plan: PlanId, response: Response
) -> OperationInfo:
    """Move the processes of a plan that was applied back to where they were, those that live, the last first. Refused
    if there is nothing to undo (`nothing_to_undo`), or the node has changed (`plan_stale`). A restarted daemon does it,
    too."""
    return accepted(await consolidation.undo(plan, requestor=caller.name), response)
