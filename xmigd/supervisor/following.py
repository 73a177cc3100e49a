"""Ranks of a job of several nodes, on one that does not lead it: what happens to them goes to the daemon that does, and
what that one decides is done.

A process is tied to its group as soon as its server says that it has joined a communicator, and not when the one who
leads says so: a server that is lost meanwhile must not be replaced alone.

What is sent arrives once and in order while both daemons live. If one of them was restarted, `here` is sent first, with
everything that the other may not know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from xmigd import log
from xmigd.errors import ProtocolError, Unavailable
from xmigd.ipc import messages as m
from xmigd.peers.contract import Links
from xmigd.process import events as e
from xmigd.process import migration_events as v
from xmigd.process.migration import Move
from xmigd.servers.server import Server
from xmigd.supervisor import node_messages as n
from xmigd.supervisor.far_chunks import FarRank
from xmigd.supervisor.followed import FollowedStandbys
from xmigd.supervisor.group import LEAVE_PATIENCE as ALL_STAND_PATIENCE
from xmigd.supervisor.group import PREPARE_PATIENCE
from xmigd.supervisor.joining import Join, JoinHere
from xmigd.supervisor.process import Process
from xmigd.supervisor.standby_memory import StandbyMemory
from xmigd.supervisor.state import now

logger = log.get("nodes")

# Of a group on these nodes, these have the snapshots of a round, as all others have.
SettledHere = Callable[[str, Sequence[Process]], None]

# Seconds for a rank's move, while the one who leads may not be in reach: a little longer than that one waits.
LEAVE_PATIENCE = PREPARE_PATIENCE + ALL_STAND_PATIENCE / 1e9 + 5


@dataclass(slots=True)
class _Known:
    """Of a process, what a new daemon of the one who leads needs."""

    communicators: dict[tuple[str, int], m.Communicator] = field(default_factory=dict)
    orphan: bool = False
    round: int = 0  # that it was sent into
    held: int = 0  # the round that it has prepared, and has not been sent the decision of
    lost: tuple[int, int] = (
        0,
        0,
    )  # a server that has lost memory with a device, and bytes: until ranks are named
    pauses: bool = False  # it is to pause at the next round, and was not sent to it yet


class Following:
    """Of the jobs of some nodes, of which another one leads."""

    def __init__(
        self, nodes: str, links: Links, processes: Mapping[str, Process], settled_here: SettledHere,
        standby_memory: StandbyMemory, join_here: JoinHere, patience: float,
    ) -> None:  # fmt: skip
        """`join_here`: processes of this node are to be suspended or resumed with others. `patience`: seconds that the
        node that leads may be out of reach meanwhile."""
        self._settled_here = settled_here
        self._join_here = join_here
        self._patience = patience
        self._silent: asyncio.TimerHandle | None = None  # the one who leads is, until that is too long
        self._nodes = nodes
        self._links = links
        self._leader = nodes.split(",")[0]
        self._processes = processes  # of all jobs
        self._known: dict[str, _Known] = {}
        self._standbys = FollowedStandbys(nodes, standby_memory, processes, self._report, self._send)
        self._settled = False
        self._wanted = False  # `here` is, once this daemon knows who is
        # Of ranks that are to leave their servers at a round, until it is decided: how long that may take.
        self._leaving: dict[str, asyncio.TimerHandle] = {}

    # --- what happens ------------------------------------------------------------------------------------------------

    def reported(self, process: Process, server: Server, message: m.RankMessage) -> None:
        known = self._known.setdefault(process.row.id, _Known())
        match message:
            case m.CommunicatorPrepared():
                self._standbys.prepared(process, server, message)
                return
            case m.Communicator(name=name, rank=rank, state=state):
                known.communicators[name, rank] = message
                if state == "past":
                    del known.communicators[name, rank]
                known.orphan = False
                if state == "joined" and not process.grouped:
                    process.tell(e.Grouped(t=now(), on=True))
            case m.ReplicasWanted(bytes=size):
                known.lost = server.number, size
            case m.GroupHeld(round=number):
                known.held = number
                if number != known.round:
                    self._send(n.HeldAgain(nodes=self._nodes, stand=_stand(process), round=number))
                    return
        self._report(process, server.number, message)

    def _report(self, process: Process, server: int, message: m.RankMessage) -> None:
        fields = message.model_dump(mode="json")
        self._send(n.Reported(nodes=self._nodes, stand=_stand(process), server=server, message=fields))

    def committed(self, process: Process, number: int) -> None:
        self._send(n.Committed(nodes=self._nodes, stand=_stand(process), round=number))

    def took_alone(self, process: Process) -> None:
        self._send(n.TookAlone(nodes=self._nodes, stand=_stand(process)))

    def changed(self, process: Process, instruction: e.Instruction) -> None:
        match instruction:
            case e.GroupBroken(reason):
                self._known.setdefault(process.row.id, _Known()).held = 0
                self._change(process, "broken", reason)
            case e.AwaitGroup():
                self._change(process, "awaits")
            case e.SaveState(state="recovering"):
                self._change(process, "recovering")
            case e.SaveState(state="running"):
                self._change(process, "running")
            case e.SaveState(state="losing" | "lost", why=why):
                self._change(process, "lost", why)
            case e.SaveState(state="draining" | "ended"):
                self._change(process, "gone")
            case v.GiveTarget(mode="move") if process.grouped:
                self._change(process, "moves")
            case v.AskHandover():
                patience, why = min(LEAVE_PATIENCE, self._patience), "the node that leads did not decide it in time"
                timer = asyncio.get_running_loop().call_later(patience, self._stays, process, why)
                self._leaving[process.row.id] = timer
                self._change(process, "leaves")
            case v.SaveMigration(record) if record.kind == "move" and (
                record.state != "running" or record.phase == "rolling_back"
            ):
                why = record.error or "it is over"
                self._stays(process, why)
                self._change(process, "stays", why)
            case v.PrepareSuspend(ranks=True):
                self._change(process, "suspends")
            case v.Waits(what):
                self._change(process, what)
            case e.SaveState(state="suspended"):
                if not process.resumes:  # else a holder is missing, and what its target has reported counts
                    self._known[process.row.id] = _Known()
                    self._standbys.void([process.row.id])  # they are gone, and the one who leads sends nothing of that
                self._change(process, "asleep")
            case v.SaveMigration(record) if record.state in ("failed", "cancelled") or record.phase == "rolling_back":
                if record.kind != "suspend":
                    self._change(process, "not_resumed", record.error or "it is over")
                elif record.code != "program_exited":  # else it is gone
                    self._change(process, "not_suspended", record.error or "it is over")

    def _stays(self, process: Process, why: str) -> None:
        """If it was to leave its server: it is not decided, as far as is known here; if it is, see `_moves`."""
        active = process.active
        if self._end_leaving(process.row.id) and active is not None:
            process.tell(v.HandoverFailed(t=now(), server=active, text=why))

    def _end_leaving(self, name: str) -> bool:
        """Was it about to?"""
        timer = self._leaving.pop(name, None)
        if timer is not None:
            timer.cancel()
        return timer is not None

    def finished(self, process: Process) -> None:
        self._end_leaving(process.row.id)
        self._standbys.void([process.row.id])
        if self._known.pop(process.row.id, None) is not None:
            self._send(n.Finished(nodes=self._nodes, process=process.row.id))

    def orphaned(self, process: Process) -> None:
        self._known.setdefault(process.row.id, _Known()).orphan = True
        process.tell(e.Grouped(t=now(), on=True))

    def made_again(self, process: Process) -> None:
        self._known[process.row.id] = _Known()
        self._send(n.MadeAgain(nodes=self._nodes, stand=_stand(process)))

    def begins(self, what: n.What, to: n.To, processes: Sequence[Process]) -> None:
        """All others of their group are to be suspended or resumed with them. Raises Unavailable: nobody leads."""
        if not self._settled or not self._links.connected(self._leader):
            raise Unavailable(f"{self._leader}, which leads the job's nodes, is not in reach", code="peer_unreachable",
                              hint="xmigctl peer list says why")  # fmt: skip
        names = tuple(one.row.id for one in processes)
        self._send(n.Begins(nodes=self._nodes, what=what, to=to, processes=names))

    def cannot_join(self, what: n.What, process: Process, why: str) -> None:
        self._change(process, "not_suspended" if what == "suspend" else "cannot_resume", why)

    def pause(self, process: Process) -> None:
        self._known.setdefault(process.row.id, _Known()).pauses = True
        self._send(n.Pauses(nodes=self._nodes, stand=_stand(process), on=True))

    def not_to_pause(self, process: Process) -> bool:
        """It is not to any more. False: it has been sent to."""
        known = self._known.setdefault(process.row.id, _Known())
        waited, known.pauses = known.pauses, False
        self._send(n.Pauses(nodes=self._nodes, stand=_stand(process), on=False))
        return waited

    def settled(self) -> None:
        self._settled = True
        if self._wanted:
            self._report_who_is_here()

    # --- the one who leads -------------------------------------------------------------------------------------------

    def session(self) -> None:
        """Its daemon was started, or this one. Who has stopped for a round of an earlier one would wait in vain; who is
        held waits for the decision, which may have been made."""
        why = "the daemon that leads was started again"
        self._do_not_wait(why, lambda move: move.leaving == "waits")
        for leaving in [one for name in self._leaving if (one := self._own(name)) is not None]:
            self._stays(leaving, why)  # what was decided and did not come is found in the journals
        for name, known in self._known.items():
            if known.round and not known.held and (process := self._own(name)) is not None:
                process.send_active(m.pack("group_continue", round=known.round))
        self._standbys.void(self._known)
        self._report_who_is_here()

    def up(self) -> None:
        if self._silent is not None:
            self._silent.cancel()
            self._silent = None

    def down(self) -> None:
        self.up()
        self._silent = asyncio.get_running_loop().call_later(self._patience, self._is_silent)

    def _is_silent(self) -> None:
        self._silent = None
        why = f"{self._leader}, which leads the job's nodes, has not been in reach for {self._patience:g} s"
        self._do_not_wait(why, lambda move: move.in_doubt)

    def _do_not_wait(self, why: str, may_be_decided: Callable[[Move], bool]) -> None:
        """For the others, to be suspended or resumed with them; unless all may have done their part."""
        for name in list(self._known):
            process = self._own(name)
            move = None if process is None else process.machine.move
            if process is not None and move is not None and move.ranks and not may_be_decided(move):
                process.tell(v.GroupRefuses(t=now(), text=why))

    def close(self) -> None:
        self._standbys.close()
        self.up()
        for timer in self._leaving.values():
            timer.cancel()

    def _report_who_is_here(self) -> None:
        self._wanted = not self._settled
        if self._settled:
            # Also those whose servers have not reported anything to this daemon yet: who is not named is gone.
            own = [one for one in self._processes.values() if one.job.nodes == self._nodes]
            present = [self._present(one, self._known.setdefault(one.row.id, _Known())) for one in own]
            bound = self._standbys.bound
            self._send(n.Here(nodes=self._nodes, standby_bytes=bound, processes=tuple(present)))

    def received(self, message: n.NodeMessage) -> None:
        """Raises ProtocolError."""
        match message:
            case n.WhoIsHere():
                self._report_who_is_here()
            case n.CatchUp(number=number):
                if self._settled:  # else `here` is to come, and then the question again
                    self._send(n.CaughtUp(nodes=self._nodes, number=number))
            case n.Tell(process=name) if (process := self._own(name)) is not None:
                event = message.at(now())
                if isinstance(event, e.GroupGo) and process.machine.awaits_group:
                    self._go_on(process, event)
                elif isinstance(event, e.GroupWoken):
                    process.wake(event.reason)
                elif isinstance(event, v.HandoverFailed):
                    self._stays(process, event.text)
                else:
                    process.tell(event)
            case n.Join(what=what, to=to, processes=names):
                named = tuple(one for one in map(self._own, names) if one is not None)
                if len({one.row.uid for one in named}) == 1:  # a job is one user's
                    self._join_here(Join(what, to, named, self._leader))
            case n.Send(process=name, server=number, text=text) if (process := self._own(name)) is not None:
                sent = n.round_of(text)
                unwanted = sent is not None and self._note_round(name, sent)
                if process.active == number and (server := process.server(number)) is not None:
                    if sent is not None and sent.moves and not self._moves(process, sent):
                        return
                    server.send(text.encode())
                if unwanted:
                    process.let_go_on()
            case n.Met(process=name) if (process := self._own(name)) is not None:
                process.met(message.to_rank())
            case n.Look(process=name) if (process := self._own(name)) is not None:
                self._send(n.Looked(nodes=self._nodes, stand=_stand(process)))
            case n.NameReplicas(process=name, server=number) if (process := self._own(name)) is not None:
                known, here = self._known[name], self._links.node
                if known.lost[0] == number:
                    known.lost = (0, 0)
                # Only of this job's user: the node that leads may be somebody's who says otherwise.
                known_here = [self._own(one) for node, one in message.ranks if node == here]
                near = [one for one in known_here if one is not None and one.row.uid == process.row.uid]
                process.name_ranks(number, near, [FarRank(node, one) for node, one in message.ranks if node != here])
            case n.Settled(processes=names):
                # A job is one user's, whatever the node that leads says: they get to see each other's snapshots.
                found = [one for one in map(self._own, names) if one is not None]
                if len({one.row.uid for one in found}) == 1:
                    self._settled_here(self._nodes, found)
            case n.PrepareCommunicator() | n.ForgetCommunicator() | n.NoteMade():
                if (process := self._own(message.process)) is not None:
                    self._standbys.received(process, message)
            case n.Tell() | n.Send() | n.Met() | n.Look() | n.NameReplicas():
                pass  # it has ended meanwhile
            case _:
                raise ProtocolError(f"{message.kind}, from the node that leads")

    def _own(self, name: str) -> Process | None:
        return self._processes.get(name) if name in self._known else None

    def _go_on(self, process: Process, event: e.GroupGo) -> None:
        """Without what the others use, its server could only end: they are to come back, and it waits for them."""
        if self._standbys.go_on(process, event.communicators):
            process.tell(event)
        else:
            self._change(process, "broken", "communicators that were made ahead are not there any more")
            self._change(process, "awaits")

    def _moves(self, process: Process, sent: n.Round) -> bool:
        """A rank moves, this one or another, and that is decided. Can it do its part? It cannot if its move was given
        up here meanwhile, or what was made for that. The others use it, so all are recovered from this round."""
        leaves = sent.leaves and self._end_leaving(process.row.id)
        server = process.target if leaves else process.active
        can = self._standbys.use(process, server, sent.communicators) and leaves == sent.leaves
        if can and leaves:
            process.leaves_with(sent.communicators)
        if not can:
            why = "the move of a rank was decided, and was given up here meanwhile"
            self._change(process, "broken", why)
            process.tell(e.GroupLost(t=now(), reason=why))
        return can

    def _note_round(self, name: str, message: n.Round) -> bool:
        """Is it sent to pause, and nobody wants that any more? Both messages were on their way at once."""
        known = self._known[name]
        known.round = message.round
        if message.type in ("group_take", "group_continue"):
            known.held = 0
        unwanted = message.pauses and not known.pauses
        if message.pauses:
            known.pauses = False
        return unwanted

    def _present(self, process: Process, known: _Known) -> n.Present:
        server, lost = known.lost
        return n.Present(
            stand=_stand(process), orphan=known.orphan, awaits=process.machine.awaits_group, held=known.held,
            lost=lost if server == process.active else 0,
            communicators=tuple(known.communicators.values()),
        )  # fmt: skip

    def _change(self, process: Process, what: str, why: str = "") -> None:
        if process.row.id in self._known:
            fields = {"nodes": self._nodes, "stand": _stand(process), "what": what, "why": why[:4096]}
            self._send(n.Changed.model_validate(fields))

    def _send(self, message: n.Message) -> None:
        if not self._links.send(self._leader, message.model_dump(mode="json")):
            logger.debug("the node that leads is not there", leader=self._leader)  # it gets `here` when it comes


def _stand(process: Process) -> n.Stand:
    return n.Stand(
        process=process.row.id, uid=process.row.uid, job=process.job.name, pid=process.row.pid,
        start_time=process.row.start_time, device=process.row.device, state=process.state, active=process.active,
        standby=process.warm_standby, standing=process.standing, rounds=process.rounds(), forsaken=process.forsaken(),
        target=process.target, renewed=process.renewed(),
        suspended_at=process.suspended_at(), leaving=process.leaving, resumes=process.resumes,
    )  # fmt: skip
