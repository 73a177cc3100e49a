"""Ranks of a job of several nodes, on the one that leads it: a group like those of one node, some of whose processes
other daemons have.

Nothing is begun before all nodes are there, so that nobody can be missing whom an earlier daemon knew, and no snapshot
is taken while one is not in reach. A recovery that lacks a node waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from xmigd import log
from xmigd.errors import ProtocolError, Unavailable, XmigError
from xmigd.ipc import messages as m
from xmigd.peers.contract import Links
from xmigd.process import events as e
from xmigd.process import migration_events as v
from xmigd.records import JobRow
from xmigd.servers.server import Server
from xmigd.supervisor import node_messages as n
from xmigd.supervisor.far_process import FarProcess
from xmigd.supervisor.following import SettledHere
from xmigd.supervisor.group import Ranks
from xmigd.supervisor.joining import Join, JoinHere
from xmigd.supervisor.member import Member
from xmigd.supervisor.process import Process
from xmigd.supervisor.state import now

logger = log.get("nodes")

MakeRanks = Callable[
    [
        dict[str, Member], Callable[[], bool], Callable[[Callable[[], None]], None],
        Callable[[Sequence[Member]], None],
    ],
    Ranks,
]  # fmt: skip


class Leading:
    """Of the jobs of some nodes, the first of which this one is."""

    def __init__(
        self, nodes: str, links: Links,
        make_ranks: MakeRanks, job_of: Callable[[int, str, str], JobRow], settled_here: SettledHere,
        join_here: JoinHere, patience: float,
    ) -> None:  # fmt: skip
        """`job_of`: by user, name and nodes. `join_here`: processes of this node are to be suspended or resumed with
        others. `patience`: seconds that a node may be out of reach meanwhile."""
        self._nodes = nodes
        self._links = links
        self._members: dict[str, Member] = {}
        self._absent = set(nodes.split(",")[1:])  # nodes that have not reported who is there
        self._settled = self._opened = False
        self._job_of = job_of
        # What waits until nodes have sent what they knew: by number, these nodes and what to do then.
        self._questions: dict[int, tuple[set[str], Callable[[], None]]] = {}
        self._last_question = 0
        self._settled_here = settled_here
        self._join_here = join_here
        self._patience = patience
        self._silent: dict[str, asyncio.TimerHandle] = {}  # nodes that are not in reach, until that is too long
        self.ranks = make_ranks(self._members, self._all_are_in_reach, self._hear_all, self._all_settled)
        for peer in self._absent:
            self._ask(peer)

    @property
    def has_members(self) -> bool:
        return bool(self._members)

    # --- this node's processes ---------------------------------------------------------------------------------------

    def reported(self, process: Process, server: Server, message: m.RankMessage) -> None:
        self._members[process.row.id] = process
        self.ranks.reported(process, server, message)

    def committed(self, process: Process, number: int) -> None:
        self.ranks.committed(process, number)

    def took_alone(self, process: Process) -> None:
        self.ranks.took_alone(process)

    def changed(self, process: Process, instruction: e.Instruction) -> None:
        self.ranks.changed(process, instruction)

    def orphaned(self, process: Process) -> None:
        self._members[process.row.id] = process
        self.ranks.orphaned(process)

    def finished(self, process: Process) -> None:
        self.ranks.finished(process)
        self._members.pop(process.row.id, None)

    def made_again(self, process: Process) -> None:
        self._members[process.row.id] = process

    def pause(self, process: Process) -> None:
        self._members[process.row.id] = process
        self.ranks.pause([process.row.id])

    def not_to_pause(self, process: Process) -> bool:
        return self.ranks.not_to_pause(process.row.id)

    def resume(self, processes: Sequence[Process], others: Mapping[str, Sequence[str]]) -> bool:
        """These were made again, and those of other nodes, and are resumed as one from now on. False: one is not known
        yet."""
        known = {peer: {one.row.id: one for one in self._of(peer) if one.state == "suspended"} for peer in others}
        if self._absent or any(name not in known[peer] for peer, names in others.items() for name in names):
            return False
        self.ranks.resume_as_one([*processes, *(known[peer][name] for peer in others for name in set(others[peer]))])
        return True

    def begins(self, what: n.What, to: n.To, processes: Sequence[Process]) -> None:
        """All others of their group are to be suspended or resumed with them. Raises Conflict, Unavailable: they
        cannot."""
        for process in processes:
            self._members[process.row.id] = process
        self._begin("", what, to, [process.row.id for process in processes])

    def cannot_join(self, what: n.What, process: Process, why: str) -> None:
        if what == "suspend":
            self.ranks.not_suspended(process, why)
        else:
            self._does_not_resume(process, why)

    def settled(self) -> None:
        self._settled = True
        self._open()

    def close(self) -> None:
        for timer in self._silent.values():
            timer.cancel()
        self.ranks.close()

    # --- the others --------------------------------------------------------------------------------------------------

    def session(self, peer: str) -> None:
        """Its daemon was started, or this one."""
        for process in self._of(peer):
            self.ranks.not_to_pause(process.row.id)
        self._absent.add(peer)
        self.ranks.without_standbys(self._of(peer))
        self._ask(peer)

    def received(self, peer: str, message: n.NodeMessage) -> None:
        """Raises ProtocolError."""
        match message:
            case n.Here(standby_bytes=bound, processes=processes) if peer in self._absent:
                self.ranks.standby_bounds[peer] = bound
                self._here(peer, processes)
            case n.Here():
                pass  # sent by itself and as an answer: who waited at the first may have gone on since
            case _ if peer in self._absent:
                pass  # of before: `here` has what comes of it
            case n.Reported(stand=stand, server=number, message=fields):
                process = self._far(peer, stand)
                self.ranks.reported(process, process.server(number), n.parse_rank_message(fields))
            case n.HeldAgain(stand=stand, round=number):
                self.ranks.held_again(self._far(peer, stand), number)
            case n.Committed(stand=stand, round=number):
                self.ranks.committed(self._far(peer, stand), number)
            case n.TookAlone(stand=stand):
                self.ranks.took_alone(self._far(peer, stand))
            case n.Changed(stand=stand, what="not_resumed", why=why):
                self.ranks.not_resumed(self._far(peer, stand), why)
                self.ranks.look_who_is_left_behind()
            case n.Changed(stand=stand, what="cannot_resume", why=why):
                self._does_not_resume(self._far(peer, stand), why)
                self.ranks.look_who_is_left_behind()
            case n.Changed(stand=stand, what="not_suspended", why=why):
                self.ranks.not_suspended(self._far(peer, stand), why)
            case n.Changed(stand=stand, what="stays", why=why):
                self.ranks.move_over(self._far(peer, stand), why)
            case n.Changed(stand=stand, what=what, why=why):
                self.ranks.changed(self._far(peer, stand), _instruction(what, why))
            case n.MadeAgain(stand=stand) | n.Looked(stand=stand):
                self._far(peer, stand)
            case n.Begins(what=what, to=to, processes=names):
                self._far_begins(peer, what, to, names)
            case n.Pauses(stand=stand, on=True):
                self.ranks.pause([self._far(peer, stand).row.id])
            case n.Pauses(stand=stand):
                self.ranks.not_to_pause(self._far(peer, stand).row.id)
            case n.CaughtUp(number=number):
                self._heard(peer, number)
            case n.GaveUp(servers=servers):
                there = {name: self._check(peer, one) for name, _ in servers if (one := self._members.get(name))}
                self.ranks.give_up(now(), {server: 1 for server in servers if server[0] in there})
            case n.Finished(process=name):
                if (gone := self._members.get(name)) is not None:
                    self._check(peer, gone)
                    self._gone(gone)
            case _:
                raise ProtocolError(f"{message.kind}, from a node that does not lead")

    def _here(self, peer: str, processes: tuple[n.Present, ...]) -> None:
        logger.info("a node of a job is there", peer=peer, processes=len(processes))
        self._absent.discard(peer)
        there = {one.stand.process for one in processes}
        for gone in [one for one in self._of(peer) if one.row.id not in there]:
            self._gone(gone)
        for one in processes:
            self.ranks.returned(self._far(peer, one.stand), one)
        self._open()
        self.ranks.look_at_handovers()
        self.ranks.look_who_is_left_behind()
        for number in [number for number, (nodes, _) in self._questions.items() if peer in nodes]:
            self._send(peer, n.CatchUp(nodes=self._nodes, number=number))  # an earlier daemon was to answer it

    def up(self, peer: str) -> None:
        self._hears(peer)
        self.ranks.look_at_handovers()

    def _hears(self, peer: str) -> None:
        if (timer := self._silent.pop(peer, None)) is not None:
            timer.cancel()

    def down(self, peer: str) -> None:
        """The connections of what was made ahead may end, too, and nobody would notice before they are used."""
        self.ranks.without_standbys(self._of(peer))
        self._hears(peer)
        self._silent[peer] = asyncio.get_running_loop().call_later(self._patience, self._is_silent, peer)

    def _is_silent(self, peer: str) -> None:
        """Nobody is suspended or resumed without its ranks, as far as that is not decided."""
        del self._silent[peer]
        why = f"{peer} has not been in reach for {self._patience:g} s"
        for process in self._of(peer):
            self.ranks.not_suspended(process, why)
            self._does_not_resume(process, why)

    def _does_not_resume(self, process: Member, why: str) -> None:
        """It may wait for the others already, and they are all who would hear of it otherwise."""
        if self.ranks.resumed_with(process.row.id):
            process.tell(v.GroupRefuses(t=now(), text=why))
            self.ranks.not_resumed(process, why)

    def _far_begins(self, peer: str, what: n.What, to: n.To, names: Sequence[str]) -> None:
        known = [self._check(peer, self._members[one]) for one in names if one in self._members]
        try:
            self._begin(peer, what, to, names)
        except XmigError as error:
            for process in known:
                process.tell(v.GroupRefuses(t=0, text=error.message))

    def _begin(self, node: str, what: n.What, to: n.To, names: Sequence[str]) -> None:
        """Raises Conflict, Unavailable."""
        if not self._opened:  # somebody may be missing, who would stay behind
            who = " and ".join(sorted(self._absent)) or "the node that leads"
            raise Unavailable(f"it is not known yet which ranks the job has on {who}", code="peer_unreachable",
                              hint="try again; xmigctl peer list says who is not in reach")  # fmt: skip
        if what == "resume" and set(names) <= self.ranks.resumed_with(names[0]):
            return  # somebody has requested it on another node
        others = self.ranks.with_them(names) if what == "suspend" else self.ranks.asleep_with(names)
        by_node: dict[str, list[Member]] = {}
        for one in others:
            by_node.setdefault(one.node, []).append(one)
        for peer in {*self._absent, *by_node} - {node, ""}:
            if peer in self._absent or not self._links.connected(peer):
                raise Unavailable(f"{peer}, which has ranks of the job, is not in reach", code="peer_unreachable",
                                  hint="xmigctl peer list says why")  # fmt: skip
        if what == "resume":
            self.ranks.resume_as_one([*(self._members[one] for one in names if one in self._members), *others])
        for peer, members in by_node.items():
            if peer:
                ids = tuple(one.row.id for one in members)
                self._send(peer, n.Join(nodes=self._nodes, what=what, to=to, processes=ids[: n.MOST_PROCESSES]))
            else:
                here = tuple(one for one in members if isinstance(one, Process))
                self._join_here(Join(what, to, here, node or self._links.node))

    def _gone(self, process: Member) -> None:
        self.ranks.changed(process, _instruction("gone", ""))
        self.ranks.finished(process)
        self._members.pop(process.row.id, None)

    def _of(self, peer: str) -> list[FarProcess]:
        return [one for one in self._members.values() if isinstance(one, FarProcess) and one.node == peer]

    def _far(self, peer: str, stand: n.Stand) -> FarProcess:
        found = self._members.get(stand.process)
        if found is None:
            if len(self._of(peer)) >= n.MOST_PROCESSES:
                raise ProtocolError(f"more than {n.MOST_PROCESSES} processes")
            job = self._job_of(stand.uid, stand.job, self._nodes)
            made = self._members[stand.process] = FarProcess(
                peer, self._nodes, stand, job, lambda message: self._send(peer, message)
            )
            return made
        process = self._check(peer, found)
        process.update(stand)
        return process

    def _check(self, peer: str, process: Member) -> FarProcess:
        if not isinstance(process, FarProcess) or process.node != peer:
            raise ProtocolError(f"process {process.row.id[:12]} is another node's")
        return process

    def _ask(self, peer: str) -> None:
        self._send(peer, n.WhoIsHere(nodes=self._nodes))

    def _send(self, peer: str, message: n.Message) -> None:
        if not self._links.send(peer, message.model_dump(mode="json")):
            logger.debug("a node of a job is not there", peer=peer)  # once it comes it gets the question again

    def _all_are_in_reach(self) -> bool:
        others = self._nodes.split(",")[1:]
        return not self._absent and all(self._links.connected(peer) for peer in others)

    def _hear_all(self, then: Callable[[], None]) -> None:
        others = set(self._nodes.split(",")[1:])
        if not others:
            then()
            return
        self._last_question += 1
        self._questions[self._last_question] = (others, then)
        for peer in sorted(others - self._absent):  # these get it once they are there
            self._send(peer, n.CatchUp(nodes=self._nodes, number=self._last_question))

    def _heard(self, peer: str, number: int) -> None:
        nodes, then = self._questions.get(number, (set[str](), None))
        nodes.discard(peer)
        if then is not None and not nodes:
            del self._questions[number]
            then()

    def _all_settled(self, members: Sequence[Member]) -> None:
        """Each node copies what only its devices have."""
        self._settled_here(self._nodes, [one for one in members if isinstance(one, Process)])
        for peer in self._nodes.split(",")[1:]:
            names = tuple(one.row.id for one in members if one.node == peer)
            if names:
                self._send(peer, n.Settled(nodes=self._nodes, processes=names[: n.MOST_PROCESSES]))

    def _open(self) -> None:
        if self._settled and not self._absent and not self._opened:
            self._opened = True
            self.ranks.settled()


def _instruction(what: str, why: str) -> e.Instruction:
    """Of a process's machine, as a process of this node would have it."""
    match what:
        case "broken":
            return e.GroupBroken(why)
        case "awaits":
            return e.AwaitGroup()
        case "suspends":
            return v.PrepareSuspend(0, "", ranks=True)
        case "prepared" | "suspended" | "restored":
            return v.Waits(what)
        case "moves":
            return v.GiveTarget(0, "move")
        case "leaves":
            return v.AskHandover(0)
        case _:
            return e.SaveState({"gone": "ended", "asleep": "suspended"}.get(what, what), None, why)
