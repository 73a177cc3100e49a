"""Jobs between nodes: what is requested of both halves, `Departures` and `Arrivals`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from xmigd.database.reader import Reader
from xmigd.devices.names import each_of
from xmigd.errors import Conflict, NotFound, ProtocolError
from xmigd.leases.leases import Leases
from xmigd.migrations.plan import MAX_TARGETS, Target
from xmigd.operations.repository import OperationRow
from xmigd.operations.service import Operations
from xmigd.process.migration_events import Reason
from xmigd.records import PRIORITIES, Priority
from xmigd.schemas import EXACT
from xmigd.security.callers import Caller
from xmigd.supervisor.process import Process
from xmigd.text import harmless
from xmigd.transfers import repository
from xmigd.transfers.arrivals import Arrivals
from xmigd.transfers.departures import Departures, Plan
from xmigd.transfers.schemas import TransferInfo
from xmigd.users import user_name


@dataclass(frozen=True, slots=True)
class Placed:
    """A process of a job that goes to another node."""

    process: Process
    device: str | None  # NODE/DEVICE that it would get; None: there is none for it
    reasons: list[Reason]  # what prevents that


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What a job would find on another node."""

    targets: list[Target]  # its devices, as NODE/DEVICE; empty if a program has several
    places: list[Placed]  # of all its processes, in the order in which they began
    becomes: Priority | None = None  # the class that it would have there, if that is another one


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

    def nodes(self, named: Sequence[str]) -> list[str]:
        """These peers, each once; `*`: all. Raises NotFound."""
        known = self._departures.peers()
        wanted = [node for name in named for node in (known if name == "*" else [name])]
        for node in wanted:
            if node not in known:
                raise NotFound(f"there is no peer {node[:64]!r}", hint="xmigctl peer list lists them")
        return list(dict.fromkeys(wanted))

    async def plan(self, process: Process, target: str) -> Elsewhere:
        """Of its job, to `NODE` or `NODE/DEVICES`. Raises Conflict, NotFound, Unavailable, ProtocolError."""
        node, _, devices = target.partition("/")
        return checked(node, await self._departures.plan(process, node, each_of(devices)))

    async def move(
        self, process: Process, target: str, *, max_downtime_ms: float | None, requestor: str,
        publish: Sequence[str] = (),
    ) -> OperationRow:  # fmt: skip
        """Its job, to `NODE` or `NODE/DEVICES`, which its processes get in turn. `publish`: ports there, of its
        network. Raises Conflict, Invalid, NotFound, Unavailable: it cannot go there."""
        node, _, text = target.partition("/")
        devices = each_of(text)
        if self._leases is None:
            return await self._departures.move(
                process, node, devices, max_downtime_ms=max_downtime_ms, requestor=requestor, publish=publish
            )
        async with contextlib.AsyncExitStack() as stack:
            lease = await stack.enter_async_context(self._leases.hold(self._node, process.job.id))
            check = partial(self._leases.verify, self._node, process.job.id, lease.token)
            row = await self._departures.move(
                process, node, devices, max_downtime_ms=max_downtime_ms, requestor=requestor, permit=check,
                publish=publish,
            )  # fmt: skip
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


def checked(node: str, plan: Plan) -> Elsewhere:
    """What a peer has answered. Raises ProtocolError: it is no plan."""
    try:
        targets = [
            Target(
                device=harmless(f"{node}/{each['device']}", 129), room_bytes=each["room_bytes"],
                reasons=_reasons(each["reasons"]),
            )
            for each in plan.targets[:MAX_TARGETS]
        ]  # fmt: skip
        places = [
            Placed(
                process=process, reasons=_reasons(each["reasons"]),
                device=None if each["device"] is None else harmless(f"{node}/{each['device']}", 129),
            )
            for process, each in zip(plan.processes, plan.places, strict=True)
        ]  # fmt: skip
    except (KeyError, TypeError, AttributeError, ValueError):
        raise ProtocolError(f"{node} answers what is no plan") from None
    for target in targets:
        room = target.room_bytes
        if room is not None and (type(room) is not int or not 0 <= room <= EXACT):
            raise ProtocolError(f"{node} answers what is no plan")
    if plan.priority not in PRIORITIES:
        raise ProtocolError(f"{node} answers what is no plan")
    same = plan.priority == plan.processes[0].job.priority
    return Elsewhere(targets, places, None if same else plan.priority)


def _reasons(answer: list[dict[str, Any]]) -> list[Reason]:
    return [Reason(harmless(why["code"], 40), harmless(why["text"], 500)) for why in answer]


def is_node(target: str) -> bool:
    """Is it a node, and not a device of this one?"""
    return "/" in target or ":" not in target


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    hidden = ("pid", "start_time", "pids", "peer_informed")
    return {name: value for name, value in row.items() if name not in hidden} | {"user": user_name(row["uid"])}
