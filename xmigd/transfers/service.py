"""Jobs between nodes: what is requested of both halves, `Departures` and `Arrivals`."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import Any, Literal

from xmigd.database.reader import Reader
from xmigd.devices.names import each_of
from xmigd.errors import Conflict, NotFound
from xmigd.leases.leases import Leases
from xmigd.operations.repository import OperationRow
from xmigd.operations.service import Operations
from xmigd.security.callers import Caller
from xmigd.supervisor.process import Process
from xmigd.transfers import repository
from xmigd.transfers.arrivals import Arrivals
from xmigd.transfers.departures import Departures, Plan
from xmigd.transfers.schemas import TransferInfo
from xmigd.users import user_name


class Transfers:
    def __init__(
        self, *, departures: Departures, arrivals: Arrivals, reader: Reader, operations: Operations,
        leases: Leases | None = None, node: str = "",
    ) -> None:  # fmt: skip
        """`leases`: without that of its job nothing moves from this node; None: there are none."""
        self._departures = departures
        self._arrivals = arrivals
        self._reader = reader
        self._operations = operations
        self._leases = leases
        self._node = node
        self._holding: set[asyncio.Task[None]] = set()

    async def plan(self, process: Process, target: str) -> Plan:
        """Of its job, to `NODE` or `NODE/DEVICES`. Raises Conflict, NotFound, Unavailable."""
        node, _, devices = target.partition("/")
        return await self._departures.plan(process, node, each_of(devices))

    async def move(
        self, process: Process, target: str, *, max_downtime_ms: float | None, requestor: str
    ) -> OperationRow:
        """Its job, to `NODE` or `NODE/DEVICES`, which its processes get in turn. Raises Conflict, NotFound,
        Unavailable: it cannot go there."""
        node, _, text = target.partition("/")
        devices = each_of(text)
        if self._leases is None:
            return await self._departures.move(
                process, node, devices, max_downtime_ms=max_downtime_ms, requestor=requestor
            )
        async with contextlib.AsyncExitStack() as stack:
            lease = await stack.enter_async_context(self._leases.hold(self._node, process.job.id))
            check = partial(self._leases.verify, self._node, process.job.id, lease.token)
            row = await self._departures.move(
                process, node, devices, max_downtime_ms=max_downtime_ms, requestor=requestor, permit=check
            )
            holding = asyncio.ensure_future(self._hold(stack.pop_all(), row))
            self._holding.add(holding)
            holding.add_done_callback(self._holding.discard)
        return row

    async def _hold(self, lease: contextlib.AsyncExitStack, row: OperationRow) -> None:
        """Until it is over."""
        async with lease:
            await self._operations.ended(row)

    def page(self, **conditions: Any) -> list[TransferInfo]:
        with self._reader.session() as session:
            rows = repository.page(session, **conditions)
        return [TransferInfo.model_validate(_shown(row)) for row in rows]

    def find(self, caller: Caller, transfer: str) -> TransferInfo:
        """Raises NotFound."""
        found = self.page(transfer=transfer, owner=caller.owner)
        if not found:
            raise NotFound(f"there is no transfer {transfer[:64]!r}", hint="xmigctl transfer list lists them")
        return found[0]

    async def decide(self, caller: Caller, transfer: str, goes_on: Literal["here", "there"]) -> TransferInfo:
        """By hand, where the other node is gone for good. Raises NotFound, Conflict: there is nothing to decide."""
        info = await asyncio.to_thread(self.find, caller, transfer)
        if info.direction == "out" and info.state == "committed":
            await self._departures.decide(info.id, goes_on)
        elif info.direction == "in" and info.state == "prepared":
            if goes_on == "here":
                await self._arrivals.go(info.id, by=None)
            else:
                await self._arrivals.drop(info.id, by=None, why="decided by hand: it goes on there")
        else:
            raise Conflict(f"the transfer is {info.state}: it waits for no decision", code="transfer_over",
                           hint="xmigctl transfer list")  # fmt: skip
        return await asyncio.to_thread(self.find, caller, info.id)


def is_node(target: str) -> bool:
    """Is it a node, and not a device of this one?"""
    return "/" in target or ":" not in target


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    hidden = ("pid", "start_time", "pids", "peer_informed")
    return {name: value for name, value in row.items() if name not in hidden} | {"user": user_name(row["uid"])}
