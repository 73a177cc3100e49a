"""The fleet: this node and its peers in one view, and packings of running jobs over all of them."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Path, Query, Response

from xmigd.api.dependencies import AnyCaller, Limit, OperatorCaller, provided
from xmigd.api.routing import make_router
from xmigd.fleet.reading import Page
from xmigd.fleet.schemas import FleetInfo, FleetPlan, FleetPlanRequest, NodeState
from xmigd.fleet.service import Fleet
from xmigd.operations.endpoints import ACCEPTED, accepted
from xmigd.operations.schemas import OperationInfo

router = make_router("/v1/fleet")
PlanId = Annotated[str, Path(max_length=64)]
Name = Annotated[str, Query(max_length=64)]
TheFleet = Annotated[Fleet, provided(Fleet)]


@router.get("", operation_id="get_fleet", response_model=FleetInfo)
async def get_fleet(
    fleet: TheFleet, caller: AnyCaller, limit: Limit = 100, after: Name = "", name: Name = "",
    state: NodeState | None = None,
) -> Response:  # fmt: skip
    """This node and its peers with their devices and jobs, as far as the caller sees them: a page of nodes, of those
    with `name` in their names and in this state. Takes two seconds at most: of a node that does not answer it has the
    last answer, and its age."""
    shown = await fleet.shown(caller, Page(limit, after, name, state))
    # Megabytes, perhaps, which are not written in the loop's thread.
    return Response(await asyncio.to_thread(shown.model_dump_json), media_type="application/json")


@router.post("/plans", operation_id="plan_fleet")
async def plan_fleet(fleet: TheFleet, caller: OperatorCaller, request: FleetPlanRequest) -> FleetPlan:
    """How running jobs can be packed over nodes so that devices or whole nodes get free. Changes nothing."""
    return (await fleet.plan(request)).shown()


@router.get("/plans", operation_id="list_fleet_plans")
async def list_fleet_plans(fleet: TheFleet, caller: OperatorCaller, limit: Limit = 10) -> list[FleetPlan]:
    """The last plans, newest first. A restarted daemon has none."""
    return [plan.shown() for plan in fleet.listed(limit)]


@router.get("/plans/{plan}", operation_id="get_fleet_plan")
async def get_fleet_plan(fleet: TheFleet, caller: OperatorCaller, plan: PlanId) -> FleetPlan:
    """One of them."""
    return fleet.find(plan).shown()


@router.post("/plans/{plan}/apply", operation_id="apply_fleet_plan", status_code=202, responses=ACCEPTED)
async def apply_fleet_plan(
    fleet: TheFleet, caller: OperatorCaller, plan: PlanId, response: Response
) -> OperationInfo:  # fmt: skip
    """Move the processes as the plan says, one after the other. It stops at the first that cannot be moved; those
    before it stay where they are then. Refused if the fleet has changed since (`plan_stale`)."""
    return accepted(await fleet.apply(fleet.find(plan), requestor=caller.name), response)
