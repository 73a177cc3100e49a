"""What each rank of a job does and waits for, and what it did before that. Pure.

It observes: it hears what servers report, what their processes' machines and the machine of groups make of it, in that
order, and decides nothing. What a rank does is a list of changes; whom it waited for is noted when that wait is over.

Invariants: a rank's changes are in the order of time; an open round has members that have not come to its end; what is
kept is bounded, whatever programs do: of each job changes, rounds, ended communicators; and jobs that are over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from xmigd.groups import instructions as g
from xmigd.groups.meetings import Answer
from xmigd.groups.patience import HOLD_PATIENCE, PATIENCE
from xmigd.groups.ties import Key, State, Who
from xmigd.ipc import messages as m
from xmigd.process import events as e
from xmigd.process import migration_events as v
from xmigd.records import ReplicaPolicy

MOST_CHANGES = 4096  # of a job, divided among its ranks
LEAST_CHANGES = 16  # of a rank, however many there are
MOST_ROUNDS = 100  # of a job
MOST_COMMUNICATORS = 32  # of a job, that have ended
MOST_DIFFERENCES = 32  # of a job, that were found between replicas
MOST_ENDED = 1024  # ranks of a job whose programs have exited
MOST_OVER = 16  # jobs none of whose ranks lives
UNHEARD = 3_000_000_000  # ns after which a rank has given up looking for the others; servers repeat that each second
NAMED = 8  # ranks in a sentence

# stopping: it executes until it can stop for a round. stopped: it waits for the others to do so. preparing: its device
# comes to rest, memory is hashed. holding: it waits for the others' preparations. taking: that is decided.
# ending: its server is lost, or killed because another rank's is. waiting: that has gone, and others have not.
# moving: it hands over to a server on another device.
# restoring: another server has it; it makes its communicators. joining: likewise, in the middle of a program.
Activity = Literal[
    "running", "joining", "stopping", "stopped", "preparing", "holding", "taking", "ending", "waiting", "restoring",
    "replaying", "moving", "suspended", "lost", "ended",
]  # fmt: skip
ACTIVITIES: tuple[Activity, ...] = get_args(Activity)
IN_ROUNDS = ("stopping", "stopped", "preparing", "holding", "taking")
IN_RECOVERIES = ("ending", "waiting", "restoring", "replaying")


@dataclass(slots=True)
class Change:
    t: int
    activity: Activity
    round: int = 0
    waited_for: int | None = None  # the rank for which it waited longest, once that is known


@dataclass(slots=True)
class Meeting:
    heard: int
    missing: str = ""  # who has not come


@dataclass(slots=True, eq=False)
class Rank:
    who: Who
    rank: int  # in the largest of its communicators
    size: int  # of that
    changes: deque[Change]
    has: dict[Key, set[int]] = field(default_factory=dict)  # its ranks of each communicator that is not past
    meets: dict[str, Meeting] = field(default_factory=dict)  # communicators that are being made
    over: bool = False

    @property
    def activity(self) -> Activity:
        return self.changes[-1].activity


@dataclass(slots=True, eq=False)
class Communicator:
    name: str
    size: int
    made: int
    ranks: dict[int, str] = field(default_factory=dict)  # processes
    joined: set[int] = field(default_factory=set)
    ended: int | None = None

    @property
    def state(self) -> Literal["joining", "whole", "incomplete", "ended"]:
        if self.ended is not None:
            return "ended"
        if len(self.joined) == self.size:
            return "whole"
        return "joining" if len(self.ranks) < self.size else "incomplete"


@dataclass(slots=True, eq=False)
class Round:
    """A group snapshot, or an attempt at one."""

    number: int
    began: int
    members: dict[str, int] = field(default_factory=dict)  # ranks
    missing: set[str] = field(default_factory=set)  # who has not come to its end
    behind: set[str] = field(default_factory=set)  # who had to go on after it had stopped
    first_stopped: int | None = None
    last_stopped: str = ""
    fitted: int | None = None
    same_place: bool | None = None
    last_held: str = ""
    decided: int | None = None
    committed: int | None = None
    busy: str = ""
    given_up: str = ""  # why


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Memory of a rank is not what others have there, which had the same."""

    t: int
    round: int
    policy: ReplicaPolicy
    suspects: tuple[tuple[int, str, int], ...]  # rank, process, number of its snapshot; two: it is one of them
    equal: tuple[int, ...]  # ranks
    addresses: tuple[int, ...]  # of chunks

    @property
    def text(self) -> str:
        chunks = f"the chunk of 2 MiB at {self.addresses[0]:#x}"
        if (more := len(self.addresses) - 1) > 0:
            chunks += f" and {more} more"
        if len(self.suspects) > 1:
            which = " or ".join(f"rank {rank} (snapshot {snapshot})" for rank, _, snapshot in self.suspects)
            return (
                f"silent corruption in {which}: {chunks} differ{'' if more > 0 else 's'}, and did not before; with two "
                "replicas it is not known which of them is right"
            )
        rank, _, snapshot = self.suspects[0]
        return (
            f"silent corruption in rank {rank}: {chunks} of its snapshot {snapshot} differ{'' if more > 0 else 's'} "
            f"from {_named(self.equal)}, which {'are' if len(self.equal) > 1 else 'is'} as the majority was before"
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of the ranks of a group, the last one."""

    t: int
    round: int
    chunks: int  # addresses
    watched: int  # of these, where ranks are known to hold the same


@dataclass(slots=True, eq=False)
class _Job:
    ranks: dict[str, Rank] = field(default_factory=dict)
    rounds: deque[Round] = field(default_factory=lambda: deque(maxlen=MOST_ROUNDS))
    differences: deque[Difference] = field(default_factory=lambda: deque(maxlen=MOST_DIFFERENCES))
    comparison: Comparison | None = None
    ended: deque[Communicator] = field(default_factory=lambda: deque(maxlen=MOST_COMMUNICATORS))


class History:
    """Of all jobs of this daemon's time."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Job] = {}
        self._ranks: dict[str, Rank] = {}  # by process
        self._communicators: dict[Key, Communicator] = {}
        self._rounds: dict[int, Round] = {}  # that are under way
        self._over: dict[str, None] = {}  # jobs, the one that ended first first

    # --- questions ------------------------------------------------------------------------------------------------

    def ranks_of(self, t: int, job: str) -> list[Rank]:
        """Its processes, and those of other jobs that share a communicator with them, by rank; of one rank that several
        processes had, who lives comes first, then the newest."""
        found = self._jobs.get(job)
        if found is None:
            return []
        ranks = dict(found.ranks)
        todo, seen = list(found.ranks.values()), set[Key]()
        while todo:
            for key in todo.pop().has.keys() - seen:
                seen.add(key)
                for process in self._communicators[key].ranks.values():
                    if process not in ranks and (other := self._ranks.get(process)) is not None:
                        ranks[process] = other
                        todo.append(other)
        for one in ranks.values():
            self._forget_meetings(t, one)
        newest_first = reversed(ranks.values())
        return sorted(newest_first, key=lambda one: (one.rank, one.over))

    def communicators_of(self, job: str) -> list[Communicator]:
        """Those that are there, the largest first, and then the last that have ended."""
        found = self._jobs.get(job)
        if found is None:
            return []
        keys = {key for rank in found.ranks.values() for key in rank.has}
        there = sorted((self._communicators[key] for key in keys), key=lambda one: (-one.size, one.made, one.name))
        return there + list(reversed(found.ended))

    def size_of(self, key: Key) -> int:
        """Of a communicator that a rank has."""
        return self._communicators[key].size

    def rounds_of(self, job: str) -> list[Round]:
        """Newest first."""
        found = self._jobs.get(job)
        return [] if found is None else list(reversed(found.rounds))

    def differences_of(self, job: str) -> list[Difference]:
        """Newest first."""
        found = self._jobs.get(job)
        return [] if found is None else list(reversed(found.differences))

    def comparison_of(self, job: str) -> Comparison | None:
        found = self._jobs.get(job)
        return None if found is None else found.comparison

    def waits_for(self, ranks: Iterable[Rank]) -> dict[str, str]:
        """By process, what those who wait now wait for."""
        missing: dict[tuple[int, Activity], str] = {}  # of a round, by what the others do
        found = {}
        for one in ranks:
            last = one.changes[-1]
            match last.activity:
                case "stopped" | "holding" if (round := self._rounds.get(last.round)) is not None:
                    if (round.number, last.activity) not in missing:
                        missing[round.number, last.activity] = _named(self._not_yet(round, last.activity))
                    what = "to stop" if last.activity == "stopped" else "to prepare the snapshot"
                    found[one.who.process] = f"{missing[round.number, last.activity]} {what}"
                case "waiting":
                    ending = [each.rank for each in self._tied(one) if each.activity == "ending"]
                    found[one.who.process] = f"the server of {_named(ending)} to end"
                case "joining" | "restoring" | "replaying" if one.meets:
                    absent = next((each.missing for each in one.meets.values() if each.missing), "")
                    found[one.who.process] = f"rank {absent} of a communicator" if absent else "a communicator"
                case _:
                    pass
        return found

    def _not_yet(self, round: Round, activity: Activity) -> list[int]:
        """Members that do not stand like this."""
        there = (self._ranks[one] for one in round.members if one in self._ranks)
        return [one.rank for one in there if (one.activity, one.changes[-1].round) != (activity, round.number)]

    def _tied(self, rank: Rank) -> list[Rank]:
        found = {process for key in rank.has for process in self._communicators[key].ranks.values()}
        return [self._ranks[process] for process in found if process in self._ranks]

    # --- what servers report ---------------------------------------------------------------------------------------

    def reported(self, t: int, who: Who, message: m.RankMessage) -> None:
        match message:
            case m.Communicator(name=name, rank=rank, ranks=ranks, state=state):
                self._communicator(t, who, (who.uid, name), rank, ranks, state)
            case m.GroupStopped() | m.GroupHeld() if self._has_lost_its_server(who.process):
                pass  # the server had sent it before it was killed
            case m.GroupStopped(round=number):
                if (round := self._rounds.get(number)) is not None:
                    round.first_stopped = round.first_stopped or t
                    round.last_stopped = who.process
                self._change(t, who.process, "stopped", number)
            case m.GroupHeld(round=number):
                if (round := self._rounds.get(number)) is not None:
                    round.last_held = who.process
                self._change(t, who.process, "holding", number)
            case m.GroupBusy(round=number, why=why):
                if (round := self._rounds.get(number)) is not None and who.process in self._ranks:
                    round.busy = f"rank {self._ranks[who.process].rank} could not: {why}"
            case _:
                pass

    def meets(self, t: int, who: Who, message: m.Meet) -> None:
        """A rank of a communicator looks for the others."""
        rank = self._member(t, who, message.rank, message.ranks)
        rank.meets.setdefault(message.meeting, Meeting(t)).heard = t
        if rank.activity == "running":
            self._change(t, who.process, "joining")

    def _forget_meetings(self, t: int, rank: Rank) -> None:
        late = [name for name, one in rank.meets.items() if t - one.heard > UNHEARD]
        for name in late:
            heard = rank.meets.pop(name).heard
            if rank.activity == "joining" and not rank.meets:
                self._change(heard, rank.who.process, "running")

    def answered(self, t: int, by: str, answers: Sequence[Answer]) -> None:
        """Where ranks meet, to what `by` reported."""
        for answer in answers:
            rank = self._ranks.get(answer.process)
            if rank is None or answer.meeting not in rank.meets:
                continue
            if answer.missing:
                rank.meets[answer.meeting].missing = answer.missing
                continue
            del rank.meets[answer.meeting]
            if rank.activity == "joining" and not rank.meets:
                last = next((one.rank for one in answers if one.process == by), None)
                rank.changes[-1].waited_for = last if answer.process != by else None
                self._change(t, answer.process, "running")

    def committed(self, t: int, process: str, number: int) -> None:
        rank = self._ranks.get(process)
        if rank is not None and rank.changes[-1].round == number and rank.activity != "moving":
            self._goes_on(t, rank)
        if (round := self._rounds.get(number)) is not None:
            round.missing.discard(process)
            if not round.missing:
                round.committed = t
                del self._rounds[number]

    # --- replicas --------------------------------------------------------------------------------------------------

    def compared(self, t: int, members: Iterable[str], round: int, chunks: int, watched: int) -> None:
        """What the ranks of a group hold."""
        for job in self._jobs_of(members):
            job.comparison = Comparison(t, round, chunks, watched)

    def differs(self, difference: Difference) -> None:
        for job in self._jobs_of(process for _, process, _ in difference.suspects):
            job.differences.append(difference)

    def _jobs_of(self, processes: Iterable[str]) -> list[_Job]:
        names = {self._ranks[one].who.job for one in processes if one in self._ranks}
        return [self._jobs[one] for one in names if one in self._jobs]

    # --- what is done about it -------------------------------------------------------------------------------------

    def instructed(self, t: int, instruction: g.Instruction) -> None:
        """By the machine of groups."""
        process = instruction.process
        match instruction:
            case g.Stop(round=number, counts=counts):
                if (rank := self._ranks.get(process)) is not None:
                    round = self._rounds.get(number) or self._begin(t, number)
                    self._enter(round, rank)
                    if counts:
                        round.behind.add(process)
                    if rank.activity not in IN_RECOVERIES:  # it stops when it has come through
                        self._change(t, process, "stopping", number)
            case g.Hold(round=number, same_place=same):
                if (there := self._rounds.get(number)) is not None:
                    there.fitted = there.fitted or t
                    there.same_place = same
                    self._waited(process, "stopped", there.last_stopped)
                self._change(t, process, "preparing", number)
            case g.Take(round=number, leaves=leaves):
                if (there := self._rounds.get(number)) is not None:
                    there.decided = there.decided or t
                    self._waited(process, "holding", there.last_held)
                self._change(t, process, "moving" if leaves else "taking", number)
            case g.Continue(round=number):
                if (there := self._rounds.get(number)) is not None:
                    self._give_up(there, self._why(t, there))
                if (rank := self._ranks.get(process)) is not None and rank.changes[-1].round == number:
                    self._goes_on(t, rank)
            case g.Resolve(round=number):
                if (rank := self._ranks.get(process)) is not None and rank.changes[-1].round == number:
                    self._goes_on(t, rank)
            case g.Break() | g.Hung():
                self._server_lost(t, process)
            case g.Recover(members=members):
                waited = [one for each in members if (one := self._ranks.get(each)) is not None]
                last = max(waited, key=lambda one: one.changes[-1].t, default=None)
                for one in waited:
                    self._waited(one.who.process, "waiting", "" if last is None else last.who.process)
                    self._change(t, one.who.process, "restoring")
            case _:
                pass

    def changed(self, t: int, process: str, instruction: e.Instruction) -> None:
        """By the machine of a process."""
        rank = self._ranks.get(process)
        if rank is None:
            return
        match instruction:
            case e.GroupBroken():
                self._server_lost(t, process)
            case e.AwaitGroup():
                self._change(t, process, "waiting")
            case e.SaveRecovery(record):
                if record.outcome == "resumed":
                    self._resumed(t, rank, record)
            case e.SaveState(state="recovering") if rank.activity not in IN_RECOVERIES:
                self._change(t, process, "restoring")  # it is tied to nobody any more
            case e.SaveState(state="running") if rank.activity in (*IN_RECOVERIES, "moving", "suspended"):
                self._change(t, process, "running")
            case v.SaveMigration(record) if rank.activity == "moving" and record.state != "running":
                self._change(t, process, "running")
            case e.SaveState(state="suspended"):
                self._change(t, process, "suspended")
            case e.SaveState(state="losing" | "lost"):
                self._leave_round(rank, "was lost")
                self._change(t, process, "lost")
            case e.SaveState(state="draining" | "ended") if rank.activity != "lost":
                self._leave_round(rank, "has exited")
                self._change(t, process, "ended")
            case _:
                pass

    def finished(self, t: int, process: str) -> None:
        """Nothing is left of it."""
        rank = self._ranks.get(process)
        if rank is None:
            return
        rank.over = True
        rank.meets.clear()
        for key, numbers in list(rank.has.items()):
            for number in numbers:
                self._communicator_left(t, key, number)
        job = self._jobs[rank.who.job]
        ended = [one for one in job.ranks.values() if one.over]
        if len(ended) > MOST_ENDED:
            self._forget(job, ended[0])
        if len(ended) == len(job.ranks):
            self._over[rank.who.job] = None
        while len(self._over) > MOST_OVER:
            oldest = next(iter(self._over))
            del self._over[oldest]
            for one in list(self._jobs[oldest].ranks.values()):
                self._forget(self._jobs[oldest], one)
            del self._jobs[oldest]

    # --- small parts -----------------------------------------------------------------------------------------------

    def _member(self, t: int, who: Who, rank: int, size: int) -> Rank:
        found = self._ranks.get(who.process)
        if found is None:
            job = self._jobs.setdefault(who.job, _Job())
            found = Rank(who, rank, size, deque([Change(t, "running")]))
            self._ranks[who.process] = job.ranks[who.process] = found
            self._over.pop(who.job, None)
        elif size > found.size:
            found.rank, found.size = rank, size
        return found

    def _forget(self, job: _Job, rank: Rank) -> None:
        del job.ranks[rank.who.process]
        del self._ranks[rank.who.process]

    def _communicator(self, t: int, who: Who, key: Key, rank: int, size: int, state: State) -> None:
        found = self._communicators.get(key)
        if state == "past":
            if found is not None and found.ranks.get(rank) == who.process:
                has = self._ranks[who.process].has
                has.get(key, set()).discard(rank)
                if not has.get(key):
                    has.pop(key, None)
                self._communicator_left(t, key, rank)
            return
        if found is None:
            found = self._communicators[key] = Communicator(key[1], size, t)
        if not rank < found.size == size or found.ranks.setdefault(rank, who.process) != who.process:
            return
        self._member(t, who, rank, size).has.setdefault(key, set()).add(rank)
        if state == "joined":
            found.joined.add(rank)
        else:
            self._communicator_left(t, key, rank)

    def _communicator_left(self, t: int, key: Key, rank: int) -> None:
        if (found := self._communicators.get(key)) is not None:
            found.joined.discard(rank)
            self._look_whether_ended(t, key)

    def _look_whether_ended(self, t: int, key: Key) -> None:
        """Nobody has it: all had it, or who had it is gone."""
        found = self._communicators[key]
        there = [self._ranks[one] for one in found.ranks.values() if one in self._ranks]
        if found.joined or (len(found.ranks) < found.size and not all(one.over for one in there)):
            return
        found.ended = t
        del self._communicators[key]
        for rank in there:
            rank.has.pop(key, None)
        for job in {rank.who.job for rank in there}:
            self._jobs[job].ended.append(found)

    def _change(self, t: int, process: str, activity: Activity, round: int = 0) -> None:
        rank = self._ranks.get(process)
        if rank is None or rank.over:
            return
        last = rank.changes[-1]
        if (last.activity, last.round) == (activity, round):
            return
        rank.changes.append(Change(max(t, last.t), activity, round))
        most = max(LEAST_CHANGES, MOST_CHANGES // len(self._jobs[rank.who.job].ranks))
        while len(rank.changes) > most:
            rank.changes.popleft()

    def _goes_on(self, t: int, rank: Rank) -> None:
        self._change(t, rank.who.process, "joining" if rank.meets else "running")

    def _waited(self, process: str, activity: Activity, last: str) -> None:
        """What it waited for has come, from `last` as the last."""
        rank, other = self._ranks.get(process), self._ranks.get(last)
        if rank is not None and other is not None and rank is not other and rank.activity == activity:
            rank.changes[-1].waited_for = other.rank

    def _begin(self, t: int, number: int) -> Round:
        made = self._rounds[number] = Round(number, t)
        return made

    def _enter(self, round: Round, rank: Rank) -> None:
        job = self._jobs[rank.who.job]
        if not job.rounds or (job.rounds[-1] is not round and round not in job.rounds):
            job.rounds.append(round)
        round.members[rank.who.process] = rank.rank
        round.missing.add(rank.who.process)

    def _give_up(self, round: Round, why: str) -> None:
        round.given_up = why
        del self._rounds[round.number]

    def _why(self, t: int, round: Round) -> str:
        if round.busy:
            return round.busy
        holding = round.fitted is not None
        late = _named(self._not_yet(round, "holding" if holding else "stopped"))
        if holding and t - (round.fitted or t) >= HOLD_PATIENCE:
            return f"{late} had not prepared the snapshot after {HOLD_PATIENCE / 1e9:g} s"
        if not holding and t - round.began >= PATIENCE:
            return f"{late} had not come to where all can stop after {(t - round.began) / 1e6:.0f} ms"
        return "a communicator was made, or has ended"

    def _server_lost(self, t: int, process: str) -> None:
        if (rank := self._ranks.get(process)) is not None and rank.activity != "ending":
            rank.meets.clear()
            self._leave_round(rank, "lost its server")
            self._change(t, process, "ending")

    def _has_lost_its_server(self, process: str) -> bool:
        return process in self._ranks and self._ranks[process].activity in ("ending", "waiting")

    def _leave_round(self, rank: Rank, why: str) -> None:
        round = self._rounds.get(rank.changes[-1].round)
        if round is None:
            return
        if round.decided is None:
            self._give_up(round, f"rank {rank.rank} {why}")
            return
        round.missing.discard(rank.who.process)  # it is recovered from its memory, which is the state
        if not round.missing:
            del self._rounds[round.number]

    def _resumed(self, t: int, rank: Rank, record: e.RecoveryRecord) -> None:
        last, process = rank.changes[-1], rank.who.process
        if last.activity == "restoring" and record.restored is not None:
            if record.restored > last.t:
                self._change(record.restored, process, "replaying")
            else:
                last.activity = "replaying"
        if rank.activity in IN_RECOVERIES:
            self._change(record.resumed or t, process, "running")
            for round in self._rounds.values():
                if process in round.missing and round.fitted is None:
                    self._change(t, process, "stopping", round.number)


def _named(numbers: Iterable[int]) -> str:
    ranks = sorted(numbers)
    if not ranks:
        return "another rank"
    listed = ", ".join(map(str, ranks[:NAMED]))
    more = f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{more}"
