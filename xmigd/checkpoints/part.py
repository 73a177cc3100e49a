"""One node's part of a checkpoint of a job that has ranks on several nodes: the processes of this node."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from xmigd.checkpoints.apart import own_network
from xmigd.checkpoints.making import Making
from xmigd.checkpoints.manifest import Connection, Manifest, Network, Program
from xmigd.checkpoints.outward import ends, outward
from xmigd.checkpoints.packets import Packets, held_packets
from xmigd.errors import Conflict
from xmigd.networks.service import Held, Networks
from xmigd.operations.operation import Operation
from xmigd.supervisor.process import Process


class InDoubt(Conflict):
    """What is stored is kept: only the node that leads knows whether it is a part of a checkpoint, and nobody here
    waits for its answer any more."""


@dataclass(frozen=True, slots=True)
class Part:
    nodes: tuple[str, ...]  # of all parts
    held: Callable[[Sequence[Connection]], Awaitable[None]]  # returns once the packets of all nodes' are
    dumped: Callable[[int], Awaitable[None]]  # with the round at which the ranks stand; returns once all nodes have
    kept: Callable[[Operation], Awaitable[None]]  # returns once it may end, if it is to. Raises InDoubt, too
    given_up: Callable[[], Awaitable[None]]  # returns never: raises Conflict once another node has given it up
    networks: Networks


class MakingPart(Making):
    """Nothing of it goes on before all nodes have dumped theirs: a program that went on could send others, through a
    file for instance, what they had not been sent when this one was written down."""

    part: Part
    _round = 0
    _network: Network | None = None

    async def _pause(self) -> None:
        """The ranks of all nodes pause together, or none does."""
        pausing = asyncio.ensure_future(super()._pause())
        failing = asyncio.ensure_future(self.part.given_up())
        try:
            await asyncio.wait([pausing, failing], return_when=asyncio.FIRST_COMPLETED)
            await (pausing if pausing.done() else failing)
        finally:
            pausing.cancel()
            failing.cancel()

    async def _dump(self, operation: Operation, images: Path) -> list[Program]:
        """While nothing reaches any end of a connection between the nodes: it would be missing in both dumps."""
        async with contextlib.AsyncExitStack() as stack:
            packets: Packets | Held
            if await asyncio.to_thread(own_network, self.root):
                self._network = self.part.networks.of(self.root)
                packets = await stack.enter_async_context(self.part.networks.held(self.root))
                self.network = packets.carrier.inode
                self.connections = await asyncio.to_thread(outward, self.root)
            else:
                self.connections = await asyncio.to_thread(outward, self.root)
                held = held_packets(ends(self.connections), confined=self._criu.confined)
                packets = await stack.enter_async_context(held)
            await self.part.held(self.connections)
            found = await super()._dump(operation, images)
            await packets.release()  # by now all nodes have dumped theirs
        return found

    async def _all_dumped(self) -> None:
        if ends(await asyncio.to_thread(outward, self.root)) != ends(self.connections):
            raise Conflict(
                "the program has opened or closed connections between the nodes while it was written down",
                code="job_changed", hint="ask for it again",
            )  # fmt: skip
        rounds = {_round_of(one) for one in self.processes if one.grouped} or {0}
        if len(rounds) != 1 or (0 in rounds and any(one.grouped for one in self.processes)):
            raise Conflict(
                "the ranks of this node do not all stand at one snapshot of a group", code="no_common_snapshot",
                hint="ask again once all of them have a communicator in common",
            )  # fmt: skip
        (self._round,) = rounds
        await self.part.dumped(self._round)

    async def kept(self, operation: Operation) -> None:
        await self.part.kept(operation)

    def manifest(self, id: str, node: str, programs: Sequence[Program]) -> Manifest:
        made = super().manifest(id, node, programs)
        return made.model_copy(update={
            "nodes": self.part.nodes, "round": self._round, "connections": self.connections, "network": self._network,
        })  # fmt: skip


def _round_of(process: Process) -> int:
    """At whose snapshot it stands. 0: at one of its own."""
    last = process.last_snapshot
    if last is None or last.number != process.paused_snapshot or last.round != process.suspended_at():
        return 0
    return last.round
