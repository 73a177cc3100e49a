"""Processes that communicators tie together: they take snapshots together, and recover together. Pure.

A *group* is a connected component: processes, tied by communicators that at least one living process has in its state.
Whoever has exited stays known as a member of its communicators for as long as somebody living has them.

Rounds: all living members stop between two records, right behind a collective where they can; those behind go on until
each communicator has seen the same number of operations on all its ranks, and each pair of ranks the same number of
sends and receives; those who are not as far behind the same collective as others go on once (decision 0052). Then all
prepare their snapshot, and once all have, each is sent `take`. That is the decision; a server writes it into its
journal before it overwrites anything, so it is known from the journals alone.

Recoveries: if one member's server is lost, all servers are killed, and once all members wait, all go on from the round
that was decided last.

Failures: a collective that fails is explained by the loss of a rank, which may be seen later. If no rank is lost, none
has left the communicator, and a connection has ended, it was the network between nodes: all are recovered like after a
loss, once all nodes are in reach again. Otherwise the program gets its error.

Hangs: a rank whose device waits for other ranks, and whose program waits for the device, says so when it has not got
further for long. That may be as it should be, as long as one rank does not: its program is about to do what the others
wait for. If all do, nothing that any of them waits for can happen any more, and they are recovered like after a loss.

Suspensions: all members are suspended with one round, once each has prepared what it can while its program runs. Who
stands suspended waits until all do: until then a loss is a loss of all, which are recovered and run. After that the
group is forgotten: nobody is there who could have a part in anything. Those who are resumed together say again what
they are members of (resumptions.py).

Invariants: a group has one round at a time, and none while it recovers; nobody is sent `take` in a round that not all
have prepared; all members go on at the same moment and from the same round; nothing is started before `open`, when
nobody can be missing any more whom an earlier daemon knew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from xmigd.groups.instructions import (
    AllSuspended,
    Break,
    CommunicatorLost,
    Continue,
    Doubt,
    Hold,
    Hopeless,
    Hung,
    Instruction,
    Note,
    NotSuspended,
    Recover,
    Resolve,
    Settled,
    Stays,
    Stop,
    Take,
    Tie,
)
from xmigd.groups.ties import Communicator, Fate, Key, Member, State, Ties, Who

GRACE = 60_000_000  # ns in which a rank may go on, so that it stops right behind a collective
PATIENCE = 50_000_000  # ns, from the first stop until all fit, at least: twice what it took lately, and twice as long
MOST_PATIENCE = 200_000_000  # after each time that it was not enough
LEAVE_PATIENCE = 300_000_000  # ns, likewise, of a round at which a rank leaves its server: it is wanted once
HOLD_PATIENCE = 2_000_000_000  # ns, until all have prepared: that hashes memory
SUSPEND_PATIENCE = 300_000_000_000  # ns, until all are suspended that are prepared for it, over several rounds:
SUSPEND_STOP_PATIENCE = 1_000_000_000  # ns, likewise PATIENCE
SUSPEND_HOLD_PATIENCE = 10_000_000_000  # ns, likewise HOLD_PATIENCE: as long as a device may take to come to rest
GATHER_PATIENCE = 5_000_000_000  # ns, until all members are to be suspended, if one is
NEVER = 1 << 62
# Where ranks do not come to the same place, they are sent on to it in so many rounds of so many.
TRIES, OF_ROUNDS = 3, 16
STUCK_PATIENCE = 2_000_000_000  # ns, that all ranks are stuck: whoever is no longer says so within a second
LOOK_AGAIN = 500_000_000  # ns: a collective may fail before the death that it failed of is seen
BETWEEN_ROUNDS = 10_000_000  # ns
FIRST_PAUSE = 100_000_000  # ns, after a round that was given up: it doubles each time
LAST_PAUSE = 2_000_000_000
FIRST_SHORT_PAUSE = 20_000_000  # ns, likewise, if a member refused before all stood still, which cost nothing
LAST_SHORT_PAUSE = 160_000_000

# --- what is known ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Failure:
    """Of a communicator, in the server of a process."""

    due: int  # when to look for its reason; NEVER: once all nodes are heard
    severed: bool = False  # a connection has ended
    heard: bool = False  # by all nodes


@dataclass(slots=True)
class _Round:
    number: int
    members: set[str]
    missing: set[str]  # whose answer is to come
    deadline: int
    suspends: bool = False
    holding: bool = False
    stopped: int | None = None  # when the first of them had
    counts: dict[str, Mapping[str, int]] = field(default_factory=dict)
    behind: dict[str, int | None] = field(default_factory=dict)  # launches and copies since a rank's last collective
    levelled: bool = False  # those with fewer of them have been sent on once


@dataclass(slots=True)
class _Leaving:
    """A rank hands over to another server at the next round."""

    process: str
    keys: frozenset[Key]  # its communicators
    communicators: Mapping[str, tuple[int, ...]]
    deadline: int


@dataclass(slots=True)
class _Suspending:
    deadline: int
    members: set[str] = field(default_factory=set)  # that are to be
    ready: set[str] = field(default_factory=set)  # of these


@dataclass(slots=True, eq=False)
class _Group:
    members: set[str] = field(default_factory=set)
    round: _Round | None = None
    decided: int = 0  # the round that is being committed
    committing: set[str] = field(default_factory=set)  # who has not reported its snapshot yet
    recovering: bool = False
    patience: int = PATIENCE
    pause: int = 0
    not_before: int = 0
    elsewhere: int = 0  # rounds in a row in which its ranks were not at the same place
    loose: bool = False  # a tie is gone: it may be several groups now
    past: list[tuple[str, Key, int]] = field(default_factory=list)  # ties that hold until all have committed
    leaving: _Leaving | None = None
    suspending: _Suspending | None = None
    standing: set[str] = field(default_factory=set)  # of a round that suspends: who does not stand suspended yet
    busy: str = ""  # the last reason that a member gave for not stopping


class Groups:
    def __init__(self, first_round: int, suspend_patience: int = SUSPEND_PATIENCE) -> None:
        """`first_round`: higher than any that an earlier daemon began."""
        self._suspend_patience = suspend_patience
        self._first_round = self._next_round = first_round
        self._ties = Ties()
        self._communicators, self._members = self._ties.communicators, self._ties.members
        self._groups: dict[str, _Group] = {}  # by process
        self._rounds: dict[int, _Group] = {}  # that are under way, by number
        self._failures: dict[tuple[str, Key], _Failure] = {}  # by process and communicator
        self._hangs: dict[str, int] = {}  # likewise, whether the whole group of this process is stuck
        self._orphans: set[str] = set()
        self._leaving: list[_Group] = []  # in which a rank is to leave its server
        self._suspending: list[_Group] = []
        self._pausing: set[str] = set()  # processes that are to pause at a round of all their groups
        self._unresolved: dict[str, int] = {}  # held in a round of an earlier daemon
        self._opened = False
        self._out: list[Instruction] = []
        self._t = 0

    def later_than(self, number: int) -> None:
        """So are all rounds that begin from now on: a member was in that one, on another node or before a boot, where
        they are numbered by another clock. Which one was decided last is known by its number. It is read from memory
        that programs may write to: one that no clock has reached is none."""
        if number >= NEVER:
            return
        self._next_round = max(self._next_round, number + 1)
        if not self._opened:
            self._first_round = max(self._first_round, number + 1)

    @property
    def due(self) -> int | None:
        """When to call `wake`."""
        deadlines = [group.round.deadline for group in self._rounds.values() if group.round is not None]
        for group in self._leaving:
            assert group.leaving is not None
            deadlines += [group.leaving.deadline, self._again_at(group)]
        for group in self._suspending:
            assert group.suspending is not None
            deadlines.append(group.suspending.deadline)
            if self._all_ready(group):
                deadlines.append(self._again_at(group))
        deadlines += [self._again_at(group) for group in self._to_pause()]
        deadlines += [failure.due for failure in self._failures.values() if failure.due != NEVER]
        return min([*deadlines, *self._hangs.values()], default=None)

    # --- communicators ---------------------------------------------------------------------------------------------

    def communicator(
        self, t: int, who: Who, name: str, rank: int, ranks: int, state: State
    ) -> list[Instruction]:  # fmt: skip
        self._begin(t)
        key = (who.uid, name)
        found = self._communicators.get(key)
        if state == "past":
            self._is_past(who.process, key, rank)
        elif state == "ended" and found is not None and found.ranks.get(rank) == who.process:
            found.states[rank] = "ended"
        else:
            self._join(who, key, rank, ranks, state)
        return self._out

    def _join(self, who: Who, key: Key, rank: int, ranks: int, state: State) -> None:
        member = self._members.get(who.process)
        first = member is None or not member.has
        if self._ties.join(who, key, rank, ranks, state):
            if first:
                self._out.append(Tie(who.process, True))
            self._tie(key, who.process)

    def _tie(self, key: Key, process: str) -> None:
        """All who have it are of one group."""
        merged = self._groups.setdefault(process, _Group({process}))
        others = (one for one in self._ties.ranks(key) if one != process and self._ties.has(one, key))
        if (other := next(others, None)) is not None and self._groups[other] is not merged:
            merged = self._merge(merged, self._groups[other])
        self._give_up(merged)
        if merged.recovering:
            self._break_all(merged, "a member's server was lost")

    def _merge(self, one: _Group, other: _Group) -> _Group:
        small, large = sorted((one, other), key=lambda group: len(group.members))
        for group in (small, large):
            self._give_up(group)
        large.members |= small.members
        large.committing |= small.committing
        large.decided = max(large.decided, small.decided)
        large.recovering |= small.recovering
        large.not_before = max(large.not_before, small.not_before)
        large.pause = max(large.pause, small.pause)
        large.patience = max(large.patience, small.patience)
        large.loose |= small.loose
        large.past += small.past
        self._stays(small, "another group has joined its own")
        for group in (small, large):
            self._not_suspended(group, "another group has joined its own; suspend it again")
        for process in small.members:
            self._groups[process] = large
        return large

    def _is_past(self, process: str, key: Key, rank: int) -> None:
        group = self._groups.get(process)
        if group is not None and group.committing:
            group.past.append((process, key, rank))
        else:
            self._untie(process, key, rank)

    def _untie(self, process: str, key: Key, rank: int) -> None:
        found, member = self._communicators.get(key), self._members.get(process)
        if found is None or member is None or rank not in member.has.get(key, ()):
            return
        found.states[rank] = "past"
        member.has[key].discard(rank)
        if not member.has[key]:
            del member.has[key]
        self._groups[process].loose = True
        if not any(self._ties.is_living(one) and self._ties.has(one, key) for one in found.ranks.values()):
            self._drop(key)
        if member.fate not in ("lost", "gone") and not member.has:
            self._leave(process)

    def _drop(self, key: Key) -> None:
        """Nobody living has it."""
        found = self._communicators.pop(key)
        for process in set(found.ranks.values()):
            member = self._members.get(process)
            if member is not None and member.has.pop(key, None) is not None and not member.has:
                self._leave(process)

    def _leave(self, process: str) -> None:
        member, group = self._members.pop(process), self._groups.pop(process)
        if group.leaving is not None and group.leaving.process == process:
            self._stays(group, "its communicators have ended")
        if group.suspending is not None and process in group.suspending.members:
            self._not_suspended(group, "the communicators of a rank have ended meanwhile; suspend it again")
        group.members.discard(process)
        group.committing.discard(process)
        if group.round is not None and process in group.round.members:
            self._give_up(group)
        if member.fate not in ("lost", "gone"):
            self._out.append(Tie(process, False))
        self._look_later_whether_it_hangs(group)

    def _living(self, group: _Group) -> list[str]:
        return [one for one in group.members if self._ties.is_living(one)]

    def _current(self, process: str) -> _Group | None:
        """Its group, as small as it is now."""
        group = self._groups.get(process)
        busy = group is not None and (
            group.recovering or group.round is not None or group.committing or group.leaving or group.suspending
            or group.standing
        )  # fmt: skip
        if group is None or not group.loose or busy:
            return group
        group.loose = False
        left = set(group.members)
        while left:
            part = self._ties.component(left.pop())
            left -= part
            if len(part) == len(group.members):
                break
            made = _Group(
                part, patience=group.patience, pause=group.pause, not_before=group.not_before, decided=group.decided
            )
            for one in part:
                self._groups[one] = made
        return self._groups[process]

    # --- rounds ------------------------------------------------------------------------------------------------------

    def wanted(self, t: int, process: str) -> list[Instruction]:
        self._begin(t)
        if not self._opened or not self._ties.is_living(process):
            return self._out
        group = self._current(process)
        if group is not None:
            self._begin_round(group)
        return self._out

    def leave(
        self, t: int, process: str, keys: Iterable[Key], communicators: Mapping[str, tuple[int, ...]], patience: int
    ) -> list[Instruction]:  # fmt: skip
        """It hands over to another server, which has these communicators; these attempts have made them. As soon as all
        stand still; `Stays` says that it does not."""
        self._begin(t)
        group = self._current(process)
        why = ""
        if group is None or not self._ties.is_living(process):
            why = "it is in no communicator any more"
        elif group.recovering:
            why = "its group is being recovered"
        elif group.leaving is not None and group.leaving.process == process:
            return self._out
        elif group.leaving is not None:
            why = "another rank is about to leave its server"
        elif group.suspending is not None or group.standing:
            why = "its group is being suspended"
        if why or group is None:
            self._out.append(Stays(process, why))
            return self._out
        group.leaving = _Leaving(process, frozenset(keys), dict(communicators), t + patience)
        self._leaving.append(group)
        group.pause, group.not_before = 0, min(group.not_before, t + BETWEEN_ROUNDS)
        self._begin_round(group)
        return self._out

    def not_yet(self, t: int, process: str) -> list[Instruction]:
        """What was made for it is void: it is to leave when all is made once more."""
        self._begin(t)
        group = self._groups.get(process)
        if group is not None and group.leaving is not None and group.leaving.process == process:
            self._stays(group, "a server that was to go on with it has been replaced", changed=True)
        return self._out

    def stay(self, t: int, process: str, why: str) -> list[Instruction]:
        """Nobody wants it to leave any more. If it has, nothing follows."""
        self._begin(t)
        group = self._groups.get(process)
        if group is not None and group.leaving is not None and group.leaving.process == process:
            self._stays(group, why)
        if group is not None and group.suspending is not None and process in group.suspending.members:
            self._not_suspended(group, f"rank {self._ties.rank_of(process)} is not suspended: {why}")
        return self._out

    def _stays(self, group: _Group, why: str, *, changed: bool = False) -> None:
        if group.leaving is not None:
            self._out.append(Stays(group.leaving.process, why, changed))
            group.leaving = None
            self._leaving.remove(group)

    # A pause of all.

    def pause(self, t: int, processes: Iterable[str]) -> list[Instruction]:
        """At a round each, as soon as all living members of a group are to; until then, or until `not_to_pause`."""
        self._begin(t)
        self._pausing |= set(processes)
        for group in self._to_pause():
            group.pause, group.not_before = 0, min(group.not_before, t + BETWEEN_ROUNDS)
            self._begin_round(group)
        return self._out

    def not_to_pause(self, t: int, processes: Iterable[str]) -> list[Instruction]:
        """Those that have paused already stay so."""
        self._begin(t)
        self._pausing -= set(processes)
        return self._out

    def is_to_pause(self, process: str) -> bool:
        return process in self._pausing

    def _to_pause(self) -> list[_Group]:
        found = {id(group): group for one in self._pausing if (group := self._groups.get(one)) is not None}
        return [
            group for group in found.values()
            if self._opened and not group.recovering and self._pausing >= set(self._living(group))
        ]  # fmt: skip

    # A suspension of all.

    def suspend(self, t: int, process: str) -> list[Instruction]:
        """It is being prepared for that. `NotSuspended` says that it is not done."""
        self._begin(t)
        group = self._current(process)
        if group is None or not self._ties.is_living(process):
            return self._out
        why = ""
        if group.recovering:
            why = "its group is being recovered"
        elif group.leaving is not None:
            why = "a rank of its group moves to another server"
        elif group.standing:
            why = "its group is being suspended"
        if why:
            self._out.append(NotSuspended(process, why))
            return self._out
        if group.suspending is None:
            group.suspending = _Suspending(t + GATHER_PATIENCE)
            self._suspending.append(group)
        group.suspending.members.add(process)
        if group.suspending.members >= set(self._living(group)):
            group.suspending.deadline = NEVER  # preparing takes what it takes
        return self._out

    def prepared(self, t: int, process: str) -> list[Instruction]:
        """Nothing is left to do for its suspension while its program runs."""
        self._begin(t)
        group = self._groups.get(process)
        if group is None or group.suspending is None or process not in group.suspending.members:
            self._out.append(NotSuspended(process, "its group is not being suspended any more"))
            return self._out
        group.suspending.ready.add(process)
        self._look_whether_all_are_ready(group)
        return self._out

    def _all_ready(self, group: _Group) -> bool:
        return group.suspending is not None and group.suspending.ready >= set(self._living(group))

    def _look_whether_all_are_ready(self, group: _Group) -> None:
        if group.suspending is None or not self._all_ready(group):
            return
        group.suspending.deadline = min(group.suspending.deadline, self._t + self._suspend_patience)
        group.pause, group.not_before = 0, min(group.not_before, self._t + BETWEEN_ROUNDS)
        self._begin_round(group)

    def _not_suspended(self, group: _Group, why: str) -> None:
        if group.suspending is None:
            return
        suspending, group.suspending = group.suspending, None
        self._suspending.remove(group)
        if group.round is not None and group.round.suspends:
            self._give_up(group)
        self._out += [NotSuspended(one, why) for one in sorted(suspending.members) if self._ties.is_living(one)]

    def suspended(self, t: int, process: str) -> list[Instruction]:
        """It stands still after a round that suspends, and everything that it needs has left its device."""
        self._begin(t)
        group = self._groups.get(process)
        if group is not None and process in group.standing:
            group.standing.discard(process)
            self._look_whether_all_are_suspended(group)
        return self._out

    def _look_whether_all_are_suspended(self, group: _Group) -> None:
        if group.standing:
            return
        self._out += [AllSuspended(one) for one in sorted(self._living(group))]
        self._forget(group.members)

    def _forget(self, members: Iterable[str]) -> None:
        members = set(members)
        for key in {key for one in members if one in self._members for key in self._members[one].has}:
            for one in set(self._communicators.pop(key).ranks.values()) - members:
                if one in self._members:
                    self._members[one].has.pop(key, None)
        for one in sorted(members):
            if (group := self._groups.pop(one, None)) is not None:
                group.members = group.members - {one}
            member = self._members.pop(one, None)
            if member is not None and member.fate not in ("lost", "gone"):
                self._out.append(Tie(one, False))

    def forget(self, t: int, members: Iterable[str]) -> list[Instruction]:
        """No server has them."""
        self._begin(t)
        self._forget(members)
        return self._out

    def lacking(self, process: str) -> tuple[str, ...]:
        """Its communicators that another rank is missing in."""
        return self._ties.lacking(process)

    def _again_at(self, group: _Group) -> int:
        """When a round can begin; while one is under way, far away."""
        return group.not_before if group.round is None and not group.committing else NEVER

    def _begin_round(self, group: _Group) -> None:
        busy = group.round is not None or group.committing or group.recovering
        if busy or not self._opened or self._t < group.not_before:
            return
        members = set(self._living(group))
        suspends = self._all_ready(group)
        patience = SUSPEND_STOP_PATIENCE if suspends else group.patience if group.leaving is None else LEAVE_PATIENCE
        group.round = _Round(self._next_round, members, set(members), self._t + GRACE + patience, suspends)
        self._rounds[self._next_round] = group
        self._next_round += 1
        self._out += [Stop(one, group.round.number, {}) for one in sorted(members)]

    def stopped(
        self, t: int, process: str, number: int, counts: Mapping[str, int], behind: int | None = None
    ) -> list[Instruction]:
        """`behind`: launches and copies since its last collective, if that is known."""
        self._begin(t)
        group = self._rounds.get(number)
        if group is not None and group.round is not None and not group.round.holding:
            round = group.round
            if process in round.missing:
                round.missing.discard(process)
                round.counts[process], round.behind[process] = counts, behind
                round.stopped = t if round.stopped is None else round.stopped
                if not round.missing:
                    self._compare(group, round)
        return self._out

    def _compare(self, group: _Group, round: _Round) -> None:
        """All stand still: do their positions fit?"""
        highest: dict[str, int] = {}
        for counts in round.counts.values():
            for key, count in counts.items():
                highest[key] = max(highest.get(key, 0), count)
        behind = self._behind(group, round, highest)
        if behind:
            furthest = [round.behind[one] for one in round.members - behind.keys()]
            place = max((one for one in furthest if one is not None), default=None)
            self._send_on(round, behind, place if self._may_level(group) else None)
            return
        places = [one for one in round.behind.values() if one is not None]
        most = max(places, default=0)
        same = len(places) == len(round.members) and len(set(places)) == 1
        if len(places) == len(round.members) and not same and not round.levelled and self._may_level(group):
            round.levelled = True
            self._send_on(round, {one: {} for one, place in round.behind.items() if place != most}, most)
            return
        group.elsewhere = 0 if same else group.elsewhere + 1
        assert round.stopped is not None
        took = self._t - round.stopped
        group.patience = min(max(2 * took, group.patience * 7 // 8, PATIENCE), MOST_PATIENCE)
        left = self._ties.left(group.members)
        patience = SUSPEND_HOLD_PATIENCE if round.suspends else HOLD_PATIENCE
        round.holding, round.missing, round.deadline = True, set(round.members), self._t + patience
        self._out += [
            Hold(one, round.number, self._ties.left_by_others(one, left), round.suspends, same)
            for one in sorted(round.members)
        ]

    @staticmethod
    def _may_level(group: _Group) -> bool:
        """Ranks that do different things (stages of a pipeline) would stand for longer in vain."""
        return group.elsewhere % OF_ROUNDS < TRIES

    def _send_on(self, round: _Round, counts: Mapping[str, Mapping[str, int]], behind: int | None) -> None:
        round.missing = set(counts)
        self._out += [Stop(one, round.number, counts[one], behind) for one in sorted(counts)]

    def _behind(self, group: _Group, round: _Round, highest: dict[str, int]) -> dict[str, dict[str, int]]:
        behind: dict[str, dict[str, int]] = {}

        def look(process: str | None, key: str, count: int | None, most: int) -> None:
            if process in round.members and (count is None or count < most):
                behind.setdefault(process, {})[key] = most

        uids = {self._members[one].who.uid for one in round.members}
        for key, most in highest.items():
            name, _, pair = key.partition(":")
            for uid in uids:
                found = self._communicators.get((uid, name))
                if found is None:
                    continue
                if pair:
                    for rank in {int(one) for one in pair.split(">")}:
                        process = found.ranks.get(rank)
                        if found.states.get(rank) != "past":
                            look(process, key, round.counts.get(process or "", {}).get(key, 0), most)
                else:
                    for rank, process in found.ranks.items():
                        if found.states[rank] != "past":
                            look(process, key, round.counts.get(process, {}).get(key), most)
        return behind

    def held(self, t: int, process: str, number: int) -> list[Instruction]:
        self._begin(t)
        if number < self._first_round or not self._opened:  # until then none of ours has begun
            if self._opened:
                self._out.append(Resolve(process, number))
            else:
                self._unresolved[process] = number
            return self._out
        group = self._rounds.get(number)
        if group is not None and group.round is not None and group.round.holding:
            group.round.missing.discard(process)
            if not group.round.missing:
                self._decide(group, group.round)
        return self._out

    def held_again(self, t: int, process: str, number: int) -> list[Instruction]:
        """It is held in a round, and what it was sent of that is lost."""
        if number < self._first_round or not self._opened:
            return self.held(t, process, number)
        self._begin(t)
        group = self._groups.get(process)
        if group is not None and process in group.committing and group.decided == number:
            self._out.append(Take(process, number))
        elif number not in self._rounds:
            self._out.append(Continue(process, number))
        return self._out

    def unheard(self, t: int, process: str) -> list[Instruction]:
        """What it was sent may not have come."""
        self._begin(t)
        group = self._groups.get(process)
        if group is not None and group.round is not None and process in group.round.members:
            self._give_up(group)
        return self._out

    def fate_of(self, process: str) -> Fate | None:
        """None: it is in no group."""
        member = self._members.get(process)
        return None if member is None else member.fate

    def _decide(self, group: _Group, round: _Round) -> None:
        self._over(group)
        self._moves_on(group)
        group.decided, group.committing = round.number, set(round.members)
        group.pause, group.not_before = 0, self._t + BETWEEN_ROUNDS
        if round.suspends:
            assert group.suspending is not None
            group.suspending = None
            self._suspending.remove(group)
            group.standing = set(round.members)
            self._out += [Take(one, round.number, suspends=True) for one in sorted(round.members)]
            return
        leaving = group.leaving
        if leaving is None and self._pausing >= round.members:
            self._pausing -= round.members
            self._out += [Take(one, round.number, pauses=True) for one in sorted(round.members)]
            return
        if leaving is not None and not self._has_no_more(leaving):
            self._stays(group, "its communicators have changed meanwhile", changed=True)
            leaving = None
        if leaving is None:
            self._out += [Take(one, round.number) for one in sorted(round.members)]
            return
        group.leaving = None
        self._leaving.remove(group)
        for one in sorted(round.members):
            self._out.append(Take(one, round.number, True, one == leaving.process, leaving.communicators.get(one, ())))

    def _has_no_more(self, leaving: _Leaving) -> bool:
        """Than its next server has?"""
        whole = self.whole(leaving.process)
        return all(key in leaving.keys for key, ranks in whole.items() if leaving.process in ranks)

    def busy(self, t: int, process: str, number: int, why: str = "") -> list[Instruction]:
        self._begin(t)
        group = self._rounds.get(number)
        if group is not None and group.round is not None and process in group.round.members:
            group.busy = why
            self._give_up(group, "failed" if group.round.holding else "refused")
        return self._out

    def committed(self, t: int, process: str, number: int) -> list[Instruction]:
        self._begin(t)
        group = self._groups.get(process)
        if group is not None and process in group.committing and number == group.decided:
            group.committing.discard(process)
            self._all_committed(group)
            if not group.committing and not group.recovering and not group.standing:
                self._out.append(Settled(process))
        return self._out

    def rank_of(self, process: str) -> int:
        """In the largest of its communicators; 0: it has none."""
        return self._ties.rank_of(process)

    def others(self, process: str) -> list[str]:
        """Living members of its group."""
        group = self._groups.get(process)
        return [] if group is None else sorted(one for one in self._living(group) if one != process)

    def whole(self, process: str) -> dict[Key, tuple[str, ...]]:
        """The communicators of its group that lack nobody: whose ranks they are."""
        group = self._groups.get(process)
        return {} if group is None else self._ties.whole(group.members)

    def _all_committed(self, group: _Group) -> None:
        if group.committing:
            return
        past, group.past = group.past, []
        for process, key, rank in past:
            self._untie(process, key, rank)

    def _give_up(self, group: _Group, why: Literal["late", "failed", "refused", "other"] = "other") -> None:
        """The next one is put off for what this one cost. late: they did not all come to where they fit; failed: their
        snapshots were not possible; refused: a member could not even stop."""
        round = group.round
        if round is None:
            return
        self._over(group)
        if why != "other" and group.leaving is None and not round.suspends:
            first, last = (FIRST_SHORT_PAUSE, LAST_SHORT_PAUSE) if why == "refused" else (FIRST_PAUSE, LAST_PAUSE)
            group.pause = min(max(2 * group.pause, first), last)
            if why == "late":
                group.patience = min(2 * group.patience, MOST_PATIENCE)
        group.not_before = self._t + max(group.pause, BETWEEN_ROUNDS)
        well = [one for one in sorted(round.members) if one in self._members and self._members[one].fate == "well"]
        self._out += [Continue(one, round.number) for one in well]

    def _over(self, group: _Group) -> None:
        assert group.round is not None
        del self._rounds[group.round.number]
        group.round = None

    # --- recoveries --------------------------------------------------------------------------------------------------

    def broken(self, t: int, process: str, reason: str) -> list[Instruction]:
        """Its server is lost, or will be."""
        self._begin(t)
        group = self._groups.get(process)
        if group is None or not self._ties.is_living(process):
            return self._out
        self._members[process].fate = "broken"
        self._give_up(group)
        self._stays(group, "a rank's server was lost")
        self._not_suspended(group, "the server of a rank was lost")
        group.standing = set()
        group = self._current(process)
        assert group is not None
        living = self._living(group)
        if len(living) > 1 and not group.recovering:
            rank = self._ties.rank_of(process)
            text = f"rank {rank}'s server was lost: all {len(living)} ranks recover together"
            self._out.append(Note(process, text))
        group.recovering = True
        self._moves_on(group)
        self._break_all(group, f"the server of rank {self._ties.rank_of(process)} was lost: {reason}")
        return self._out

    def differs(self, t: int, process: str, reason: str) -> list[Instruction]:
        """What it holds is wrong, and its next server gets it from the others: all recover, as after a loss."""
        self._begin(t)
        group = self._current(process)
        if group is None or not self._ties.is_living(process) or group.recovering or group.committing or group.standing:
            return self._out
        self._give_up(group)
        self._stays(group, "memory of a rank is restored")
        self._not_suspended(group, "memory of a rank is restored")
        self._out.append(Note(process, f"{reason}: all {len(self._living(group))} ranks recover together"))
        group.recovering = True
        self._moves_on(group)
        self._break_all(group, reason)
        return self._out

    def _break_all(self, group: _Group, reason: str) -> None:
        for one in sorted(group.members):
            if self._members[one].fate == "well":
                self._members[one].fate = "broken"
                self._out.append(Break(one, reason))

    def awaits(self, t: int, process: str) -> list[Instruction]:
        """Its server's exit has been seen, and its next one gets it when all others have come so far."""
        self._begin(t)
        group = self._groups.get(process)
        if self._ties.is_living(process):
            self._members[process].fate = "waits"
            if group is not None:
                self._look_whether_all_wait(group)
        return self._out

    def _look_whether_all_wait(self, group: _Group) -> None:
        if not self._opened or not group.recovering:
            return
        if any(self._members[one].fate in ("well", "broken") for one in group.members):
            return
        living = self._living(group)
        group.recovering, group.committing = False, set()
        if living:
            keys = {key for one in living for key in self._members[one].has}
            gone = {
                key: {one for one in self._communicators[key].ranks.values() if not self._ties.is_living(one)}
                for key in keys
            }
            for one in living:
                self._members[one].fate = "well"
                self._forget_failures(one)  # were its last server's
            members = {one: self._ties.left_by_others(one, gone) for one in sorted(living)}
            self._out.append(Recover(next(iter(members)), members))
        self._all_committed(group)

    def gone(self, t: int, process: str) -> list[Instruction]:
        """Its program has exited."""
        self._begin(t)
        self._ends(process, "gone")
        return self._out

    def lost(self, t: int, process: str, why: str) -> list[Instruction]:
        """It cannot be recovered."""
        self._begin(t)
        member, group = self._members.get(process), self._groups.get(process)
        hopeless = self._ties.is_living(process) and group is not None and group.recovering
        if hopeless and member is not None and group is not None:
            reason = f"rank {self._ties.rank_of(process)} of its communicator was lost: {why}"
            for one in sorted(group.members - {process}):
                if self._members[one].fate in ("broken", "waits"):
                    self._members[one].fate = "lost"
                    self._out.append(Hopeless(one, reason))
        self._ends(process, "lost")
        return self._out

    def _ends(self, process: str, fate: Literal["lost", "gone"]) -> None:
        self._orphans.discard(process)
        self._unresolved.pop(process, None)
        self._forget_failures(process)
        member = self._members.get(process)
        if member is None or member.fate == "gone":
            return
        member.fate = fate
        group = self._groups.get(process)
        if group is None:
            del self._members[process]
            return
        if group.round is not None and process in group.round.members:
            self._give_up(group)
        if group.leaving is not None and group.leaving.process == process:
            self._stays(group, "its program has ended")
        group.committing.discard(process)
        self._all_committed(group)
        if group.suspending is not None:
            group.suspending.members.discard(process)
            group.suspending.ready.discard(process)
            if self._living(group):
                self._look_whether_all_are_ready(group)
            else:
                self._not_suspended(group, "its program has ended")
        if process in group.standing:
            group.standing.discard(process)
            self._look_whether_all_are_suspended(group)
            if process not in self._groups:
                return
        for key in list(member.has):
            ranks = self._communicators[key].ranks.values() if key in self._communicators else ()
            if ranks and not any(self._ties.is_living(one) and self._ties.has(one, key) for one in ranks):
                self._drop(key)
        if group.recovering:
            if self._living(group):
                self._look_whether_all_wait(group)
            else:
                group.recovering = False
        self._look_later_whether_it_hangs(group)

    def failed(self, t: int, process: str, name: str, *, severed: bool = False) -> list[Instruction]:
        """A collective failed in its server. `severed`: as a connection with another rank has ended."""
        self._begin(t)
        if self._ties.is_living(process):
            self._look_why(process, (self._members[process].who.uid, name), severed=severed)
        elif self._opened and process not in self._members:
            self._out.append(CommunicatorLost(process, name))  # the others have left it for good
        return self._out

    def _look_why(self, process: str, key: Key, *, severed: bool = False) -> None:
        """The loss of another node's rank is known here once that node's daemon has seen it, and has the connection to
        send it: nobody is given up before each node was heard."""
        case, group, found = (process, key), self._groups.get(process), self._communicators.get(key)
        if group is not None and group.recovering:
            self._failures.pop(case, None)
            return  # which ends its server
        if self._opened and (found is None or not self._ties.all_live(found)):
            self._failures.pop(case, None)
            self._out.append(CommunicatorLost(process, key[1]))
            return
        failure = self._failures.setdefault(case, _Failure(self._t + LOOK_AGAIN))
        failure.severed |= severed
        if failure.due > self._t:
            return
        if not self._opened:
            failure.due = self._t + LOOK_AGAIN
        elif not failure.heard:
            failure.due = NEVER
            self._out.append(Doubt(process, key[1]))
        else:
            del self._failures[case]
            group = self._current(process)
            whole = found is not None and found.is_whole and self._ties.has(process, key)
            if failure.severed and whole and group is not None:
                self._recover_all(group, f"rank {self._ties.rank_of(process)} lost its connection to another rank")
            else:
                self._out.append(CommunicatorLost(process, key[1]))

    def _forget_failures(self, process: str) -> None:
        for case in [one for one in self._failures if one[0] == process]:
            del self._failures[case]

    def heard(self, t: int, process: str, name: str) -> list[Instruction]:
        """After a `Doubt`: what the nodes knew then is known here."""
        self._begin(t)
        case = (process, (self._members[process].who.uid, name)) if process in self._members else None
        if case is not None and (failure := self._failures.get(case)) is not None:
            failure.heard, failure.due = True, t + LOOK_AGAIN
        return self._out

    # --- hangs -----------------------------------------------------------------------------------------------------

    def stuck(self, t: int, process: str, seconds: float) -> list[Instruction]:
        """Its device waits for other ranks, its program for the device, without progress for so long. 0: no longer."""
        self._begin(t)
        member, group = self._members.get(process), self._groups.get(process)
        if member is not None and group is not None and member.fate == "well":
            member.stuck, member.stuck_at = seconds, t
            self._look_later_whether_it_hangs(group)
        return self._out

    def _hangs_at(self, group: _Group) -> int | None:
        """When its ranks, which all are stuck, have been for long enough."""
        if group.recovering or any(self._ties.is_living(one) and not self._members[one].stuck for one in group.members):
            return None
        return max((self._members[one].stuck_at + STUCK_PATIENCE for one in self._living(group)), default=None)

    def _look_later_whether_it_hangs(self, group: _Group) -> None:
        """Somebody is stuck, or is not there any more, which the others may have been waiting for."""
        if self._opened and self._hangs_at(group) is not None:
            self._hangs[min(self._living(group))] = self._t + STUCK_PATIENCE

    def _look_whether_it_hangs(self, process: str) -> None:
        group = self._current(process)
        at = None if group is None else self._hangs_at(group)
        if group is None or at is None:
            return
        if at > self._t:
            self._hangs[process] = at
            return
        self._recover_all(
            group, f"no rank has got further for {min(self._members[one].stuck for one in self._living(group)):g} s"
        )

    def _recover_all(self, group: _Group, reason: str) -> None:
        """Nobody's server is lost, and no rank gets further. Each gets a fault, and so many of these end them all."""
        self._give_up(group)
        self._stays(group, reason)
        self._not_suspended(group, reason)
        group.standing = set()
        living = sorted(self._living(group))
        self._out.append(Note(living[0], f"{reason}: all {len(living)} ranks recover together"))
        group.recovering = True
        self._moves_on(group)
        for one in living:
            self._members[one].fate = "broken"
            self._out.append(Hung(one, reason))

    def _moves_on(self, group: _Group) -> None:
        for one in group.members:
            self._members[one].stuck = 0

    # --- a new daemon ------------------------------------------------------------------------------------------------

    def orphan(self, who: Who) -> None:
        """Its server is gone, with an earlier daemon, and only the others may know what ties it to them."""
        self._members[who.process] = Member(who, "broken")
        self._orphans.add(who.process)

    def woken(self, t: int, who: Who, other: str) -> list[Instruction]:
        """It was suspended at the round that this one has decided last, and that one runs: they are recovered together.
        What it is a member of its next server says."""
        self._begin(t)
        self._members[who.process] = Member(who, "broken")
        group = self._groups.get(other) or _Group()
        group.members.add(who.process)
        self._groups[who.process] = group
        group.recovering = True
        self._break_all(group, "a member was suspended when the daemon was lost")
        return self._out

    def open(self, t: int, in_rounds: Iterable[str] = ()) -> list[Instruction]:
        """Whoever an earlier daemon knew is here, or is gone. `in_rounds`: orphans that have been in rounds."""
        self._begin(t)
        self._opened = True
        for process, number in sorted(self._unresolved.items()):
            self._out.append(Resolve(process, number))
        self._unresolved.clear()
        marked = set(in_rounds)
        jobs: dict[tuple[int, str], list[str]] = {}
        for process in sorted(self._orphans):
            who = self._members[process].who
            jobs.setdefault((who.uid, who.job), []).append(process)
        for (uid, job), orphans in jobs.items():
            self._place(uid, job, orphans, marked)
        self._orphans.clear()
        for group in set(self._groups.values()):
            self._look_whether_all_wait(group)
            self._look_later_whether_it_hangs(group)
        return self._out

    def _place(self, uid: int, job: str, orphans: list[str], marked: set[str]) -> None:
        """Which ranks were they? Those that nobody else is."""
        keys = {
            key for member in self._members.values() if (member.who.uid, member.who.job) == (uid, job)
            for key in member.has
        }  # fmt: skip
        for key in sorted(keys):
            absent = self._communicators[key].absent
            if len(orphans) == 1:
                self._assume(key, dict.fromkeys(absent, orphans[0]))
            elif len(absent) == len(orphans):
                self._assume(key, dict(zip(absent, orphans, strict=True)))
        unplaced = [one for one in orphans if not self._members[one].has]
        if not keys and any(one in marked for one in orphans):
            key = (uid, f"job {job}")  # all servers have died: what they have in common is what their journals say
            self._communicators[key] = Communicator(key[1], len(orphans))
            self._assume(key, dict(enumerate(orphans)))
            return
        open_ranks = any(len(self._communicators[key].ranks) < self._communicators[key].size for key in keys)
        for one in unplaced:
            del self._members[one]
            if keys and (one in marked or open_ranks):
                why = "its server ended while no daemon was there, and which rank it was of its group is not known"
                self._out.append(Hopeless(one, why))
            else:
                self._out.append(Tie(one, False))

    def _assume(self, key: Key, ranks: dict[int, str]) -> None:
        for rank, process in ranks.items():
            self._ties.assume(key, rank, process)
            self._tie(key, process)
            group = self._groups[process]
            if not group.recovering:
                group.recovering = True
                self._break_all(group, "a member's server ended while no daemon was there")

    # --- time ------------------------------------------------------------------------------------------------------

    def wake(self, t: int) -> list[Instruction]:
        self._begin(t)
        for group in [one for one in self._rounds.values() if one.round is not None and one.round.deadline <= t]:
            assert group.round is not None
            self._give_up(group, "failed" if group.round.holding else "late")
        for group in list(self._leaving):
            assert group.leaving is not None
            if group.leaving.deadline <= t and (group.round is None or not group.round.holding):
                self._stays(group, "the ranks could not stand still together in time")
            elif self._again_at(group) <= t:
                self._begin_round(group)
        for group in list(self._suspending):
            assert group.suspending is not None
            if group.suspending.deadline <= t and (group.round is None or not group.round.holding):
                self._not_suspended(group, self._why_not_suspended(group))
            elif self._all_ready(group) and self._again_at(group) <= t:
                self._begin_round(group)
        for group in self._to_pause():
            if self._again_at(group) <= t:
                self._begin_round(group)
        for process, key in [one for one, failure in self._failures.items() if failure.due <= t]:
            if self._ties.is_living(process):
                self._look_why(process, key)
            else:
                del self._failures[process, key]
        for process in [one for one, due in self._hangs.items() if due <= t]:
            del self._hangs[process]
            self._look_whether_it_hangs(process)
        return self._out

    def _why_not_suspended(self, group: _Group) -> str:
        if not self._all_ready(group):
            return "not all ranks of its group are to be suspended"
        return f"the ranks could not stand still together in time{group.busy and f': {group.busy}'}"

    def _begin(self, t: int) -> None:
        self._t, self._out = t, []
