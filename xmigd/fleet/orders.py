"""Orders: a controller has a node move one of its jobs to another node, with all of its processes, or one process to
another of its devices. This is the node's side.

A controller is a peer that this node's operators have named (`fleet_controllers`), or this node itself. An order's id
is that of the operation which carries it out, so it may come twice: the second time changes nothing.

Invariants:
  Where leases are set up, nothing is moved without one. The order names its token; this node asks etcd itself whether
  that is the lease of the job: before it begins, and, of a transfer, right before the point of no return.
  Of two orders for a job, that with the smaller token is refused if it comes later, also where this node knows no etcd.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from xmigd.database.reader import Reader
from xmigd.errors import Cancelled, Conflict, Forbidden, NotFound, ProtocolError, XmigError
from xmigd.fleet.schemas import MOST_OF_JOB, DeviceName, Id, NodeName
from xmigd.leases.leases import Leases
from xmigd.migrations.service import Moves
from xmigd.operations import repository as operation_rows
from xmigd.operations.operation import Operation
from xmigd.operations.repository import OperationRow
from xmigd.operations.service import Operations, Outcome, interrupted
from xmigd.schemas import EXACT
from xmigd.supervisor.process import Process
from xmigd.supervisor.supervisor import Supervisor
from xmigd.transfers import repository as transfers
from xmigd.transfers.departures import Departures
from xmigd.transfers.wire import Payload

KIND = "order"  # operations
WAIT = 1.0  # seconds, at most, that a request for the state of an order waits: a lost lease is noticed between two
KEPT = 1000  # orders for a job whose tokens are looked at
BETWEEN = 0.5  # seconds between two looks at a transfer that an earlier daemon has begun

Handler = Callable[[str, dict[str, Any], Payload], Awaitable[dict[str, Any]]]
OrderId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class Ordered(BaseModel):
    """A process, and the device that it is to have."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    process: Id
    source: DeviceName
    device: DeviceName


