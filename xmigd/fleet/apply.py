"""Carrying a plan over nodes out: order after order, each under the lease of its job.

Invariants:
  Nothing is ordered without the job's lease, where leases are set up. A lease that is lost cancels the order under way;
  the node that moves looks itself, right before the point of no return.
  What was moved stays where it is when a later order fails: a program that has just stood still is not made to again.
  All processes of a job that goes to another node are one order, and one transfer.
  The operation's result, or its error, says where each process is.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections.abc import AsyncIterator
from typing import Any

from xmigd.errors import Cancelled, Unavailable, XmigError
from xmigd.fleet.orders import Order, Ordered, Orders, answer_of
from xmigd.ids import new_id
from xmigd.leases.leases import Lease, Leases
from xmigd.operations.operation import Operation
from xmigd.text import harmless
from xmigd.transfers.calls import Calls

PATIENCE = 60.0  # seconds in which a node that has an order may not answer: its daemon is being started again
RETRY = 0.5  # seconds between two requests to it
CANCELLED_WITHIN = 600.0  # seconds after which a move that was cancelled is taken as unknown
Part = dict[str, Any]


class Application:
    """One plan being applied. Lives in the event loop's thread."""

    def __init__(
        self, operation: Operation, *, node: str, orders: Orders, calls: Calls, leases: Leases | None
    ) -> None:  # fmt: skip
        self._operation = operation
        self._node = node
        self._orders = orders
        self._calls = calls
        self._leases = leases
        self.parts: list[Part] = [dict(part) | {"state": "pending"} for part in operation.request["moves"]]

    async def run(self) -> dict[str, Any]:
        """Raises XmigError: it stopped at a move; Cancelled."""
        for number, part in enumerate(self.parts):
            self._report(number)
            self._operation.check_cancelled()
            await self._move(part)
            if part["state"] == "cancelled" and self._operation.cancelled.is_set():
                self._report(number)
                raise Cancelled(f"it was cancelled; {self._done()}")
            if part["state"] not in ("succeeded", "ended"):
                self._report(number)
                raise XmigError(
                    f"{_named(part)} could not be moved from {part['source']} to {part['target']}: {part['why']}; "
                    f"{self._done()}",
                    code=part["code"] if part["code"] in STOPS else "fleet_stopped",
                    hint="what was moved stays there; make a new plan when the cause is gone",
                )  # fmt: skip
        self._report(len(self.parts))
        moved = sum(part["state"] == "succeeded" for part in self.parts)
        return {"moved": moved, "parts": self.parts, "freed": self._operation.request["freed"]}

    def _done(self) -> str:
        moved = sum(part["state"] == "succeeded" for part in self.parts)
        return f"{moved} of {len(self.parts)} moves were made; what was moved stays where it is now"

    async def _move(self, part: Part) -> None:
        """`part` gets its state: succeeded, failed, cancelled, unknown, or ended if its program has."""
        node, to = (part[end].partition("/")[0] for end in ("source", "target"))
        processes = tuple(
            Ordered(process=one["process"], source=_device(one["source"]), device=_device(one["target"]))
            for one in part["processes"]
        )
        try:
            async with self._lease(node, part["job"]) as lease:
                order = Order(
                    id=new_id(), job=part["job"], node=to, processes=processes,
                    token=None if lease is None else lease.token,
                )  # fmt: skip
                part["order"] = order.id
                await self._follow(part, node, order, lease)
        except XmigError as error:
            part |= {"state": "failed", "why": error.message, "code": error.code}

    @contextlib.asynccontextmanager
    async def _lease(self, node: str, job: str) -> AsyncIterator[Lease | None]:
        if self._leases is None:
            yield None
            return
        async with self._leases.hold(node, job) as lease:
            yield lease

    async def _follow(self, part: Part, node: str, order: Order, lease: Lease | None) -> None:
        answer = await self._answered(node, {"op": "order", "order": order.model_dump()}, order)
        stopping = asyncio.ensure_future(self._until_stopped(lease))
        loop, ends = asyncio.get_running_loop(), math.inf
        try:
            while answer["state"] in ("pending", "running"):
                if loop.time() > ends:
                    raise Unavailable(f"{node} was to cancel the move, and says that it goes on", code="peer_lies")
                part |= {"state": "running", "phase": answer.get("phase")}
                self._operation.progress("moving", parts=[dict(each) for each in self.parts])
                # Of one that answers at once, whatever was requested, no more is requested than of others.
                pause = asyncio.ensure_future(asyncio.sleep(RETRY))
                await asyncio.wait([pause, stopping] if ends == math.inf else [pause],
                                   return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
                if stopping.done() and ends == math.inf:
                    ends = loop.time() + CANCELLED_WITHIN
                    await self._answered(node, {"op": "order-cancel", "id": order.id}, order)
                answer = await self._answered(node, {"op": "order-state", "id": order.id}, order)
        finally:
            stopping.cancel()
            await asyncio.gather(stopping, return_exceptions=True)
        part |= {
            "state": answer["state"], "why": answer.get("why"), "code": answer.get("code"),
            "downtime_ms": answer.get("downtime_ms"),
        }  # fmt: skip
        if part["code"] == "program_exited":
            part["state"] = "ended"
        if part["state"] == "cancelled" and lease is not None and lease.lost.is_set():
            part |= {"state": "failed", "why": f"the job's lease was lost: {lease.why}", "code": "lease_lost"}
        elif part["state"] == "cancelled" and not self._operation.cancelled.is_set():
            part["state"] = "failed"  # somebody there has cancelled it

    async def _until_stopped(self, lease: Lease | None) -> None:
        """Until the operation is cancelled or the lease is lost."""
        waiting = [asyncio.ensure_future(self._operation.cancelled.wait())]
        if lease is not None:
            waiting.append(asyncio.ensure_future(lease.lost.wait()))
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waiting:
                each.cancel()

    async def _answered(self, node: str, request: dict[str, Any], order: Order) -> dict[str, Any]:
        """Of this node at once. Another one is requested again and again: an order that comes twice changes nothing.
        Raises XmigError: it is refused; Unavailable: what became of it is not known."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + PATIENCE
        while True:
            try:
                answer = await self._once(node, request, order)
            except Unavailable as error:
                if error.code != "peer_unreachable":
                    raise
                if loop.time() > ends:
                    raise Unavailable(
                        f"{node} does not say what became of it: {error.message}", code="peer_unreachable",
                        hint="xmigctl fleet jobs shows where it is when the node is back",
                    ) from None  # fmt: skip
                await asyncio.sleep(RETRY)
                continue
            return checked(node, answer)

    async def _once(self, node: str, request: dict[str, Any], order: Order) -> dict[str, Any]:
        if node != self._node:
            return await self._calls.call(node, request)
        if request["op"] == "order":
            return answer_of(await self._orders.start(order, by=None))
        if request["op"] == "order-cancel":
            return answer_of(await self._orders.cancel(order.id, by=None))
        return answer_of(await self._orders.state(order.id, by=None))

    def _report(self, done: int) -> None:
        parts = [dict(part) for part in self.parts]
        self._operation.progress("moving", parts=parts, done=done, total=len(parts))


def _device(place: str) -> str:
    return place.partition("/")[2]


def _named(part: Part) -> str:
    its = [one["process"][:12] for one in part["processes"]]
    what = f"process {its[0]}" if len(its) == 1 else f"{len(its)} processes"
    return f"{what} of job {part['job_name']}"


def checked(node: str, answer: Part) -> Part:
    """Of what a node says about an order, what may be shown. Raises XmigError: it is no state."""
    if answer.get("state") not in ("pending", "running", "succeeded", "failed", "cancelled"):
        raise XmigError(f"{node} answers what is no state of an order", code="peer_lies")
    code, why, phase, ms = (answer.get(name) for name in ("code", "why", "phase", "downtime_ms"))
    return {
        "state": answer["state"], "code": code if re.fullmatch(r"[a-z_]{1,40}", str(code)) else None,
        "why": None if why is None else harmless(str(why), 500), "phase": harmless(str(phase), 40),
        "downtime_ms": float(ms) if isinstance(ms, int | float) and math.isfinite(ms) else None,
    }  # fmt: skip


STOPS = ("lease_lost", "lease_taken", "etcd_unreachable", "etcd_wrong", "plan_stale", "order_superseded")
