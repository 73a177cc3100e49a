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
from xmigd.supervisor.following import Following, SettledHere
from xmigd.supervisor.group import Ranks
from xmigd.supervisor.leading import Leading, MakeRanks
from xmigd.supervisor.process import Process

logger = log.get("nodes")

MOST = 64  # lists of nodes at a time, with processes


class Scopes:
    """A scope: processes whose ranks may share communicators. Jobs with the same nodes are one."""

    def __init__(
        self, *, local: Ranks, links: Links, address: str, processes: Mapping[str, Process], jobs: Mapping[str, JobRow],
        make_ranks: MakeRanks, settled_here: SettledHere,
    ) -> None:  # fmt: skip
        self._local = local
        self._links = links
        self._address = address  # of this node, for servers of others
        self._processes = processes
        self._jobs = jobs
        self._make_ranks = make_ranks
        self._settled_here = settled_here
        self._scopes: dict[str, Leading | Following] = {}
        self._settled = False

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
        self._of(process).reported(process, server, message)

    def committed(self, process: Process, number: int) -> None:
        self._of(process).committed(process, number)

    def changed(self, process: Process, instruction: e.Instruction) -> None:
        self._of(process).changed(process, instruction)

    def finished(self, process: Process) -> None:
        self._of(process).finished(process)
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
        """Those that are suspended or resumed as one."""
        if process.job.nodes is not None:
            return self._made_with(process)
        return [one for one in self._local.together(process) if isinstance(one, Process)]

    def _made_with(self, process: Process) -> list[Process]:
        """Of a job of several nodes nothing is suspended but what is made again: those of this node."""
        round = process.suspended_at() if process.state == "suspended" else 0
        others = [
            one for one in self._processes.values()
            if round and one.state == "suspended" and one.suspended_at() == round and one.job.id == process.job.id
        ]  # fmt: skip
        return others or [process]

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
        """Of a checkpoint of a job of several nodes: they are suspended, and resumed with those of the other nodes."""
        for process in processes:
            scope = self._of(process)
            if not isinstance(scope, Ranks):
                scope.made_again(process)

    def resume_all(self, nodes: str, processes: Sequence[Process], others: Mapping[str, Sequence[str]]) -> bool:
        """At the node that leads: these, and those of other nodes, are resumed as one from now on. False: one of them
        is not known yet."""
        scope = self._scope(nodes)
        return isinstance(scope, Leading) and scope.resume(processes, others)

    def resume(self, processes: Sequence[Process]) -> bool:
        """They wait for each other from now on, before any of them executes anything. False: they were not ranks."""
        if processes[0].job.nodes is not None:  # `resume_all` has begun it
            return bool(processes[0].suspended_at())
        return self._local.resume(processes)

    def close(self) -> None:
        self._local.close()
        for one in self._scopes.values():
            if isinstance(one, Leading):
                one.ranks.close()

    # --- other nodes -------------------------------------------------------------------------------------------------

    def session(self, peer: str) -> None:
        for nodes, one in list(self._scopes.items()):
            if isinstance(one, Following) and nodes.split(",")[0] == peer:
                one.session()
            elif isinstance(one, Leading) and peer in nodes.split(","):
                one.session(peer)

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
        pass

    def down(self, peer: str, why: str) -> None:
        shared = sum(peer in nodes.split(",") for nodes in self._scopes)
        if shared:
            logger.warning("ranks of another node are not in reach: no snapshots meanwhile", peer=peer, why=why)

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
            made = Leading(nodes, self._links, self._make_ranks, self._job_of, self._settled_here)
        else:
            made = Following(nodes, self._links, self._processes, self._settled_here)
        self._scopes[nodes] = made
        if self._settled:
            made.settled()
        return made

    def _drop_if_idle(self, nodes: str) -> None:
        """It has no process, here or elsewhere. The next one makes it again. Not before it is known who is here."""
        if not self._settled or any(one.job.nodes == nodes for one in self._processes.values()):
            return
        scope = self._scopes.get(nodes)
        if isinstance(scope, Leading):
            if scope.has_members:
                return
            scope.ranks.close()
        self._scopes.pop(nodes, None)

    def _job_of(self, uid: int, name: str, nodes: str) -> JobRow:
        """This node's part of another node's job, or what stands for it if there is none."""
        for job in reversed(list(self._jobs.values())):
            if (job.uid, job.name, job.nodes) == (uid, name, nodes):
                return job
        return new_job(name=name, command="", uid=uid, device=None, registered=False, nodes=nodes)[0]