class Order(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    id: OrderId
    job: Id
    node: NodeName = Field(description="to which it goes")
    processes: Annotated[tuple[Ordered, ...], Field(min_length=1, max_length=MOST_OF_JOB)]
    token: Annotated[int, Field(ge=1, le=EXACT, strict=True)] | None = None


class Orders:
    """Lives in the event loop's thread."""

    def __init__(
        self, *, node: str, supervisor: Supervisor, operations: Operations, moves: Moves, departures: Departures,
        reader: Reader, leases: Leases | None, controllers: Callable[[], Sequence[str]],
    ) -> None:  # fmt: skip
        """`controllers`: peers whose orders are carried out; `*`: all."""
        self._node = node
        self._supervisor = supervisor
        self._operations = operations
        self._moves = moves
        self._departures = departures
        self._reader = reader
        self._leases = leases
        self._controllers = controllers
        self._tokens: dict[str, int] = {}  # the largest of each job, as far as it was needed
        operations.register(KIND, self._resolve)

    def or_else(self, others: Handler) -> Handler:
        """What peers request: orders, or what `others` handle."""

        async def handle(peer: str, request: dict[str, Any], payload: Payload) -> dict[str, Any]:
            op = request.get("op")
            if op not in ("order", "order-state", "order-cancel"):
                return await others(peer, request, payload)
            allowed = self._controllers()
            if "*" not in allowed and peer not in allowed:
                raise Forbidden(f"this node takes no orders from {peer}", code="peer_not_allowed",
                                hint="an operator there names the peer in the setting fleet_controllers")  # fmt: skip
            if op == "order":
                return answer_of(await self.start(_order(request.get("order")), by=peer))
            id = str(request.get("id"))[:64]
            if op == "order-cancel":
                return answer_of(await self.cancel(id, by=peer))
            return answer_of(await self.state(id, by=peer))

        return handle

    async def start(self, order: Order, *, by: str | None) -> OperationRow:
        """`by`: a peer; None: this node. Raises Conflict, NotFound, Unavailable: it is not carried out."""
        requestor = _requestor(by)
        with contextlib.suppress(NotFound):
            row = await self._get(order.id)
            if (row.kind, row.requestor) != (KIND, requestor):
                raise Conflict("another operation has the order's id", code="order_refused")
            return row
        process = self._check(order)
        await self._check_token(order)

        async def work(operation: Operation) -> dict[str, Any]:
            return await self._work(operation, order, process, requestor)

        try:
            return await self._operations.start(
                KIND, id=order.id, subject=("order", order.id), job_id=order.job, owner=process.job.uid,
                requestor=requestor, work=work, request=order.model_dump(),
            )  # fmt: skip
        except Conflict as error:
            if error.operation != order.id:
                raise
            return await self._get(order.id)  # it came twice at once

    async def state(self, id: str, *, by: str | None) -> OperationRow:
        """Once it is over, or soon. Raises NotFound."""
        row = await self._own(id, by)
        return await self._operations.wait(id, WAIT) or await self._own(id, by) if row.active else row

    async def cancel(self, id: str, *, by: str | None) -> OperationRow:
        """Raises NotFound. What cannot be cancelled any more goes on."""
        await self._own(id, by)
        with contextlib.suppress(Conflict, NotFound):
            self._operations.cancel(id)
        return await self._own(id, by)

    def _check(self, order: Order) -> Process:
        """The first of its processes. Raises Conflict: what the order says is not so any more."""
        of_job = {one.row.id: one for one in self._supervisor.processes_of(order.job)}
        for each in order.processes:
            process = of_job.get(each.process)
            if process is None:
                raise Conflict(f"process {each.process[:12]} has ended", code="plan_stale", hint="make a new plan")
            if process.row.device != each.source:
                raise Conflict(f"process {each.process[:12]} is on {process.row.device}, not on {each.source}",
                               code="plan_stale", hint="make a new plan")  # fmt: skip
        named = [each.process for each in order.processes]
        if order.node == self._node and len(named) != 1:
            raise Conflict("an order moves one process to another device of its node, and this one names several",
                           code="order_refused")  # fmt: skip
        if order.node != self._node and (set(named) != set(of_job) or len(named) != len(of_job)):
            raise Conflict(f"the order names {len(named)} processes, and the job has {len(of_job)}: they are others",
                           code="plan_stale", hint="make a new plan")  # fmt: skip
        return of_job[named[0]]

    async def _check_token(self, order: Order) -> None:
        if order.token is None:
            if self._leases is not None:
                raise Conflict("this node moves jobs under leases only, and the order has none", code="lease_required",
                               hint="set etcd_endpoints on the node that gives orders, too")  # fmt: skip
            return
        if order.job not in self._tokens:
            known = await asyncio.to_thread(self._largest, order.job)
            self._tokens.setdefault(order.job, known)
        if self._leases is not None:
            await self._leases.verify(self._node, order.job, order.token)
        largest = self._tokens[order.job]
        if order.token < largest:
            raise Conflict(f"a later order for this job was given (token {largest}, this one has {order.token})",
                           code="order_superseded", hint="make a new plan")  # fmt: skip
        self._tokens[order.job] = order.token

    def _largest(self, job: str) -> int:
        with self._reader.session() as session:
            rows = operation_rows.find(session, kind=KIND, job=job, limit=KEPT)
        return max((row.request.get("token") or 0 for row in rows), default=0)

    async def _work(
        self, operation: Operation, order: Order, process: Process, requestor: str
    ) -> dict[str, Any]:  # fmt: skip
        operation.progress("moving")
        if order.node == self._node:
            part: dict[str, Any] = {}
            device = order.processes[0].device
            await self._moves.move_part(process, device, part, requestor=requestor, cancelled=operation.cancelled)
            if part["state"] != "succeeded":
                kind = Cancelled if part["state"] == "cancelled" else Conflict
                raise kind(str(part["why"]), code=part["code"])
            return {"node": self._node, "device": device}

        async def permit() -> None:
            if self._leases is not None and order.token is not None:
                await self._leases.verify(self._node, order.job, order.token)

        row = await self._departures.move(
            process, order.node, {each.process: each.device for each in order.processes}, max_downtime_ms=None,
            requestor=requestor, id=order.id, permit=permit,
        )  # fmt: skip
        ended = asyncio.ensure_future(self._operations.ended(row))
        cancel = asyncio.ensure_future(operation.cancelled.wait())
        await asyncio.wait([ended, cancel], return_when=asyncio.FIRST_COMPLETED)
        cancel.cancel()
        if not ended.done():
            with contextlib.suppress(XmigError):  # past the point of no return
                self._operations.cancel(row.id)
        row = await ended
        if row.state != "succeeded":
            problem = row.error or {}
            kind = Cancelled if row.state == "cancelled" else Conflict
            raise kind(str(problem.get("detail") or "it failed"), code=problem.get("code"))
        return dict(row.result or {})

    async def _resolve(self, operation: Operation) -> Outcome:
        """An earlier daemon had begun it. The transfer, which has the order's id, is resolved by its own part."""
        row = await asyncio.to_thread(self._transfer, operation.id)
        while row is not None and row["state"] not in transfers.OVER:
            operation.progress("waiting", why=row["why"] or None)
            await asyncio.sleep(BETWEEN)
            row = await asyncio.to_thread(self._transfer, operation.id)
        if row is None:
            return interrupted(operation.row)
        if row["state"] == "done":
            result = {"node": row["peer"], "job": row["peer_job"], "target": row["target"]}
            return Outcome(state="succeeded", result=result)
        return Outcome(state="failed", error=Conflict(row["why"] or "it failed", code="interrupted"))

    def _transfer(self, id: str) -> dict[str, Any] | None:
        with self._reader.session() as session:
            return transfers.get(session, id)

    async def _get(self, id: str) -> OperationRow:
        return await asyncio.to_thread(self._operations.get, id)

    async def _own(self, id: str, by: str | None) -> OperationRow:
        """Raises NotFound: it is none of this controller's."""
        row = await self._get(id)
        if (row.kind, row.requestor) != (KIND, _requestor(by)):
            raise NotFound(f"there is no order {id[:40]!r}")
        return row


def _requestor(by: str | None) -> str:
    return "fleet" if by is None else f"node {by}"


def answer_of(row: OperationRow) -> dict[str, Any]:
    """For a controller."""
    problem = row.error or {}
    result = row.result or {}
    return {
        "state": row.state, "phase": row.phase, "may_cancel": row.may_cancel, "why": problem.get("detail"),
        "code": problem.get("code"), "job": result.get("job"), "downtime_ms": result.get("downtime_ms"),
    }  # fmt: skip


def _order(value: Any) -> Order:
    """Raises ProtocolError."""
    try:
        return Order.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ProtocolError(f"an order that is none: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
