"""Ranks of a job of several nodes, on one that does not lead it: what happens to them goes to the daemon that does, and
what that one decides is done.

A process is tied to its group as soon as its server says that it has joined a communicator, and not when the one who
leads says so: a server that is lost meanwhile must not be replaced alone.

What is sent arrives once and in order while both daemons live. If one of them was restarted, `here` is sent first, with
everything that the other may not know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from xmigd import log
from xmigd.errors import ProtocolError
from xmigd.ipc import messages as m
from xmigd.peers.contract import Links
from xmigd.process import events as e
from xmigd.process import migration_events as v
from xmigd.servers.server import Server
from xmigd.supervisor import node_messages as n
from xmigd.supervisor.far_chunks import FarRank
from xmigd.supervisor.process import Process, now

logger = log.get("nodes")

# Of a group on these nodes, these have the snapshots of a round, as all others have.
SettledHere = Callable[[str, Sequence[Process]], None]

NOT_HERE = "its job has ranks on several nodes"


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

    def __init__(self, nodes: str, links: Links, processes: Mapping[str, Process], settled_here: SettledHere) -> None:
        self._settled_here = settled_here
        self._nodes = nodes
        self._links = links
        self._leader = nodes.split(",")[0]
        self._processes = processes  # of all jobs
        self._known: dict[str, _Known] = {}
        self._settled = False
        self._wanted = False  # `here` is, once this daemon knows who is

    # --- what happens ------------------------------------------------------------------------------------------------

    def reported(self, process: Process, server: Server, message: m.RankMessage) -> None:
        known = self._known.setdefault(process.row.id, _Known())
        match message:
            case m.CommunicatorPrepared():
                return
            case m.MemoryShort(number=number):
                server.send(m.pack("memory_given_up", number=number, bytes=0))
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
        fields = message.model_dump(mode="json")
        self._send(n.Reported(nodes=self._nodes, stand=_stand(process), server=server.number, message=fields))

    def committed(self, process: Process, number: int) -> None:
        self._send(n.Committed(nodes=self._nodes, stand=_stand(process), round=number))

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
            case v.AskHandover():
                if process.active is not None:
                    process.tell(v.HandoverFailed(t=now(), server=process.active, text=NOT_HERE))
            case v.PrepareSuspend(ranks=True):
                process.tell(v.GroupRefuses(t=now(), text=NOT_HERE))
            case v.Waits("restored"):
                self._change(process, "restored")
            case v.SaveMigration(record) if record.kind == "resume" and record.state not in ("running", "done"):
                self._change(process, "not_resumed", record.error or "it is over")

    def finished(self, process: Process) -> None:
        if self._known.pop(process.row.id, None) is not None:
            self._send(n.Finished(nodes=self._nodes, process=process.row.id))

    def orphaned(self, process: Process) -> None:
        self._known.setdefault(process.row.id, _Known()).orphan = True
        process.tell(e.Grouped(t=now(), on=True))

    def made_again(self, process: Process) -> None:
        self._known[process.row.id] = _Known()
        self._send(n.MadeAgain(nodes=self._nodes, stand=_stand(process)))

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
        for name, known in self._known.items():
            if known.round and not known.held and (process := self._own(name)) is not None:
                process.send_active(m.pack("group_continue", round=known.round))
        self._report_who_is_here()

    def _report_who_is_here(self) -> None:
        self._wanted = not self._settled
        if self._settled:
            # Also those whose servers have not reported anything to this daemon yet: who is not named is gone.
            own = [one for one in self._processes.values() if one.job.nodes == self._nodes]
            present = [self._present(one, self._known.setdefault(one.row.id, _Known())) for one in own]
            self._send(n.Here(nodes=self._nodes, processes=tuple(present)))

    def received(self, message: n.NodeMessage) -> None:
        """Raises ProtocolError."""
        match message:
            case n.WhoIsHere():
                self._report_who_is_here()
            case n.CatchUp(number=number):
                if self._settled:  # else `here` is to come, and then the question again
                    self._send(n.CaughtUp(nodes=self._nodes, number=number))
            case n.Tell(process=name) if (process := self._own(name)) is not None:
                process.tell(message.at(now()))
            case n.Send(process=name, server=number, text=text) if (process := self._own(name)) is not None:
                unwanted = self._note_round(name, text)
                if process.active == number and (server := process.server(number)) is not None:
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
            case n.Tell() | n.Send() | n.Met() | n.Look() | n.NameReplicas():
                pass  # it has ended meanwhile
            case _:
                raise ProtocolError(f"{message.kind}, from the node that leads")

    def _own(self, name: str) -> Process | None:
        return self._processes.get(name) if name in self._known else None

    def _note_round(self, name: str, text: str) -> bool:
        """Is it sent to pause, and nobody wants that any more? Both messages were on their way at once."""
        if (message := n.round_of(text)) is None:
            return False
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
        standing=process.standing, rounds=process.rounds(), forsaken=process.forsaken(),
    )  # fmt: skip
