"""What ties programs together: carries events to the machine of groups and does what it says."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from xmigd import log
from xmigd.errors import Conflict
from xmigd.groups import instructions as g
from xmigd.groups import prepared as p
from xmigd.groups.groups import Groups
from xmigd.groups.meetings import Meetings, Offer
from xmigd.groups.replicas import Finding
from xmigd.groups.resumptions import LetIn, NotResumed, Resumptions
from xmigd.groups.ties import Who
from xmigd.ipc import messages as m
from xmigd.logs.log import JobLog
from xmigd.process import events as e
from xmigd.process import migration_events as v
from xmigd.ranks.history import Difference, History
from xmigd.records import JobRow, ReplicaPolicy
from xmigd.supervisor import node_messages as n
from xmigd.supervisor.far_process import FarServer
from xmigd.supervisor.member import Member, Sender
from xmigd.supervisor.process import Process
from xmigd.supervisor.replicas import Compared, Comparisons
from xmigd.supervisor.standby_memory import StandbyMemory
from xmigd.supervisor.state import now

logger = log.get("groups")

PREPARE_PATIENCE = 20.0  # seconds, for the communicators of a rank that moves
LEAVE_PATIENCE = 25_000_000_000  # ns, after that, for all ranks to stand still: it may take some rounds
LOOK_AT_ROUNDS = 0.01  # seconds
SETTLE = 0.5  # seconds that adopted servers have to say what they are members of


class Ranks:
    """Of all programs of this node that have none elsewhere; or of the jobs of some nodes that this one leads."""

    def __init__(
        self, processes: Mapping[str, Member], job_log: JobLog, history: History, standby_memory: StandbyMemory,
        copy_unique: Callable[[Sequence[Member]], None], suspend_patience: float, first_round: int,
        replica_check: float, stop_job: Callable[[JobRow, str], None], replica_policy: ReplicaPolicy,
        may_begin: Callable[[], bool] = lambda: True,
        hear_all: Callable[[Callable[[], None]], None] = lambda then: then(), *, leads: bool = False,
    ) -> None:  # fmt: skip
        """`copy_unique`: these are a group that has the snapshots of a round; what only one device has may be copied.
        `first_round`: higher than any of an earlier daemon. `stop_job`: a job's policy says so. `may_begin`: are all
        there whom a round needs? `hear_all` calls its argument once all that other nodes know now is known here.
        `leads`: jobs of several nodes, whose processes are all that there are in `processes`; else they are left to
        others."""
        self._processes = processes
        self._leads = leads
        self._job_log = job_log
        self._may_begin = may_begin
        self._hear_all = hear_all
        self._copy_unique = copy_unique
        self._loop = asyncio.get_running_loop()
        self._opened = False
        self._meetings = Meetings()
        self._groups = Groups(first_round, round(suspend_patience * 1e9))
        self._resumptions = Resumptions()
        self._prepared = p.Prepared(first=now())
        self._standby_memory = standby_memory
        standby_memory.add(self)
        # By node, bytes that a standby's communicators may take there.
        self.standby_bounds = {"": standby_memory.bound}
        # Of processes that move, until they have left or stay: how long their communicators may take; cancelled once
        # they are there.
        self._handovers: dict[str, asyncio.TimerHandle] = {}
        self._left: set[str] = set()  # processes that have left their servers at a round: their moves are not over yet
        self.history = history
        self._comparisons = Comparisons(replica_check, self._compared)
        self._stop_job = stop_job
        self._replica_policy = replica_policy
        self._restoring: dict[str, Finding] = {}  # by process, what is to become as others have it
        self._events: deque[Callable[[int], list[g.Instruction]]] = deque()
        self._busy = False
        self._timer: asyncio.TimerHandle | None = None
        self._opening: asyncio.TimerHandle | None = None
        self._wanting: dict[str, int] = {}  # processes that have lost memory with a device: which server of theirs
        self._looking: asyncio.TimerHandle | None = None
        # Of a group some run and others are suspended. These are to run again, once their servers have ended.
        self._waking: set[str] = set()
        self._apart: asyncio.TimerHandle | None = None  # it is not known yet what those that run are members of
        self._apart_since = 0

    # --- what happens ------------------------------------------------------------------------------------------------

    def reported(self, process: Member, server: Sender, message: m.RankMessage) -> None:
        """By a server of the process."""
        who = _who(process)
        if process.state == "suspended" and not self._resumptions.members(who.process):
            return  # of a target that is given up
        self.history.reported(now(), who, message)
        match message:
            case m.Meet():
                self._meet(process, server, message)
            case m.CommunicatorPrepared():
                self._communicator_prepared(process, server, message)
            case m.Communicator(name=name, rank=rank, ranks=ranks, state=state):
                self._tell(lambda t: self._groups.communicator(t, who, name, rank, ranks, state))
            case m.CommunicatorFailed(name=name, rank=rank, why=why, severed=severed):
                logger.warning("a collective failed", process=who.process[:12], rank=rank, why=why)
                self._tell(lambda t: self._groups.failed(t, who.process, name, severed=severed))
            case m.GroupWanted() if self._may_begin() and self._apart is None:
                self._tell(lambda t: self._groups.wanted(t, who.process))
            case m.GroupStopped(round=number, counts=counts, behind=behind):
                self._comparisons.stopped(who.process, server.number, number, message.work)
                self._tell(lambda t: self._groups.stopped(t, who.process, number, counts, behind))
            case m.GroupHeld(round=number):
                self._tell(lambda t: self._groups.held(t, who.process, number))
            case m.GroupBusy(round=number, why=why):
                logger.debug("no group snapshot now", process=who.process[:12], round=number, why=why)
                self._tell(lambda t: self._groups.busy(t, who.process, number, why))
            case m.GroupStuck(seconds=seconds) if server.number == process.active:
                what = "a rank waits for others" if seconds else "a rank gets further again"
                logger.info(what, process=who.process[:12], without_progress_s=seconds)
                self._tell(lambda t: self._groups.stuck(t, who.process, seconds))
            case m.ReplicasWanted(bytes=size):
                logger.info("memory was lost with a device", process=who.process[:12], mib=size >> 20)
                self._wanting[who.process] = server.number
                self._name_replicas()

    # Processes of other nodes.

    def returned(self, process: Member, present: n.Present) -> None:
        """What it was sent may not have come, and what happened to it meanwhile is not known: its daemon was started
        again, or this one."""
        name, stand = process.row.id, present.stand
        about = FarServer(stand.active or 0, process.row.device)
        for message in present.communicators:
            self.reported(process, about, message)
        self._tell(lambda t: self._groups.unheard(t, name))
        self.move_over(process, "a daemon was started again")
        fate = self._groups.fate_of(name)
        if fate is None and self._opened and (present.orphan or present.awaits):
            process.tell(e.Grouped(t=now(), on=False))  # nobody shares a communicator with it
        elif fate is None and (present.orphan or present.awaits):
            self._groups.orphan(_who(process))
        elif present.orphan or present.awaits:
            self._tell(lambda t: self._groups.broken(t, name, "its server was lost while a daemon was not there"))
        elif fate in ("broken", "waits"):
            process.tell(e.GroupLost(t=now(), reason="another rank's server was lost while a daemon was not there"))
        if present.awaits:
            self._tell(lambda t: self._groups.awaits(t, name))
        if present.held:
            self.held_again(process, present.held)
        if present.lost:
            self.reported(process, about, m.ReplicasWanted(type="replicas_wanted", bytes=present.lost))
        prepared, decided = process.rounds()
        if decided and not prepared:
            self._tell(lambda t: self._groups.committed(t, name, decided))
        if process.leaving == "waits":
            self._tell(lambda t: self._groups.suspended(t, name))
        else:
            self.not_suspended(process, "a daemon was started again")
            self.not_resumed(process, "a daemon was started again")

    def held_again(self, process: Member, number: int) -> None:
        """It stands prepared in a round that its daemon knows nothing of."""
        self.history.reported(now(), _who(process), m.GroupHeld(type="group_held", round=number))
        self._tell(lambda t: self._groups.held_again(t, process.row.id, number))

    def committed(self, process: Member, number: int) -> None:
        self.history.committed(now(), process.row.id, number)
        self._tell(lambda t: self._groups.committed(t, process.row.id, number))

    def took_alone(self, process: Member) -> None:
        """What it has now may be nowhere else, and what others had in common with it, too."""
        self._copy_unique(self._group_of(process))

    def changed(self, process: Member, instruction: e.Instruction) -> None:
        """What its machine says of it."""
        name = process.row.id
        self.history.changed(now(), name, instruction)
        match instruction:
            case e.GroupBroken(reason):
                self._tell(lambda t: self._groups.broken(t, name, reason))
            case e.AwaitGroup():
                self._tell(lambda t: self._groups.awaits(t, name))
            case v.GiveTarget(mode="move") if process.grouped:
                self._look_at_move(process)
            case v.AskHandover():
                self._begin_handover(process)
            case v.PrepareSuspend(ranks=True):
                self._tell(lambda t: self._groups.suspend(t, name))
            case v.Waits(what):
                self._waits(name, what)
            case v.SaveMigration(record) if record.state != "running" or record.phase == "rolling_back":
                why = record.error or "it is over"
                self.move_over(process, why)
                if record.state != "done":
                    self.not_resumed(process, why)
                if record.kind == "suspend" and record.state != "done" and record.code != "program_exited":
                    self.not_suspended(process, why)
            case e.SaveState(state="losing" | "lost", why=why):
                self._tell(lambda t: self._groups.lost(t, name, why))
            case e.SaveState(state="suspended"):
                self.look_who_is_left_behind()
            case e.SaveState(state="draining" | "ended"):
                self._tell(lambda t: self._groups.gone(t, name))
                self._tell(lambda _: self._resumptions.gone(name))

    def finished(self, process: Member) -> None:
        self.history.finished(now(), process.row.id)
        self._end_handover(process)
        self._left.discard(process.row.id)
        self._meetings.gone(process.row.id)
        self._comparisons.gone(process.row.id)
        self._restoring.pop(process.row.id, None)
        self._waking.discard(process.row.id)
        self._carry_out_ahead(self._prepared.gone(process.row.id))

    def orphaned(self, process: Member) -> None:
        """It was perhaps a member of a group, and waits until that is known."""
        self._groups.orphan(_who(process))
        process.tell(e.Grouped(t=now(), on=True))

    def settled(self) -> None:
        """Nobody is missing any more whom an earlier daemon knew; what they are members of they say in a moment."""
        self._opening = self._loop.call_later(SETTLE if self._processes else 0, self._open)

    # Suspensions and resumptions.

    def together(self, process: Member) -> list[Member]:
        """Those that are suspended or resumed as one, in the order in which their programs began: the members of its
        group, or those that were suspended with it."""
        name = process.row.id
        if process.state == "suspended":
            found = [one for one in self._processes.values() if self._slept_with(process, one)]
        else:
            found = [self._processes[one] for one in self._groups.others(name) if one in self._processes]
        return sorted([process, *found], key=lambda one: (one.row.start_time, one.row.pid))

    def with_them(self, names: Iterable[str]) -> list[Member]:
        """All others of their groups."""
        found = {other for name in names for other in self._groups.others(name)} - set(names)
        return [self._processes[one] for one in sorted(found) if one in self._processes]

    def asleep_with(self, names: Iterable[str]) -> list[Member]:
        """All others that were suspended with these, or are about to be. Raises Conflict: not all are."""
        named = [self._processes[one] for one in names if one in self._processes]
        rounds, uids = {one.suspended_at() for one in named} - {0}, {one.row.uid for one in named}
        found = [
            one for one in self._processes.values()
            if one.suspended_at() in rounds and one.row.uid in uids and (one.state == "suspended" or one.leaving)
        ]  # fmt: skip
        awake = any(one.row.uid in uids for at in rounds for one in self._awake(at))
        if not found or awake or any(one.row.id in self._waking for one in found):
            raise Conflict("ranks of its group run, and it is recovered with them", code="not_running")
        others = [one for one in found if one not in named]
        # Of one whose resumption is being taken back a last word is to come, which would be taken for the next one's.
        taken_back = any(one.resumes for one in others)
        if taken_back or any(self._groups.is_to_stand(one.row.id) or self.resumed_with(one.row.id) for one in found):
            raise Conflict("its group is being suspended, or resumed", code="already_moving")
        return others

    def _slept_with(self, process: Member, other: Member) -> bool:
        """Or is it about to? Then it cannot be resumed yet, nor can the others."""
        round = process.suspended_at()
        alike = other.row.uid == process.row.uid and other.state in ("running", "suspended") and other is not process
        return alike and round != 0 and other.suspended_at() == round

    def resume(self, processes: Sequence[Member]) -> bool:
        """These are resumed as one from now on. False: it is one that was suspended alone."""
        if not processes[0].suspended_at():
            self._begin_later(processes)
            return False
        self.resume_as_one(processes)
        return True

    def resume_as_one(self, processes: Sequence[Member]) -> None:
        self._begin_later(processes)
        names = [process.row.id for process in processes]
        self._meetings.forget_of(names)
        self._tell(lambda t: self._groups.forget(t, names))
        self._resumptions.begin(names)

    def _begin_later(self, processes: Iterable[Member]) -> None:
        """They may have been in rounds of another node."""
        self._groups.later_than(max((number for process in processes for number in process.rounds()), default=0))

    # Pauses.

    def pause(self, names: Sequence[str]) -> None:
        """Members of groups, all of each: they pause at the next round."""
        self._tell(lambda t: self._groups.pause(t, names))

    def not_to_pause(self, name: str) -> bool:
        """It is not to any more. False: it has been sent to."""
        waited = self._groups.is_to_pause(name)
        self._tell(lambda t: self._groups.not_to_pause(t, [name]))
        return waited

    def _waits(self, name: str, what: Literal["prepared", "suspended", "restored"]) -> None:
        match what:
            case "prepared":
                self._tell(lambda t: self._groups.prepared(t, name))
            case "suspended":
                self._tell(lambda t: self._groups.suspended(t, name))
            case "restored":
                self._tell(lambda _: self._resumptions.restored(name))

    def resumed_with(self, name: str) -> set[str]:
        return self._resumptions.members(name)

    def not_suspended(self, process: Member, why: str) -> None:
        """If it is to be with others."""
        self._tell(lambda t: self._groups.refuses(t, process.row.id, why))

    def not_resumed(self, process: Member, why: str) -> None:
        name = process.row.id
        if members := self._resumptions.members(name):
            self._tell(lambda _: self._resumptions.failed(name, why))
            self._tell(lambda t: self._groups.forget(t, members))

    def look_who_is_left_behind(self) -> None:
        """Of a group only some are suspended: a daemon was lost, or a node was not in reach, when that was decided, or
        that they are resumed. All of them are recovered. Who waits for the decision gets it once more."""
        if not self._opened:
            return
        left = [
            one for one in self._own()
            if one.suspended_at() and not one.resumes and (one.state == "suspended" or one.leaving)
        ]  # fmt: skip
        asleep = {one.suspended_at() for one in left if one.leaving != "waits"}
        awake = {at: self._awake(at) for at in {one.suspended_at() for one in left}}
        unknown = any(self._groups.fate_of(one.row.id) is None for found in awake.values() for one in found)
        if self._wait_for_those_awake(unknown=unknown):
            return
        for process in left:
            others = [one for one in awake[process.suspended_at()] if one.row.uid == process.row.uid]
            known = [one.row.id for one in others if self._groups.fate_of(one.row.id) is not None]
            if process.leaving == "waits":
                self._decide_again(process, all_are=process.suspended_at() in asleep and not others)
            elif known and process.row.id not in self._waking:
                self._wake_up(process, known[0])
        for process in [one for one in left if one.row.id in self._waking and one.state == "suspended"]:
            self._waking.discard(process.row.id)
            process.wake("its group was suspended or resumed, and not all of it")

    def _awake(self, round: int) -> list[Member]:
        """They have gone on from there."""
        return [
            one for one in self._own()
            if one.grouped and one.state in ("running", "recovering") and not one.leaving and one.rounds()[1] == round
        ]  # fmt: skip

    def _own(self) -> Iterator[Member]:
        return (one for one in self._processes.values() if self._leads or one.job.nodes is None)

    def _wait_for_those_awake(self, *, unknown: bool) -> bool:
        """What they are members of their servers say in a moment."""
        if self._apart is not None:
            self._apart.cancel()
            self._apart = None
        if not unknown:
            self._apart_since = 0
            return False
        self._apart_since = self._apart_since or now()
        if now() - self._apart_since > SETTLE * 1e9:
            return False
        self._apart = self._loop.call_later(LOOK_AT_ROUNDS, self.look_who_is_left_behind)
        return True

    def _decide_again(self, process: Member, *, all_are: bool) -> None:
        """It stands suspended, and what this daemon, or an earlier one, has decided may not have reached it."""
        name = process.row.id
        if self._groups.is_to_stand(name):
            return  # nothing is decided yet
        if all_are:
            process.tell(v.GroupSuspended(t=now()))
            self._tell(lambda t: self._groups.forget(t, [name]))
        else:
            process.tell(v.GroupRefuses(t=now(), text="a daemon was started again while the ranks were suspended"))

    def _wake_up(self, process: Member, other: str) -> None:
        """From now on nothing happens without it."""
        logger.warning("a rank is suspended, and others are not", process=process.row.id[:12])
        self._waking.add(process.row.id)
        self._tell(lambda t: self._groups.woken(t, _who(process), other))

    def close(self) -> None:
        self._standby_memory.remove(self)
        for timer in (self._timer, self._opening, self._looking, self._apart):
            if timer is not None:
                timer.cancel()
        self._comparisons.close()

    # --- what is done ------------------------------------------------------------------------------------------------

    def _tell(self, event: Callable[[int], list[g.Instruction]]) -> None:
        """Events that come of carrying out others wait their turn."""
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._events:
                self._carry_out(self._events.popleft()(now()))
        finally:
            self._busy = False
        self._set_timer()

    def _carry_out(self, instructions: Iterable[g.Instruction]) -> None:
        for instruction in instructions:
            if (process := self._processes.get(instruction.process)) is not None:
                self._do(process, instruction)

    def _do(self, process: Member, instruction: g.Instruction) -> None:
        self.history.instructed(now(), instruction)
        match instruction:
            case g.Hold(round=number, same_place=same):
                self._comparisons.holds(number, same)
            case g.Take(round=number):
                self._comparisons.takes(process.row.id, number)
            case _:
                pass
        match instruction:
            case p.Prepare(server=server, attempt=attempt, name=name):
                process.prepare_communicator(server, attempt, name)
            case p.Forget(server=server, attempt=attempt):
                process.forget_communicator(server, attempt)
                self._note_made(process, server)
            case p.Made(server=number, attempt=attempt, processes=of):
                about = {"process": process.row.id[:12], "server": number, "attempt": attempt}
                logger.info(f"a communicator of {of} is made ahead", **about)
                self._note_made(process, number)
            case p.Unready() | g.Stays(changed=True):
                pass  # it is tried once more after the next snapshot
            case g.Stays(reason=reason):
                self._stays(process, reason)
            case g.Settled():
                self._settled(process)
            case g.Tie(on=on):
                process.tell(e.Grouped(t=now(), on=on))
            case g.Stop(round=number, counts=counts, behind=behind):
                more = {} if behind is None else {"behind": behind}
                process.send_active(m.pack("group_stop", round=number, counts=dict(counts), **more))
            case g.Hold(round=number, gone=gone, suspends=suspends):
                more = {"suspends": True} if suspends else {}
                process.send_active(m.pack("group_hold", round=number, gone=list(gone), **more))
            case g.Take(round=number, suspends=True):
                process.tell(v.GroupSuspends(t=now()))
                process.send_active(m.pack("group_take", round=number, suspends=True))
            case g.Take(round=number, pauses=True):
                process.send_active(m.pack("group_take", round=number, pauses=True))
            case g.NotSuspended(reason=reason):
                process.tell(v.GroupRefuses(t=now(), text=reason))
            case g.AllSuspended():
                process.tell(v.GroupSuspended(t=now()))
            case LetIn():
                process.tell(v.GroupResumes(t=now(), gone=self._groups.lacking(process.row.id)))
            case NotResumed(reason=reason):
                process.tell(v.GroupRefuses(t=now(), text=reason))
            case g.Take(round=number, moves=moves, leaves=leaves, communicators=communicators):
                fields = {"moves": True, "leaves": leaves, "communicators": communicators} if moves else {}
                if leaves:
                    self._end_handover(process)
                    self._left.add(process.row.id)
                    process.leaves_with(communicators)
                    self._carry_out_ahead(self._prepared.moved(process.row.id, communicators))
                process.send_active(m.pack("group_take", round=number, **fields))
            case g.Continue(round=number):
                process.send_active(m.pack("group_continue", round=number))
            case g.Resolve(round=number):
                decided = any(one.rounds()[1] == number for one in self._processes.values())
                logger.info("a round of an earlier daemon", process=process.row.id[:12], round=number, decided=decided)
                if decided and any(one.renewed() == number for one in self._processes.values()):
                    why = "a rank was moving when the daemon was lost"
                    self._tell(lambda t: self._groups.broken(t, process.row.id, why))
                    process.tell(e.GroupLost(t=now(), reason=why))
                    return
                process.send_active(m.pack("group_take" if decided else "group_continue", round=number))
            case g.Break(reason=reason):
                process.tell(e.GroupLost(t=now(), reason=reason))
            case g.Hung(reason=reason):
                process.tell(e.GroupHung(t=now(), reason=reason))
            case g.Hopeless(reason=reason):
                process.tell(e.GroupHopeless(t=now(), reason=reason))
            case g.Recover(members=members):
                self._recover(members)
            case g.Doubt(process=doubting, name=name):
                self._hear_all(lambda: self._tell(lambda t: self._groups.heard(t, doubting, name)))
            case g.CommunicatorLost(name=name):
                process.send_active(m.pack("communicator_lost", name=name))
            case g.Note(text=text):
                logger.warning("a group recovers", process=process.row.id[:12], why=text)
                near = process if isinstance(process, Process) else next(self._near(), None)
                if near is not None:
                    self._job_log.line(near.job, text, source="xmigd", level="warning", process=near.row.id)

    def _recover(self, members: Mapping[str, tuple[str, ...]]) -> None:
        self._meetings.forget_of(members)
        present = {name: self._processes[name] for name in members if name in self._processes}
        if len(members) > 1 and any(process.forsaken() for process in present.values()):
            why = "a rank's journal was full, and it took a snapshot without the others, which none of all followed"
            for process in present.values():
                process.tell(e.GroupHopeless(t=now(), reason=why))
            return
        decided = max((process.rounds()[1] for process in present.values()), default=0)
        logger.info("a group goes on", members=len(present), round=decided)
        prepared = self._prepared.usable({name: process.active for name, process in present.items()})
        for name, process in present.items():
            process.tell(e.GroupGo(t=now(), decided=decided, gone=members[name], communicators=prepared[name]))
        self._standby_memory.count()

    def _settled(self, process: Member) -> None:
        """What the snapshot has, standbys can make now."""
        whole = self._groups.whole(process.row.id)
        ranks = {one for processes in whole.values() for one in processes}
        if self._may_begin():  # or some would wait for those of a node that is not in reach
            present = {one: self._processes[one] for one in ranks if one in self._processes}
            standbys = {name: one.warm_standby for name, one in present.items()}
            bounds = {name: self.standby_bounds.get(one.node, 0) for name, one in present.items()}
            self._carry_out_ahead(self._prepared.settled(now(), whole, standbys, bounds))
        self.look_at_handovers()
        members = self._group_of(process)
        self._copy_unique(members)
        near = [one for one in members if isinstance(one, Process)]
        if len(near) == len(members):
            self._comparisons.settled(near)
        for one in near:
            if (finding := self._restoring.pop(one.row.id, None)) is not None:
                self._restore(one, finding)

    def _group_of(self, process: Member) -> list[Member]:
        """Living members, itself first."""
        names = [process.row.id, *self._groups.others(process.row.id)]
        return [self._processes[one] for one in names if one in self._processes]

    def _communicator_prepared(self, process: Member, server: Sender, message: m.CommunicatorPrepared) -> None:
        name, number = process.row.id, server.number
        if message.why:
            logger.info("a communicator cannot be made ahead", process=name[:12], server=number, why=message.why)
        self._carry_out_ahead(
            self._prepared.reported(now(), name, number, message.attempt, message.device_bytes, message.why)
        )
        if message.why:
            self._note_made(process, number)
        self.look_at_handovers()

    # Of a device of this node: see StandbyMemory.

    def bytes_on(self, device: Mapping[p.Server, int]) -> int:
        return self._prepared.bytes_on(device)

    def spare(self, t: int, device: Mapping[p.Server, int]) -> p.Spare:
        return self._prepared.spare(t, device)

    def give_up(self, t: int, device: Mapping[p.Server, int]) -> None:
        self._carry_out_ahead(self._prepared.give_up(t, device))
        self.look_at_handovers()

    def without_standbys(self, processes: Iterable[Member]) -> None:
        """Of other nodes. What these have made ahead is of no use: they have forgotten it, or the connections may have
        ended."""
        for process in processes:
            self._carry_out_ahead(self._prepared.without(process.row.id))
        self.look_at_handovers()

    def look_at_handovers(self) -> None:
        """What they wait for may have changed."""
        for moving in [self._processes[one] for one in self._handovers if one in self._processes]:
            self._look_at_move(moving)

    # --- a rank moves ------------------------------------------------------------------------------------------------

    def _look_at_move(self, process: Member) -> None:
        """Its target and the servers of the others make its communicators beside those that they use."""
        if process.target is None:
            return
        name = process.row.id
        whole = {key: ranks for key, ranks in self._groups.whole(name).items() if name in ranks}
        ranks = {one for processes in whole.values() for one in processes if one in self._processes}
        servers = {one: self._processes[one].active for one in ranks} | {name: process.target}
        reaches_all = self._may_begin()  # or some would wait for those of a node that is not in reach
        if reaches_all:
            self._carry_out_ahead(self._prepared.want_move(now(), name, whole, servers))
        if name not in self._handovers or self._another_moves(name):
            return
        ready = self._prepared.move_is_ready(name, whole, servers) if reaches_all else None
        if ready is None:
            if self._handovers[name].cancelled():
                self._await_communicators(process)
            self._tell(lambda t: self._groups.not_yet(t, name))
            return
        self._handovers[name].cancel()
        self._tell(lambda t: self._groups.leave(t, name, whole, ready, LEAVE_PATIENCE))

    def _another_moves(self, name: str) -> bool:
        """A rank of its group, which it waits for: what it goes on with it makes with that one's next server."""
        return self._groups.another_leaves(name) or not self._left.isdisjoint(self._groups.others(name))

    def _begin_handover(self, process: Member) -> None:
        """It does so at a round, and everything that the others need then is prepared first."""
        self._await_communicators(process)
        self._look_at_move(process)

    def _await_communicators(self, process: Member) -> None:
        why = "its communicators were not made in time"
        self._handovers[process.row.id] = self._loop.call_later(PREPARE_PATIENCE, self._stays, process, why)

    def _end_handover(self, process: Member) -> bool:
        """Was one under way?"""
        wait = self._handovers.pop(process.row.id, None)
        if wait is not None:
            wait.cancel()
        return wait is not None

    def _stays(self, process: Member, why: str) -> None:
        active = process.active
        if self._end_handover(process) and active is not None:
            process.tell(v.HandoverFailed(t=now(), server=active, text=why))

    def move_over(self, process: Member, why: str) -> None:
        name = process.row.id
        self._left.discard(name)
        self._tell(lambda t: self._groups.stay(t, name, why))
        self._stays(process, why)
        self._carry_out_ahead(self._prepared.move_over(name))
        self.look_at_handovers()  # of others, which have prepared theirs with the server that it had

    def _carry_out_ahead(self, instructions: Iterable[g.Instruction]) -> None:
        """Of communicators that are made ahead. What is given up is no longer counted before it is free: otherwise a
        program could count it twice."""
        self._standby_memory.count()
        self._carry_out(instructions)

    def _note_made(self, process: Member, number: int) -> None:
        name = process.row.id
        process.note_made(number, self._prepared.made_by(name, number), self._prepared.bytes_of(name, number))

    # --- replicas ----------------------------------------------------------------------------------------------------

    def watched(self, process: str) -> list[int]:
        """Addresses at which its memory is compared with that of other ranks."""
        return self._comparisons.watched(process)

    def _compared(self, compared: Compared, members: Sequence[str]) -> None:
        """What of it is to be known, and what is to be done."""
        seen = compared.seen
        ranks = {one: self._groups.rank_of(one) for one in members}
        self.history.compared(compared.at, members, compared.round, seen.chunks, seen.watched)
        for name in seen.unlike:
            about = {"process": name[:12], "rank": ranks[name], "round": compared.round}
            logger.info("a rank does not do the same as its replicas any more", **about)
        for finding in seen.findings:
            self._found(compared, finding, ranks)

    def _found(self, compared: Compared, finding: Finding, ranks: Mapping[str, int]) -> None:
        suspects = [self._processes[one] for one in finding.suspects if one in self._processes]
        if not suspects:
            return
        policy = suspects[0].job.replica_policy or self._replica_policy
        difference = Difference(
            t=compared.at, round=compared.round, policy=policy, addresses=finding.addresses,
            suspects=tuple(sorted((ranks[one], one, compared.snapshots[one]) for one in finding.suspects)),
            equal=tuple(sorted(ranks[one] for one in finding.equal)),
        )  # fmt: skip
        text = difference.text
        self.history.differs(difference)
        for process in suspects:
            logger.error("a rank differs from its replicas", process=process.row.id[:12], why=text)
            self._job_log.line(process.job, text, source="xmigd", level="error", process=process.row.id)
            process.tell(e.ReplicaDiffers(t=now(), reason=text))
        if policy == "restore" and finding.equal:
            self._restoring[finding.suspects[0]] = finding
        if policy == "stop":
            for job in {one.job.id: one.job for one in suspects}.values():
                self._stop_job(job, f"{text}; the last group snapshot is round {compared.round}")

    def _restore(self, process: Process, finding: Finding) -> None:
        """From the majority. All have the snapshots of one round, and none is under way: it is looked at once more what
        they hold, and all go back there."""
        found = (self._processes.get(one) for one in finding.equal)
        equal = [one for one in found if isinstance(one, Process)]
        chunks = self._comparisons.right(process, equal, finding.addresses)
        rank = self._groups.rank_of(process.row.id)
        if not chunks or process.last_snapshot is None:
            text = f"memory of rank {rank} that differed from its replicas is not restored: they hold the same no more"
            self._job_log.line(process.job, text, source="xmigd", level="warning", process=process.row.id)
            return
        process.differing = m.Differing(process.last_snapshot.number, chunks)
        why = f"memory of rank {rank} differs from its replicas, and is restored from these"
        logger.warning("memory is restored from replicas", process=process.row.id[:12], chunks=len(chunks))
        self._tell(lambda t: self._groups.differs(t, process.row.id, why))

    # --- a rank's device was lost ------------------------------------------------------------------------------------

    def _name_replicas(self) -> None:
        """To whoever has lost memory, once all other ranks stand at the round or have lost some, too: from then on no
        shadow changes until all go on."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        wanting = {one: number for one, number in self._wanting.items() if self._is_active(one, number)}
        for name, number in list(wanting.items()) if self._opened else ():  # before, some may be missing
            others = [self._processes[one] for one in self._groups.others(name) if one in self._processes]
            awaited = [
                one for one in others if one.row.id not in wanting and not (one.standing and one.rounds()[0] == 0)
            ]
            for other in awaited:
                other.look()
            if not awaited:
                del self._wanting[name]
                sources = [other for other in others if other.row.id not in wanting]
                self._processes[name].name_replicas(number, sources)
        self._wanting = {one: number for one, number in self._wanting.items() if one in wanting}
        if self._wanting:
            self._looking = self._loop.call_later(LOOK_AT_ROUNDS, self._name_replicas)

    def _is_active(self, name: str, number: int) -> bool:
        return name in self._processes and self._processes[name].active == number

    def _open(self) -> None:
        self._opened = True
        self._begin_later(self._processes.values())
        self.look_who_is_left_behind()
        self._standby_memory.count()  # what an earlier daemon has counted there is not known here
        marked = [process.row.id for process in self._processes.values() if any(process.rounds())]
        self._tell(lambda t: self._groups.open(t, marked))

    def _near(self) -> Iterator[Process]:
        """Processes of this node."""
        return (one for one in self._processes.values() if isinstance(one, Process))

    def _meet(self, process: Member, server: Sender, message: m.Meet) -> None:
        """A rank of a communicator looks for the others."""
        if server.number == process.active and not message.answer:
            self.history.meets(now(), _who(process), message)
        offer = Offer(message.meeting, message.rank, message.ranks, message.offer, message.answer)
        answers = self._meetings.attend(now(), process.row.id, server.number, process.row.uid, offer)
        self.history.answered(now(), process.row.id, answers)
        for answer in answers:
            if (other := self._processes.get(answer.process)) is not None:
                other.met(answer)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due = self._groups.due
        self._timer = None if due is None else self._loop.call_later(max(0, due - now()) / 1e9, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._tell(self._groups.wake)


def _who(process: Member) -> Who:
    return Who(process.row.id, process.row.uid, process.job.id)
