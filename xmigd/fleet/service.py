"""The fleet: what nodes show, plans over them, and their application as operations.

A plan changes nothing and is not written down. The last ones are kept in memory; a restarted daemon has none.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from xmigd.consolidation.kept import KeptPlans
from xmigd.errors import Conflict
from xmigd.fleet.apply import Application
from xmigd.fleet.orders import Orders
from xmigd.fleet.plan import NS, Plan, changes, make
from xmigd.fleet.reading import Page, Readings
from xmigd.fleet.schemas import FleetInfo, FleetPlanRequest
from xmigd.leases.leases import Leases
from xmigd.operations.operation import Operation
from xmigd.operations.repository import OperationRow
from xmigd.operations.service import Operations
from xmigd.security.callers import Caller
from xmigd.transfers.calls import Calls

KIND = "fleet"


class Fleet:
    def __init__(
        self, *, node: str, readings: Readings, orders: Orders, calls: Calls, leases: Leases | None,
        operations: Operations,
    ) -> None:  # fmt: skip
        self._node = node
        self._readings = readings
        self._orders = orders
        self._calls = calls
        self._leases = leases
        self._operations = operations
        self._plans: KeptPlans[Plan] = KeptPlans("plan", "xmigctl fleet plan")

    async def shown(self, caller: Caller, page: Page) -> FleetInfo:
        nodes, totals, more = await self._readings.page(caller.owner, page)
        after = nodes[-1].name if more else None
        return FleetInfo(node=self._node, at=time.time(), nodes=nodes, after=after, totals=totals)

    async def plan(self, request: FleetPlanRequest) -> Plan:
        """For operators. Changes nothing. Raises NotFound."""
        nodes = await self._readings.read(None)
        made = await asyncio.to_thread(make, request, nodes)
        self._plans.keep(made)
        return made

    def find(self, plan: str) -> Plan:
        """Raises NotFound."""
        return self._plans.find(plan)

    def listed(self, limit: int) -> Sequence[Plan]:
        """Newest first."""
        return self._plans.listed(limit)

    async def apply(self, plan: Plan, *, requestor: str) -> OperationRow:
        """Raises Conflict: there is nothing to do, or the fleet is not any more as the plan has it."""
        if not plan.answer.moves:
            raise Conflict("the plan moves nothing", code="plan_empty", hint="its refusals say what stays, and why")
        concerned = {place.partition(NS)[0] for move in plan.answer.moves for place in (move.source, move.target)}
        changed = changes(plan, await self._readings.read(None, of=concerned))
        if changed:
            more = f"; and {len(changed) - 5} more" if len(changed) > 5 else ""
            raise Conflict(
                f"the fleet has changed since the plan was made: {'; '.join(changed[:5])}{more}", code="plan_stale",
                hint="make a new plan",
            )  # fmt: skip

        async def work(operation: Operation) -> dict[str, Any]:
            application = Application(
                operation, node=self._node, orders=self._orders, calls=self._calls, leases=self._leases
            )  # fmt: skip
            return await application.run()

        moves = [
            {
                "job": move.job_id, "job_name": move.job_name, "source": move.source, "target": move.target,
                "processes": [one.model_dump() for one in move.processes],
            }
            for move in plan.answer.moves
        ]  # fmt: skip
        freed = plan.answer.freed_nodes or plan.answer.freed_devices
        row = await self._operations.start(
            KIND, subject=("fleet", self._node), requestor=requestor, work=work,
            request={"plan": plan.id, "freed": freed, "moves": moves},
        )  # fmt: skip
        plan.operation = row.id
        return row
