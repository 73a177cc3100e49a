"""Who coordinates the ranks of a process: this node alone, or the first of the nodes that its job has ranks on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from xmigd import log
from xmigd.errors import Invalid, ProtocolError
from xmigd.ipc import messages as m
from xmigd.jobs.membership import new_job
from xmigd.peers.contract import Links
from xmigd.process import events as e
from xmigd.records import JobRow
from xmigd.servers.server import Server
from xmigd.supervisor import node_messages as n
from xmigd.supervisor.following import Following
from xmigd.supervisor.group import Ranks
from xmigd.supervisor.joining import JoinHere
from xmigd.supervisor.leading import Leading, MakeRanks
from xmigd.supervisor.process import Process
from xmigd.supervisor.standby_memory import StandbyMemory
from xmigd.supervisor.unique import UniqueCopies

logger = log.get("nodes")

MOST = 64  # lists of nodes at a time, with processes


class Scopes:
    """A scope: processes whose ranks may share communicators. Jobs with the same nodes are one."""

    def __init__(
        self, *, local: Ranks, links: Links, address: str, processes: Mapping[str, Process], jobs: Mapping[str, JobRow],
        make_ranks: MakeRanks, unique: UniqueCopies, standby_memory: StandbyMemory, join_here: JoinHere,
        patience: float,
    ) -> None:  # fmt: skip
        self._local = local
        self._links = links
        self._address = address  # of this node, for servers of others
        self._processes = processes
        self._jobs = jobs
        self._make_ranks = make_ranks
        self._unique = unique
        self._standby_memory = standby_memory
        self._join_here = join_here
        self._patience = patience
        self._scopes: dict[str, Leading | Following] = {}
        self._settled = self._closed = False

    @property
    def count(self) -> int:
        """Lists of nodes that have processes, or may have."""
        return len(self._scopes)

    def check(self, nodes: str) -> None:
        """Can a job have ranks on these? Raises Invalid."""
        names = nodes.split(",")
        known = {self._links.node, *self._links.known()}
        if self._links.node not in names:
            raise Invalid(
                f"this node, {self._links.node}, is none of {nodes}", hint="name all nodes, in the same order on each"
            )
        if len(set(names)) < len(names):
            raise Invalid(f"a node is named twice: {nodes}")
        if self._address in ("0.0.0.0", "::"):
            raise Invalid(
                "the other nodes' servers have no address of this one",
                hint="set peer_host to the address by which they reach it, and start xmigd again",
            )
        if nodes not in self._scopes and len(self._scopes) >= MOST:
            raise Invalid(
                f"jobs of {MOST} other lists of nodes run here", hint="use one of these, or wait for their end"
            )
        if unknown := [one for one in names if one not in known]:
            raise Invalid(f"no peer {unknown[0]!r} is known here", hint="xmigctl peer list; xmigctl peer add")

    # --- what happens to this node's processes -----------------------------------------------------------------------

    def reported(self, process: Process, server: Server, message: m.RankMessage) -> None:
        if isinstance(message, m.MemoryShort):
            self._standby_memory.short(process, server, message)
        else:
            self._of(process).reported(process, server, message)

    def committed(self, process: Process, number: int) -> None:
        self._of(process).committed(process, number)

    def took_alone(self, process: Process) -> None:
        """A snapshot, with no collective since the last one of its group: the others need none."""
        self._of(process).took_alone(process)

    def changed(self, process: Process, instruction: e.Instruction) -> None:
        self._of(process).changed(process, instruction)

    def finished(self, process: Process) -> None:
        self._of(process).finished(process)
        self._standby_memory.finished(process)
        if process.job.nodes is not None:
            self._drop_if_idle(process.job.nodes)

    def orphaned(self, process: Process) -> None:
        self._of(process).orphaned(process)

    @property
    def is_settled(self) -> bool:
        """Is it known which processes there are?"""
        return self._settled

    def settled(self) -> None:
        """Nobody is missing any more whom an earlier daemon knew."""
        self._settled = True
        self._local.settled()
        for nodes, one in list(self._scopes.items()):
            one.settled()
            self._drop_if_idle(nodes)

    def together(self, process: Process) -> list[Process]:
        """Those of this node that are suspended or resumed as one."""
        if process.job.nodes is not None:
            return self._of_its_job(process)
        return [one for one in self._local.together(process) if isinstance(one, Process)]

    def _of_its_job(self, process: Process) -> list[Process]:
        """Of a job of several nodes: who else is of its group only the node that leads knows."""
        asleep, round = process.state == "suspended", process.suspended_at()
        alike = [
            one for one in self._processes.values()
            if one.job.id == process.job.id and (one.state == "suspended") == asleep
            and (one.suspended_at() == round if asleep else one.grouped)
        ]  # fmt: skip
        return alike if process in alike and (round or not asleep) else [process]

    def pause(self, process: Process) -> None:
        """At the next round of its group, once all of its ranks are to."""
        scope = self._of(process)
        if isinstance(scope, Ranks):
            scope.pause([process.row.id])
        else:
            scope.pause(process)

    def not_to_pause(self, process: Process) -> bool:
        """It is not to any more. False: it has been sent to."""
        if process.job.nodes is not None and process.job.nodes not in self._scopes:
            return False  # all have ended
        scope = self._of(process)
        return scope.not_to_pause(process.row.id) if isinstance(scope, Ranks) else scope.not_to_pause(process)

    def made_again(self, processes: Iterable[Process]) -> None:
        """Of a job of several nodes, of a checkpoint or an earlier daemon: they are suspended, and resumed with those
        of the other nodes."""
        for process in processes:
            scope = self._of(process)
            if not isinstance(scope, Ranks):
                scope.made_again(process)

    def resume_all(self, nodes: str, processes: Sequence[Process], others: Mapping[str, Sequence[str]]) -> bool:
        """At the node that leads: these, and those of other nodes, are resumed as one from now on. False: one of them
        is not known yet."""
        scope = self._scope(nodes)
        return isinstance(scope, Leading) and scope.resume(processes, others)

    def suspend(self, processes: Sequence[Process], to: n.To) -> None:
        """They are about to be, as one. Raises Conflict, Unavailable: their group cannot be."""
        scope = self._of(processes[0])
        if not isinstance(scope, Ranks):
            scope.begins("suspend", to, processes)

    def resume(self, processes: Sequence[Process], *, joins: bool) -> bool:
        """They wait for each other from now on, before any of them executes anything. `joins`: another node has begun
        it. False: they were not ranks. Raises Conflict, Unavailable: their group cannot be resumed."""
        scope = self._of(processes[0])
        if isinstance(scope, Ranks):
            return scope.resume(processes)
        ranks = bool(processes[0].suspended_at())
        if ranks and not joins:
            scope.begins("resume", "host", processes)
        return ranks

    def cannot_join(self, what: n.What, process: Process, why: str) -> None:
        """Those of other nodes are not to wait for it."""
        scope = self._of(process)
        if not isinstance(scope, Ranks):
            scope.cannot_join(what, process, why)

    def close(self) -> None:
        self._closed = True
        self._local.close()
        for one in self._scopes.values():
            one.close()

    # --- other nodes -------------------------------------------------------------------------------------------------

    def session(self, peer: str) -> None:
        self._unique.session(peer)
        for one in self._concerned(peer):
            if isinstance(one, Leading):
                one.session(peer)
            else:
                one.session()

    def received(self, peer: str, body: dict[str, Any]) -> None:
        try:
            message = n.parse(body)
            names = message.nodes.split(",")
            if peer not in names or self._links.node not in names:
                raise ProtocolError(f"about the nodes {message.nodes[:200]}")
            if isinstance(message, n.Here) and not message.processes and message.nodes not in self._scopes:
                return  # or the question that a new scope begins with would be answered with this for ever
            scope = self._scope(message.nodes)
            try:
                if isinstance(scope, Leading):
                    scope.received(peer, message)
                elif names[0] == peer:
                    scope.received(message)
                else:
                    raise ProtocolError("from a node that does not lead")
            finally:
                self._drop_if_idle(message.nodes)
        except ProtocolError as error:
            logger.warning("a message of a peer is left out", peer=peer, why=error.message)

    def up(self, peer: str) -> None:
        self._unique.reaches(peer, True)
        for one in self._concerned(peer):
            one.up(peer) if isinstance(one, Leading) else one.up()

    def down(self, peer: str, why: str) -> None:
        self._unique.reaches(peer, False)
        for one in self._concerned(peer):
            one.down(peer) if isinstance(one, Leading) else one.down()
        shared = sum(peer in nodes.split(",") for nodes in self._scopes)
        if shared:
            logger.warning("ranks of another node are not in reach: no snapshots meanwhile", peer=peer, why=why)

    def _concerned(self, peer: str) -> list[Leading | Following]:
        """Of jobs that have ranks there: at this node, if it leads, or of the one that does."""
        return [
            one for nodes, one in self._scopes.items()
            if (peer in nodes.split(",") if isinstance(one, Leading) else nodes.split(",")[0] == peer)
        ]  # fmt: skip

    # --- who it is ---------------------------------------------------------------------------------------------------

    def _of(self, process: Process) -> Ranks | Leading | Following:
        return self._local if process.job.nodes is None else self._scope(process.job.nodes)

    def _scope(self, nodes: str) -> Leading | Following:
        """Raises ProtocolError."""
        if (found := self._scopes.get(nodes)) is not None:
            return found
        if len(self._scopes) >= MOST:
            raise ProtocolError(f"jobs of more than {MOST} lists of nodes")
        made: Leading | Following
        if nodes.split(",")[0] == self._links.node:
            made = Leading(
                nodes, self._links, self._make_ranks, self._job_of, self._unique.settled_here, self._join_here,
                self._patience,
            )  # fmt: skip
        else:
            made = Following(
                nodes, self._links, self._processes, self._unique.settled_here, self._standby_memory, self._join_here,
                self._patience,
            )  # fmt: skip
        self._scopes[nodes] = made
        if self._settled:
            made.settled()
        return made

    def _drop_if_idle(self, nodes: str) -> None:
        """It has no process, here or elsewhere. The next one makes it again. Not before it is known who is here; nor
        once all are closed: programs may still end, and nothing is closed twice."""
        if not self._settled or self._closed or any(one.job.nodes == nodes for one in self._processes.values()):
            return
        scope = self._scopes.get(nodes)
        if isinstance(scope, Leading) and scope.has_members:
            return
        if (scope := self._scopes.pop(nodes, None)) is not None:
            scope.close()

    def _job_of(self, uid: int, name: str, nodes: str) -> JobRow:
        """This node's part of another node's job, or what stands for it if there is none."""
        for job in reversed(list(self._jobs.values())):
            if (job.uid, job.name, job.nodes) == (uid, name, nodes):
                return job
        return new_job(name=name, command="", uid=uid, device=None, registered=False, nodes=nodes)[0]
