"""Checkpoints of jobs with ranks on several nodes: each node has a part, and all parts have one id.

The first of the job's nodes leads: it requests the parts, and decides. Everything goes over the links of peers, which
lose nothing while both daemons live; if one of them was restarted, that is a new session.

Invariants:
  The programs of no node go on before those of all nodes are written down, or the checkpoint is given up.
  Nothing reaches an end of a connection between nodes while one end of any of them is being written down or made again.
  A part counts only once it is known that all exist: that is written down first where the leader is. One that was
  reported as stored stays until the leader answers, also if nobody waits for that any more.
  What is restored stands still until the leader has written down that all of it is there (`GOING`). A node that has
  reported its part `READY` decides nothing any more: it asks the leader, however long that takes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal

from xmigd import log
from xmigd.checkpoints import live, repository
from xmigd.checkpoints import set_messages as s
from xmigd.checkpoints.exchange import Exchange
from xmigd.checkpoints.manifest import Connection, Manifest
from xmigd.checkpoints.outward import check_both_ends, check_free, ends, left_behind, outward
from xmigd.checkpoints.packets import Packets, held_packets
from xmigd.checkpoints.part import InDoubt, Part
from xmigd.checkpoints.pids import tree
from xmigd.checkpoints.restoring import RESTORE, Restoring
from xmigd.checkpoints.schemas import CheckpointInfo
from xmigd.checkpoints.service import CREATE, Checkpoints
from xmigd.database.reader import Reader
from xmigd.devices.names import as_one
from xmigd.errors import Conflict, Forbidden, Invalid, NotFound, NotReady, ProtocolError, Unavailable, XmigError
from xmigd.ids import new_id
from xmigd.networks.service import Held, Networks
from xmigd.operations.operation import Operation
from xmigd.operations.repository import OperationRow
from xmigd.operations.service import Operations
from xmigd.peers.contract import Links
from xmigd.security.callers import Caller
from xmigd.supervisor.process import Process
from xmigd.supervisor.supervisor import Supervisor
from xmigd.text import harmless

logger = log.get("checkpoints")

WITHIN = 600.0  # seconds for a stage: what a node does in one has bounds of its own
SILENT = 5.0  # seconds, once a connection is known to be lost, after which what is done together is given up
KNOWN_WITHIN = 20.0  # seconds in which the leader hears of processes that were made again
MOST = 64  # messages of one peer that are being done
OVER = ("ended", "lost")  # states of a process
LOOK_EVERY = 1.0  # seconds
READY, GOING = "ready", "going on"  # phases of a restoration, of a part and of all


class Sets:
    def __init__(
        self, *, checkpoints: Checkpoints, restoring: Restoring, supervisor: Supervisor, operations: Operations,
        reader: Reader, links: Links, networks: Networks, allowed: Callable[[], Sequence[str]],
    ) -> None:  # fmt: skip
        """`allowed()`: peers from which programs are taken; `*`: all that are known."""
        self._checkpoints = checkpoints
        self._restoring = restoring
        self._supervisor = supervisor
        self._operations = operations
        self._reader = reader
        self._links = links
        self._networks = networks
        self._allowed = allowed
        self._exchanges: dict[str, Exchange] = {}  # by the checkpoint that is made, or the operation that restores
        self._verifying: dict[tuple[str, str], asyncio.Future[str]] = {}  # by request and node: what is wrong
        self._tasks: dict[asyncio.Task[None], str] = {}  # what peers have requested
        checkpoints.across = restoring.across = self

    # --- to make one, at the node that leads --------------------------------------------------------------------------

    async def create(self, process: Process, *, stop: bool, requestor: str, by_policy: bool) -> OperationRow:
        """Raises Conflict, Unavailable: it cannot be made."""
        nodes = tuple((process.job.nodes or "").split(","))
        self._check_leads(nodes)
        self._check_connected(nodes[1:])
        id, exchange = new_id(), Exchange(nodes[1:])
        making = await self._checkpoints.prepared(process, stop=stop, part=self._own_part(nodes, id, exchange))

        async def work(operation: Operation) -> dict[str, Any]:
            async with self._making(exchange, id):
                self._begin(id, exchange)
                message = s.Create(id=id, nodes=nodes, job=process.job.name, uid=process.job.uid, stop=stop)
                self._send_all(exchange, message)
                result = await self._checkpoints.make(operation, id, making, process)
            return result | {"nodes": list(nodes)}

        return await self._checkpoints.begin(
            id, making, process, work, requestor=requestor, by_policy=by_policy, nodes=nodes
        )

    async def check_creation(self, process: Process) -> None:
        """Raises Conflict, Unavailable: it cannot be made now. Whether the others can make their parts only they
        know."""
        nodes = tuple((process.job.nodes or "").split(","))
        self._check_leads(nodes)
        self._check_connected(nodes[1:])
        part = self._own_part(nodes, new_id(), Exchange(nodes[1:]))
        await self._checkpoints.prepared(process, stop=True, part=part)

    def _own_part(self, nodes: tuple[str, ...], id: str, exchange: Exchange) -> Part:
        async def hold(connections: Sequence[Connection]) -> None:
            reached = await exchange.all("held", WITHIN)
            others = {peer: one.connections for peer, one in zip(exchange.peers, reached, strict=True)}
            check_both_ends({self._links.node: connections} | others)
            self._send_all(exchange, s.Reached(id=id, stage="dump"))

        async def dumped(round: int) -> None:
            if any(one.round != round for one in await exchange.all("dumped", WITHIN)):
                raise Conflict("the ranks of the nodes do not stand at one snapshot", code="no_common_snapshot")
            self._send_all(exchange, s.Reached(id=id, stage="go_on"))

        async def kept(operation: Operation) -> None:
            operation.progress("waiting")
            await exchange.all("stored", WITHIN)
            operation.point_of_no_return("all nodes have their parts of it")
            exchange.decided = True
            await self._checkpoints.is_whole(id)
            self._send_all(exchange, s.Reached(id=id, stage="whole"))

        return Part(nodes, hold, dumped, kept, exchange.given_up, self._networks)

    # --- a part of it, at another one ---------------------------------------------------------------------------------

    async def _create_part(self, peer: str, message: s.Create) -> None:
        id, exchange = message.id, Exchange([peer])
        process = self._process_of(peer, message)
        await self._check_new(id)

        async def hold(connections: Sequence[Connection]) -> None:
            self._send(peer, s.Reached(id=id, stage="held", connections=tuple(connections)))
            await exchange.all("dump", WITHIN)

        async def dumped(round: int) -> None:
            self._send(peer, s.Reached(id=id, stage="dumped", round=round))
            await exchange.all("go_on", WITHIN)

        async def kept(operation: Operation) -> None:
            operation.point_of_no_return(f"{peer} decides about it")
            exchange.check()
            exchange.in_doubt = "checkpoint"
            self._send(peer, s.Reached(id=id, stage="stored"))
            if message.stop:
                await whole()

        async def whole() -> None:
            await self._until_answered(peer, id, exchange.all("whole", None), lambda: self._runs(process.job.id))
            await self._note_whole(id)

        try:
            self._begin(id, exchange)
            part = Part(message.nodes, hold, dumped, kept, exchange.given_up, self._networks)
            await self._until_free(process)
            making = await self._checkpoints.prepared(process, stop=message.stop, part=part)
            exchange.check()

            async def work(operation: Operation) -> dict[str, Any]:
                async with self._making(exchange, id):
                    result = await self._checkpoints.make(operation, id, making, process)
                    if not message.stop:  # the program goes on meanwhile
                        operation.progress("waiting")
                        await whole()
                return result | {"nodes": list(message.nodes)}

            await self._checkpoints.begin(id, making, process, work, requestor=f"node {peer}", nodes=message.nodes)
        except BaseException:
            self._exchanges.pop(id, None)
            raise

    async def _check_new(self, id: str) -> None:
        """Raises Conflict: something here has this id already."""
        known = id in self._exchanges or id in dict(await asyncio.to_thread(self._parts))
        if known or await self._found(id):
            raise Conflict(f"{id[:12]} is here already", code="exists")

    async def _until_free(self, process: Process) -> None:
        """Of an earlier one, of which the leader knows already that it is stored here."""
        for row in self._operations.active():
            if row.kind == CREATE and row.job_id == process.job.id:
                await self._operations.ended(row)

    @contextlib.asynccontextmanager
    async def _making(self, exchange: Exchange, id: str) -> AsyncIterator[None]:
        """If that fails, there is no part here, and the others hear of it."""
        try:
            yield
        except InDoubt:
            raise
        except Exception as error:
            self._give_up(exchange, id, error)
            await self._checkpoints.forget_part(id)
            raise
        finally:
            self._exchanges.pop(id, None)

    async def _until_answered(
        self, leader: str, id: str, answer: Coroutine[Any, Any, object], runs: Callable[[], bool]
    ) -> None:
        """Whether a checkpoint is whole, which nobody has to know while nothing of its job `runs`; if the leader comes
        back after that, it gets the question then. Raises InDoubt, Conflict."""
        why = InDoubt(
            f"the job has ended here, and {leader}, which is not in reach, has not answered whether the checkpoint is "
            f"whole: this node's part of {id[:12]} is kept until it does", code="in_doubt", hint=f"bring {leader} back",
        )  # fmt: skip
        await _while_there(answer, lambda: runs() or self._links.connected(leader), why)

    def _live(self, processes: Sequence[str]) -> bool:
        """Any of them, of an earlier daemon: as far as is known, where their servers have not announced themselves."""
        here, expected = self._supervisor.processes, self._supervisor.expected
        return any(one in expected or (one in here and here[one].state not in OVER) for one in processes)

    def _runs(self, job: str) -> bool:
        return any(one.job.id == job and one.state not in OVER for one in self._supervisor.processes.values())

    def _process_of(self, peer: str, message: s.Create) -> Process:
        """The first of the part of this node. Raises Conflict, ProtocolError."""
        self._check_follows(peer, message.nodes)
        nodes = ",".join(message.nodes)
        found = [
            one for one in self._supervisor.processes.values()
            if (one.job.nodes, one.job.uid, one.job.name) == (nodes, message.uid, message.job)
            and one.state not in OVER
        ]  # fmt: skip
        if len({one.job.id for one in found}) != 1:
            what = "several jobs have" if found else "no job has"
            raise Conflict(f"{self._links.node}: {what} the name {message.job} and ranks here", code="no_part")
        return found[0]

    # --- to restore one, at the node that leads -----------------------------------------------------------------------

    async def restore(
        self, caller: Caller, checkpoint: str, devices: Sequence[str], instead: Mapping[str, str], *, requestor: str
    ) -> OperationRow:
        """`instead`: by nodes that have made parts, those that get them. Raises NotFound, Invalid, Conflict,
        Unavailable: it cannot be restored."""
        if devices:
            raise Invalid("a job of several nodes is restored on the devices that it had")
        own = {new: old for old, new in instead.items()}.get(self._links.node, self._links.node)
        if caller.owner is not None:  # what is not on this node yet may be anybody's
            await asyncio.to_thread(self._checkpoints.find, caller, checkpoint)
        manifest = await self._checkpoints.part(checkpoint, own)
        nodes = tuple(instead.get(one, one) for one in manifest.nodes)
        if unknown := instead.keys() - set(manifest.nodes):
            raise Invalid(f"{min(unknown)} has no part of this checkpoint: {', '.join(manifest.nodes)}")
        self._check_leads(nodes)
        self._supervisor.scopes.check(",".join(nodes))
        self._check_connected(nodes[1:])
        places = await self._check_restoration(manifest)
        uid, exchange = manifest.programs[0].uid, Exchange(nodes[1:])

        async def work(operation: Operation) -> dict[str, Any]:
            id = operation.id
            made: list[Process] = []

            async def resuming(processes: Sequence[Process], root: int) -> None:
                made.extend(processes)
                await _check_connections(manifest, root)
                ranks = self._made_again(made)
                reached = await exchange.all("made", WITHIN)
                await packets.release()  # both ends of all connections are there
                names = {peer: one.processes for peer, one in zip(exchange.peers, reached, strict=True)}
                if ranks or any(names.values()):
                    await self._resume_all(nodes, ranks, names)
                self._send_all(exchange, s.Reached(id=id, stage="resume"))

            async def decide(processes: Sequence[Process], root: int) -> None:
                await exchange.all("ready", WITHIN)
                await _check_connections(manifest, root, since_made=True)
                exchange.decided = True
                await self._operations.decide(operation, GOING)

            exchange.failed = lambda why: _not_resumed(made, why)
            try:
                self._begin(id, exchange)
                for old, new in zip(manifest.nodes[1:], nodes[1:], strict=True):
                    part = s.Restore(id=id, checkpoint=checkpoint, of=old, nodes=nodes, uid=uid, round=manifest.round)
                    self._send(new, part)
                async with self._restoring.files_of(manifest), self._unheard(manifest, nodes) as packets:
                    result = await self._restoring.make_again(
                        operation, manifest, [as_one(each) for each in places], requestor, nodes=",".join(nodes),
                        before=resuming, keep=decide, network=packets if isinstance(packets, Held) else None,
                    )  # fmt: skip
            except Exception as error:
                self._give_up(exchange, id, error)
                raise
            finally:
                self._exchanges.pop(id, None)
            self._send_all(exchange, s.Reached(id=id, stage="go"))
            live.let_go_on(tree(result["root"]))
            return result | {"nodes": list(nodes)}

        return await self._operations.start(
            RESTORE, subject=("checkpoint", checkpoint), owner=uid, requestor=requestor, work=work,
            request={"checkpoint": checkpoint, "nodes": list(nodes)},
        )  # fmt: skip

    async def _check_restoration(self, manifest: Manifest) -> list[list[str]]:
        """The devices of each program. Ranks meet by names that a copy beside them would have, too. Raises Conflict,
        NotFound, Unavailable."""
        names = {one.id for one in manifest.programs}
        living = [one for one in self._supervisor.processes.values() if one.state not in OVER]
        if any((one.row.origin or one.row.id) in names for one in living):
            raise Conflict(f"the job runs on {self._links.node} already", code="pid_in_use", hint="xmigctl stop")
        if manifest.network is None:
            await asyncio.to_thread(check_free, manifest.connections)
        return await self._restoring.check_restoration(manifest, [], manifest.programs[0].device)

    @contextlib.asynccontextmanager
    async def _unheard(self, manifest: Manifest, nodes: Sequence[str]) -> AsyncIterator[Packets | Held]:
        """While one end may be there and the other one not. What earlier ones have left behind is gone. Raises
        Conflict, Invalid, Unavailable."""
        if manifest.network is not None:
            uid = manifest.programs[0].uid
            async with self._networks.made_again(manifest.network, nodes, manifest.job_name, uid) as held:
                yield held
            return
        connections = manifest.connections
        left = await asyncio.to_thread(left_behind, connections)
        confined = self._checkpoints.criu.confined
        async with held_packets(ends(connections), confined=confined, forgotten=left) as packets:
            yield packets

    def _made_again(self, made: Sequence[Process]) -> list[Process]:
        """Those of them that are resumed with those of other nodes: others are in no group."""
        ranks = [one for one in made if one.suspended_at()]
        self._supervisor.scopes.made_again(ranks)
        return ranks

    async def _resume_all(
        self, nodes: Sequence[str], made: Sequence[Process], others: Mapping[str, Sequence[str]]
    ) -> None:
        """Raises Unavailable."""
        try:
            async with asyncio.timeout(KNOWN_WITHIN):
                while not self._supervisor.scopes.resume_all(",".join(nodes), made, others):
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise Unavailable("not all nodes have reported what they have made again") from None

    # --- a part of it, at another one ---------------------------------------------------------------------------------

    async def _restore_part(self, peer: str, message: s.Restore) -> None:
        id, exchange = message.id, Exchange([peer])
        self._check_follows(peer, message.nodes)
        if id in self._exchanges:
            raise Conflict(f"restoration {id[:12]} is under way already", code="operation_under_way")
        try:
            self._begin(id, exchange)
            manifest = await self._part_for(peer, message)
            self._supervisor.scopes.check(",".join(message.nodes))
            places = await self._check_restoration(manifest)
            exchange.check()

            async def work(operation: Operation) -> dict[str, Any]:
                return await self._follow(operation, peer, message, exchange, manifest, places)

            await self._operations.start(
                RESTORE, subject=("checkpoint", message.checkpoint), owner=message.uid, requestor=f"node {peer}",
                work=work, request={"checkpoint": message.checkpoint, "nodes": list(message.nodes), "restoration": id},
                cancellable=False, why_not=f"{peer} decides about it",
            )  # fmt: skip
        except BaseException:
            self._exchanges.pop(id, None)
            raise

    async def _part_for(self, peer: str, message: s.Restore) -> Manifest:
        """A node that had another part brings a program here, or one that had none. Raises XmigError."""
        own = peer in await self._nodes_of(message.checkpoint) and message.of == self._links.node
        allowed = self._allowed()
        if not own and "*" not in allowed and peer not in allowed:
            raise Forbidden(f"{self._links.node} takes no programs from {peer}", code="peer_not_allowed",
                            hint="an operator there names the peer in the setting programs_from")  # fmt: skip
        manifest = await self._checkpoints.part(message.checkpoint, message.of)
        if manifest.round != message.round or any(one.uid != message.uid for one in manifest.programs):
            raise Conflict("the part that is here is of another checkpoint", code="peer_lies")
        return manifest

    async def _follow(
        self, operation: Operation, peer: str, message: s.Restore, exchange: Exchange, manifest: Manifest,
        places: Sequence[Sequence[str]],
    ) -> dict[str, Any]:  # fmt: skip
        id, made = message.id, list[Process]()

        async def resuming(processes: Sequence[Process], root: int) -> None:
            made.extend(processes)
            await _check_connections(manifest, root)
            ranks = self._made_again(made)
            self._send(peer, s.Reached(id=id, stage="made", processes=tuple(one.row.id for one in ranks)))
            await exchange.all("resume", WITHIN)
            await packets.release()

        async def ready(processes: Sequence[Process], root: int) -> None:
            await _check_connections(manifest, root, since_made=True)
            exchange.check()
            exchange.in_doubt = "restoration"
            await self._operations.decide(operation, READY)
            self._send(peer, s.Reached(id=id, stage="ready"))
            await _while_there(
                exchange.all("go", None), lambda: any(one.state not in OVER for one in processes), _not_decided()
            )

        exchange.failed = lambda why: _not_resumed(made, why)
        try:
            async with self._restoring.files_of(manifest), self._unheard(manifest, message.nodes) as packets:
                result = await self._restoring.make_again(
                    operation, manifest, [as_one(each) for each in places], f"node {peer}",
                    nodes=",".join(message.nodes), before=resuming, keep=ready,
                    network=packets if isinstance(packets, Held) else None,
                )  # fmt: skip
        except Exception as error:
            self._give_up(exchange, id, error)
            raise
        finally:
            self._exchanges.pop(id, None)
        live.let_go_on(tree(result["root"]))
        return result | {"nodes": list(message.nodes)}

    # --- after a restart ----------------------------------------------------------------------------------------------

    async def recover(self) -> None:
        """An earlier daemon has not written down that these are whole, so they never will be. Before peers come."""
        for id, nodes in await asyncio.to_thread(self._parts):
            if nodes[0] == self._links.node:
                await self._checkpoints.forget_part(id)

    async def resolve_create(self, operation: Operation) -> bool:
        """Where this node leads, it is whole or given up. Elsewhere what is stored stays until the leader answers, and
        so do programs that were to end: some of a job must not go on without the others. Raises InDoubt: they have
        ended, and the leader is not in reach."""
        checkpoint, leader = operation.request["checkpoint"], operation.request["nodes"][0]
        stored, stop = checkpoint in dict(await asyncio.to_thread(self._parts)), operation.request["stop"]
        if leader == self._links.node or not stored:
            await self._checkpoints.forget_part(checkpoint)
        elif stop:
            programs = operation.request["processes"]  # not what has started them, which stands still with them
            whole = await self._decided(leader, checkpoint, "checkpoint", lambda: self._live(programs))
            await self._settle(leader, checkpoint, whole=whole)
        return stop and bool(await self._found(checkpoint))

    async def _decided(
        self, leader: str, id: str, what: Literal["checkpoint", "restoration"], there: Callable[[], bool]
    ) -> bool:
        """By the leader, however long that takes, while it is `there`: whole, or does it go on? Raises InDoubt."""
        exchange = self._exchanges[id] = Exchange([leader])
        exchange.in_doubt = what
        self._send(leader, s.Question(id=id, what=what))  # or when there is a session with it
        try:
            if what == "checkpoint":
                await self._until_answered(leader, id, exchange.all("whole", None), there)
            else:
                await _while_there(exchange.all("go", None), there, _not_decided())
        except InDoubt:
            raise
        except Conflict:
            return False
        finally:
            self._exchanges.pop(id, None)
        return True

    async def goes_on(self, operation: Operation, there: Callable[[], bool]) -> bool:
        if "restoration" not in operation.request:
            return operation.row.phase == GOING
        if operation.row.phase != READY:
            return False
        leader, id = operation.request["nodes"][0], operation.request["restoration"]
        return await self._decided(leader, id, "restoration", there)

    async def _answer(self, peer: str, message: s.Question) -> None:
        """By a node that was restarted, or has seen that this one was."""
        if message.id in self._exchanges:
            return  # it is under way, and the answer comes with its end
        if message.what == "checkpoint":
            decided, stage = bool(await self._found(message.id)), "whole"
        else:
            decided, stage = await self._is_decided(peer, message.id), "go"
        if decided:
            self._send(peer, s.Reached.model_validate({"id": message.id, "stage": stage}))
        else:
            self._send(peer, s.GivenUp(id=message.id, code="interrupted", why=f"{self._links.node} has given it up"))

    async def _is_decided(self, peer: str, operation: str) -> bool:
        with contextlib.suppress(NotFound):
            row = await asyncio.to_thread(self._operations.get, operation)
            return row.kind == RESTORE and peer in row.request.get("nodes", []) and (
                row.phase == GOING or row.state == "succeeded"
            )  # fmt: skip
        return False

    async def _note_whole(self, id: str) -> None:
        """It is decided, so a full disk is waited for."""
        while True:
            try:
                await self._checkpoints.is_whole(id)
                return
            except Unavailable as error:
                logger.error("that a checkpoint is whole cannot be written", checkpoint=id[:12], why=error.message)
                await asyncio.sleep(1)

    async def _settle(self, peer: str, id: str, *, whole: bool) -> None:
        """What became of a part that is stored here."""
        nodes = dict(await asyncio.to_thread(self._parts)).get(id)
        if nodes is None or nodes[0] != peer:
            return
        if whole:
            await self._note_whole(id)
        else:
            await self._checkpoints.forget_part(id)

    def _parts(self) -> list[tuple[str, list[str]]]:
        with self._reader.session() as session:
            return repository.parts(session)

    async def discard(self, part: str, nodes: Sequence[str]) -> None:
        """The leader will never say whether the checkpoint is whole. If it is, its other parts are worth nothing
        without this one. Raises Conflict: it is in reach, or an operation of this node waits for it; NotReady: this
        daemon does not know that yet; Unavailable."""
        if self._links.connected(nodes[0]):
            raise Conflict(
                f"{nodes[0]}, which decides about the checkpoint, is in reach", code="other_node_leads",
                hint=f"its answer is on its way; if it is whole, remove it on {nodes[0]}",
            )  # fmt: skip
        if not self._links.tried(nodes[0]):
            raise NotReady(f"whether {nodes[0]}, which decides about the checkpoint, is in reach is not known yet",
                           hint="ask again in a few seconds")  # fmt: skip
        # What an earlier daemon has begun is active before it waits.
        if part in self._exchanges or any(row.request.get("checkpoint") == part for row in self._operations.active()):
            raise Conflict("the job still waits for it", code="operation_under_way", hint="xmigctl stop the job first")
        await self._checkpoints.forget_part(part)

    async def _ask_about_parts(self, peer: str) -> None:
        for id, nodes in await asyncio.to_thread(self._parts):
            if nodes[0] == peer and id not in self._exchanges:
                self._send(peer, s.Question(id=id, what="checkpoint"))

    # --- to remove and to verify one ----------------------------------------------------------------------------------

    def others_of(self, nodes: Sequence[str]) -> list[str]:
        """Those whose parts are removed with that of this node. Raises Conflict: another node removes it."""
        if nodes and nodes[0] != self._links.node:
            if self._links.node in nodes and self._links.connected(nodes[0]):
                self._check_leads(nodes)
            return []  # it is gone, or what is here is a copy of another node's part
        return list(nodes[1:])

    def removed(self, nodes: Sequence[str]) -> None:
        for node in nodes:
            self._spawn(node, self._remove_at(node))

    async def _remove_at(self, node: str) -> None:
        def read() -> list[str]:
            with self._reader.session() as session:
                return repository.removals(session, node)

        for id in await asyncio.to_thread(read):
            self._send(node, s.Remove(id=id))

    async def _remove_part(self, peer: str, message: s.Remove) -> None:
        if (await self._nodes_of(message.id))[:1] == [peer]:
            await self._checkpoints.remove_here(message.id)
        self._send(peer, s.Removed(id=message.id))

    async def _nodes_of(self, checkpoint: str) -> list[str]:
        """None: it is not here, or is no part."""
        found = await self._found(checkpoint)
        return found[0].nodes if found else []

    async def _found(self, checkpoint: str) -> list[CheckpointInfo]:
        return await asyncio.to_thread(lambda: self._checkpoints.page(checkpoint=checkpoint))

    async def verify(self, checkpoint: str, nodes: Sequence[str]) -> None:
        """Where this node leads, the parts of the others. Raises Conflict: one is damaged; Unavailable: one did not
        answer."""
        others, request = list(nodes[1:]) if nodes[0] == self._links.node else [], new_id()
        self._check_connected(others)
        waiting = {one: asyncio.get_running_loop().create_future() for one in others}
        self._verifying |= {(request, one): future for one, future in waiting.items()}
        try:
            for one in others:
                self._send(one, s.Verify(id=checkpoint, request=request))
            for one, future in waiting.items():
                try:
                    wrong = await asyncio.wait_for(future, WITHIN)
                except TimeoutError:
                    raise Unavailable(f"{one} did not answer within {WITHIN:g} s", code="peer_unreachable") from None
                if wrong:
                    raise Conflict(f"{one}: {wrong}", code="damaged")
        finally:
            for one in others:
                self._verifying.pop((request, one), None)

    async def _verify_part(self, peer: str, message: s.Verify) -> None:
        wrong = ""
        try:
            if peer not in await self._nodes_of(message.id):
                raise NotFound("there is no part of it")
            await self._checkpoints.check(message.id)
        except XmigError as error:
            wrong = error.message[:1024]
        self._send(peer, s.Verified(id=message.id, request=message.request, wrong=wrong))

    # --- what comes ---------------------------------------------------------------------------------------------------

    def session(self, peer: str) -> None:
        """Its daemon was started, or this one: what it was to do is void, unless that was decided."""
        for id, exchange in list(self._exchanges.items()):
            if peer not in exchange.peers:
                continue
            if exchange.in_doubt:
                self._send(peer, s.Question(id=id, what=exchange.in_doubt))
            elif not exchange.decided:
                exchange.fail("peer_unreachable", f"the daemon of {peer} was started again meanwhile")
        for future in [one for (_, node), one in self._verifying.items() if node == peer and not one.done()]:
            future.set_result("its daemon was started again meanwhile")
        self._spawn(peer, self._ask_about_parts(peer))
        self._spawn(peer, self._remove_at(peer))

    def up(self, peer: str) -> None:
        pass

    def down(self, peer: str, why: str) -> None:
        if any(peer in one.peers for one in self._exchanges.values()):
            asyncio.get_running_loop().call_later(SILENT, self._still_down, peer, why)

    def _still_down(self, peer: str, why: str) -> None:
        for exchange in list(self._exchanges.values()):
            open = not (exchange.in_doubt or exchange.decided)
            if peer in exchange.peers and open and not self._links.connected(peer):
                exchange.fail("peer_unreachable", f"{peer} is not in reach: {why}")

    def received(self, peer: str, body: dict[str, Any]) -> None:
        try:
            message = s.parse(body)
        except ProtocolError as error:
            logger.warning("a message of a peer is left out", peer=peer, why=error.message)
            return
        match message:
            case s.Create():
                self._spawn(peer, self._create_part(peer, message), message.id)
            case s.Restore():
                self._spawn(peer, self._restore_part(peer, message), message.id)
            case s.Verify():
                self._spawn(peer, self._verify_part(peer, message))
            case s.Remove():
                self._spawn(peer, self._remove_part(peer, message))
            case s.Question():
                self._spawn(peer, self._answer(peer, message))
            case s.Removed():
                self._spawn(peer, self._checkpoints.removed_elsewhere(message.id, peer))
            case s.Verified(request=request, wrong=wrong):
                future = self._verifying.get((request, peer))
                if future is not None and not future.done():
                    future.set_result(harmless(wrong, 500))
            case s.Reached() | s.GivenUp():
                self._answered(peer, message)

    def _answered(self, peer: str, message: s.Reached | s.GivenUp) -> None:
        exchange = self._exchanges.get(message.id)
        if exchange is None:
            whole = isinstance(message, s.Reached) and message.stage == "whole"
            if whole or isinstance(message, s.GivenUp):
                self._spawn(peer, self._settle(peer, message.id, whole=whole))
        elif peer not in exchange.peers:
            logger.warning("a message of a peer is left out", peer=peer, why="it has no part in that")
        elif isinstance(message, s.Reached):
            exchange.reached(peer, message)
        else:
            exchange.fail(message.code, f"{peer}: {harmless(message.why, 500)}")

    # --- small parts --------------------------------------------------------------------------------------------------

    def _check_leads(self, nodes: Sequence[str]) -> None:
        if nodes[0] != self._links.node:
            raise Conflict(
                f"{nodes[0]} leads the job's nodes, {', '.join(nodes)}", code="other_node_leads",
                hint=f"do it on {nodes[0]}",
            )  # fmt: skip

    def _begin(self, id: str, exchange: Exchange) -> None:
        """From now on it is known when a peer is lost. Raises Unavailable: one is already."""
        self._exchanges[id] = exchange
        self._check_connected(exchange.peers)

    def _check_follows(self, peer: str, nodes: Sequence[str]) -> None:
        """Raises Conflict: the peer does not lead these, or this node is none of them."""
        if nodes[0] != peer or self._links.node not in nodes[1:]:
            raise Conflict(f"{peer} does not lead {', '.join(nodes)} for {self._links.node}", code="other_node_leads")

    def _check_connected(self, nodes: Sequence[str]) -> None:
        if absent := [one for one in nodes if not self._links.connected(one)]:
            raise Unavailable(
                f"{', '.join(absent)} cannot be reached", code="peer_unreachable", hint="xmigctl peer list says why"
            )

    def _give_up(self, exchange: Exchange, id: str, error: Exception) -> None:
        code, why = (error.code, error.message) if isinstance(error, XmigError) else ("internal", "its log says why")
        self._send_all(exchange, s.GivenUp(id=id, code=code or "conflict", why=why[:1024]))

    def _send_all(self, exchange: Exchange, message: s.Message) -> None:
        for peer in exchange.peers:
            self._send(peer, message)

    def _send(self, peer: str, message: s.Message) -> None:
        if not self._links.send(peer, message.model_dump(mode="json")):
            logger.debug("a node of a job is not there", peer=peer)  # a new session begins with questions

    def _spawn(self, peer: str, work: Coroutine[Any, Any, None], id: str | None = None) -> None:
        """`id`: the peer is to know if it fails."""
        if list(self._tasks.values()).count(peer) >= MOST:
            work.close()
            logger.warning("a message of a peer is left out", peer=peer, why=f"{MOST} are being done")
            return

        async def run() -> None:
            try:
                await work
            except XmigError as error:
                logger.warning("what a peer requests is not done", peer=peer, why=error.message)
                if id is not None:
                    self._give_up(Exchange([peer]), id, error)
            except Exception as error:
                logger.exception("what a peer requests failed", peer=peer)
                if id is not None:
                    self._give_up(Exchange([peer]), id, error)

        task = asyncio.get_running_loop().create_task(run())
        self._tasks[task] = peer
        task.add_done_callback(self._tasks.pop)


async def _check_connections(manifest: Manifest, root: int, *, since_made: bool = False) -> None:
    """Raises Conflict: what was restored has others than what was dumped. `since_made`: it had those, and stands
    still."""
    found = ends(await asyncio.to_thread(outward, root))
    if wrong := found ^ ends(manifest.connections):
        local, remote = min(wrong)
        if since_made:
            raise Conflict(
                f"the connection from {local} to {remote} was made again and has ended before the program went on",
                code="connection_lost", hint="look at the network between the nodes, then ask for it again",
            )  # fmt: skip
        what = "is there, and was not written down" if (local, remote) in found else "was not restored"
        raise Conflict(f"the connection from {local} to {remote} {what}", code="criu_failed")


async def _while_there(answer: Coroutine[Any, Any, object], there: Callable[[], bool], otherwise: Conflict) -> None:
    """Nobody needs it any more once the programs have ended: somebody has stopped the job. Raises Conflict: what the
    answer raises, or `otherwise`."""
    waiting = asyncio.ensure_future(answer)
    try:
        while not (await asyncio.wait([waiting], timeout=LOOK_EVERY))[0]:
            if not there():
                raise otherwise
        await waiting
    finally:
        waiting.cancel()


def _not_decided() -> Conflict:
    return Conflict("the job was ended before it was known whether it goes on", code="program_exited")


def _not_resumed(made: Sequence[Process], why: str) -> None:
    for process in made:
        process.moving.cancel(why)
