"""Ranks that depend on each other: their snapshots and their recoveries, which are all ranks' or nobody's. No I/O.

A group is the closure of processes over communicators. What servers and machines of processes tell comes in; what
servers are to be told, and what becomes of processes, goes out.

Invariants:
  A process is in one round at most, and all living members of its group are in the same.
  A round is taken only when all of its members hold, and then by every one that lives; the next begins when all have.
  No server of a group is given its process before all servers of the group have ended, and then all are.
Nothing here outlives a daemon: a round that was decided is in the ranks' journals (docs/decisions/0045).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

PATIENCE = 50_000_000  # ns until all ranks stand where they fit
HOLD_PATIENCE = 2_000_000_000  # ns until all have prepared their snapshots
TAKE_PATIENCE = 60_000_000_000  # ns until a snapshot that is taken is reported
BETWEEN = 10_000_000  # ns between two rounds
FIRST_PAUSE, LAST_PAUSE = 100_000_000, 1_000_000_000  # ns after one that was given up
LOOK_AGAIN = 500_000_000  # ns after which a communicator's failure must have a cause that is known
RECOVERY_PATIENCE = 10_000_000_000  # ns, likewise in a recovery
RESOLVE = 100_000_000  # ns between two looks whether all ranks of an earlier daemon's round are known

Counts = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Stop:
    """To a process's server: stop once it is as far as this."""

    process: str
    round: int
    counts: Counts


@dataclass(frozen=True, slots=True)
class Hold:
    process: str
    round: int
    gone: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Take:
    process: str
    round: int


@dataclass(frozen=True, slots=True)
class Continue:
    process: str
    round: int


@dataclass(frozen=True, slots=True)
class NotRecovered:
    """To a server whose communicator has failed: nobody recovers that."""

    process: str
    name: str


@dataclass(frozen=True, slots=True)
class Break:
    """Another rank's server is lost: so is this one's."""

    process: str
    reason: str


@dataclass(frozen=True, slots=True)
class Recover:
    """All servers of these have ended: they recover, all from the last round that any of their journals calls decided.
    ``gone``: communicators that are not made again."""

    processes: tuple[str, ...]
    gone: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Hopeless:
    """It cannot be recovered, because another rank cannot."""

    process: str
    reason: str


Instruction = Stop | Hold | Take | Continue | NotRecovered | Break | Recover | Hopeless


@dataclass(slots=True)
class _Communicator:
    members: dict[int, str] = field(default_factory=dict)  # processes, by rank
    ended: set[str] = field(default_factory=set)  # by these processes' programs


@dataclass(slots=True)
class _Round:
    number: int
    members: frozenset[str]
    until: int
    stage: Literal["stopping", "holding", "taking"] = "stopping"
    counts: dict[str, Counts | None] = field(default_factory=dict)  # None: it goes on, or has not answered yet
    ready: set[str] = field(default_factory=set)  # of the stage: hold, or have taken


class Groups:
    def __init__(self, first_round: int) -> None:
        """``first_round``: greater than any of an earlier daemon's."""
        self._next_round = first_round
        self._communicators: dict[str, _Communicator] = {}
        self._names: dict[str, set[str]] = {}  # of each living process
        self._gone: set[str] = set()  # their programs have ended
        self._rounds: dict[str, _Round] = {}  # by member
        self._pause: dict[str, tuple[int, int]] = {}  # until when there is no round, and how long that was
        self._broken: dict[str, Literal["broken", "waits", "given"]] = {}
        self._doomed: dict[str, str] = {}
        self._failures: dict[tuple[str, str], int] = {}  # (process, communicator): when it is looked at again
        self._held: dict[str, int] = {}  # rounds of an earlier daemon

    # --- what is known --------------------------------------------------------------------------------------------

    def grouped(self, process: str) -> bool:
        return bool(self._names.get(process))

    def rank_of(self, process: str) -> int:
        """In its largest communicator."""
        found = [
            (len(one.members), rank) for one in self._of(process) for rank, who in one.members.items() if who == process
        ]
        return max(found)[1] if found else 0

    def members(self, process: str) -> frozenset[str]:
        """Those that live, the process among them."""
        seen, new = {process}, [process]
        while new:
            for one in self._of(new.pop()):
                found = {who for who in one.members.values() if who in self._names} - seen
                seen |= found
                new += found
        return frozenset(seen)

    def due_at(self) -> int | None:
        """When ``tick`` has something to do, ns."""
        times = [one.until for one in self._rounds.values()] + list(self._failures.values())
        return min(times) if times else None

    def _of(self, process: str) -> list[_Communicator]:
        return [self._communicators[name] for name in self._names.get(process, ())]

    def _incomplete(self, members: Iterable[str], *, now: bool = False) -> tuple[str, ...]:
        """Their communicators that a recovery from the last snapshot cannot make again; ``now``: from one that is taken
        now. What was ended since the last one, a replay makes again, and ends it."""
        names = {name for each in members for name in self._names.get(each, ())}
        return tuple(sorted(name for name in names if self._lacks(name) or (now and self._communicators[name].ended)))

    def _lacks(self, name: str) -> bool:
        """Has a rank gone, or ended it before its last snapshot?"""
        return any(name not in self._names.get(who, ()) for who in self._communicators[name].members.values())

    # --- membership -----------------------------------------------------------------------------------------------

    def joined(self, t: int, process: str, name: str, rank: int) -> list[Instruction]:
        one = self._communicators.setdefault(name, _Communicator())
        one.members[rank] = process
        one.ended.discard(process)
        before = self._names.setdefault(process, set())
        if name in before:
            return []
        before.add(name)
        # Who is about to be held with others may now depend on more.
        return self._give_up(t, process)

    def ended(self, process: str, name: str) -> None:
        if (one := self._communicators.get(name)) is not None:
            one.ended.add(process)

    def past(self, process: str, name: str) -> None:
        self._names.get(process, set()).discard(name)
        self._drop_unknown(name)

    def _drop_unknown(self, name: str) -> None:
        one = self._communicators.get(name)
        if one is not None and not any(name in self._names.get(who, ()) for who in one.members.values()):
            del self._communicators[name]

    def left(self, t: int, process: str, lost: str = "") -> list[Instruction]:
        """Its program has ended, or (``lost``: why) it cannot be recovered."""
        if process not in self._names:
            return []
        out = self._give_up(t, process)
        others = self.members(process) - {process}
        rank = self.rank_of(process)
        names = self._names.pop(process)
        self._broken.pop(process, None)
        self._doomed.pop(process, None)
        self._pause.pop(process, None)
        self._held.pop(process, None)
        for name in names:
            self._drop_unknown(name)
        if lost:
            reason = f"rank {rank} of its communicator was lost: {lost}"
            for other in sorted(others):
                if other not in self._broken:
                    continue  # its communicator fails, and its program learns of that
                self._doomed[other] = reason
                if self._broken[other] == "waits":
                    out.append(Hopeless(other, reason))
        else:
            for other in sorted(others):
                out += self._all_wait(other)
        return out

    # --- rounds ---------------------------------------------------------------------------------------------------

    def wanted(self, t: int, process: str) -> list[Instruction]:
        members = self.members(process)
        if process not in self._names or any(
            m in self._broken or m in self._rounds or m in self._held for m in members
        ):
            return []
        if any(t < self._pause[m][0] for m in members if m in self._pause):
            return []
        self._next_round += 1
        one = _Round(self._next_round, members, t + PATIENCE, counts=dict.fromkeys(members))
        for member in members:
            self._rounds[member] = one
        return [Stop(member, one.number, {}) for member in sorted(members)]

    def stopped(self, t: int, process: str, number: int, counts: Counts) -> list[Instruction]:
        one = self._round(process, number, "stopping")
        if one is None:
            return [Continue(process, number)] if process not in self._rounds else []
        one.counts[process] = counts
        if any(each is None for each in one.counts.values()):
            return []
        behind = self._behind(one)
        if behind:
            for member in behind:
                one.counts[member] = None
            return [Stop(member, number, wanted) for member, wanted in sorted(behind.items())]
        one.stage, one.until = "holding", t + HOLD_PATIENCE
        gone = self._incomplete(one.members, now=True)
        return [
            Hold(member, number, tuple(name for name in gone if name in self._names[member]))
            for member in sorted(one.members)
        ]

    def _behind(self, one: _Round) -> dict[str, dict[str, int]]:
        """Who has to go on, and how far."""
        most: dict[str, int] = {}
        for counts in one.counts.values():
            for key, count in (counts or {}).items():
                most[key] = max(most.get(key, 0), count)
        found: dict[str, dict[str, int]] = {}
        for key, count in most.items():
            name, _, pair = key.partition(":")
            communicator = self._communicators.get(name)
            if communicator is None:
                continue
            ranks = {int(each) for each in pair.split(">")} if pair else set(communicator.members)
            for rank in ranks:
                member = communicator.members.get(rank, "")
                if member not in one.members or name not in self._names[member]:
                    continue  # it is gone, or has ended it long ago
                own = (one.counts[member] or {}).get(key, 0 if pair else -1)
                if own < count:
                    found.setdefault(member, {})[key] = count
        return found

    def held(self, t: int, process: str, number: int) -> list[Instruction]:
        one = self._round(process, number, "holding")
        if one is None:
            if process not in self._rounds and process not in self._broken:
                self._held[process] = number  # an earlier daemon's
            return []
        one.ready.add(process)
        if one.ready != one.members:
            return []
        one.stage, one.until, one.ready = "taking", t + TAKE_PATIENCE, set()
        return [Take(member, number) for member in sorted(one.members)]

    def busy(self, t: int, process: str, number: int) -> list[Instruction]:
        one = self._rounds.get(process)
        return self._give_up(t, process) if one is not None and one.number == number else []

    def committed(self, t: int, process: str, number: int) -> None:
        one = self._round(process, number, "taking")
        if one is None:
            return
        one.ready.add(process)
        if one.ready == one.members:
            self._forget(one)
            for member in one.members:
                self._pause[member] = (t + BETWEEN, 0)

    def _round(self, process: str, number: int, stage: str) -> _Round | None:
        one = self._rounds.get(process)
        return one if one is not None and one.number == number and one.stage == stage else None

    def _forget(self, one: _Round) -> None:
        for member in one.members:
            if self._rounds.get(member) is one:
                del self._rounds[member]

    def _give_up(self, t: int, process: str) -> list[Instruction]:
        """The round that it is in, if that is not decided."""
        one = self._rounds.get(process)
        if one is None:
            return []
        self._forget(one)
        if one.stage == "taking":
            return []
        for member in one.members:
            pause = min(max(FIRST_PAUSE, 2 * self._pause.get(member, (0, 0))[1]), LAST_PAUSE)
            self._pause[member] = (t + pause, pause)
        return [Continue(member, one.number) for member in sorted(one.members)]

    def unresolved(self) -> dict[str, int]:
        """Processes that hold for an earlier daemon, and in which round."""
        return self._held

    def resolve(self, process: str, decided: int) -> list[Instruction]:
        """``decided``: the last round that a journal of its group calls so."""
        number = self._held.pop(process)
        return [Take(process, number) if decided >= number else Continue(process, number)]

    # --- recoveries -----------------------------------------------------------------------------------------------

    def broken(self, t: int, process: str, reason: str) -> list[Instruction]:
        """Its server is lost, or will be in a moment."""
        if process not in self._names or self._broken.get(process) in ("broken", "waits"):
            return []
        out = self._give_up(t, process)
        self._broken[process] = "broken"
        self._held.pop(process, None)
        for member in sorted(self.members(process) - {process}):
            if self._broken.get(member) in ("broken", "waits"):
                continue
            self._broken[member] = "broken"
            self._held.pop(member, None)
            out.append(Break(member, reason))
        return out

    def waits(self, t: int, process: str, reason: str) -> list[Instruction]:
        """Its server has ended; the next one is not given the process yet."""
        if process not in self._names:
            return [Recover((process,), ())]
        out = self.broken(t, process, reason)
        if process in self._doomed:
            return [*out, Hopeless(process, self._doomed[process])]
        self._broken[process] = "waits"
        return out + self._all_wait(process)

    def _all_wait(self, process: str) -> list[Instruction]:
        members = self.members(process)
        if self._broken.get(process) != "waits" or any(self._broken.get(member) != "waits" for member in members):
            return []
        for member in members:
            self._broken[member] = "given"
        return [Recover(tuple(sorted(members)), self._incomplete(members))]

    def runs(self, t: int, process: str) -> None:
        """It has been recovered."""
        if self._broken.get(process) == "given":
            del self._broken[process]
            self._pause[process] = (t + FIRST_PAUSE, 0)

    # --- failures -------------------------------------------------------------------------------------------------

    def failed(self, t: int, process: str, name: str) -> list[Instruction]:
        """A collective of a communicator cannot be done."""
        if self._broken.get(process) in ("broken", "waits"):
            return []
        if name not in self._names.get(process, ()) or self._lacks(name) or self._communicators[name].ended:
            return [NotRecovered(process, name)]
        again = RECOVERY_PATIENCE if process in self._broken else LOOK_AGAIN
        self._failures.setdefault((process, name), t + again)
        return []

    def tick(self, t: int) -> list[Instruction]:
        out: list[Instruction] = []
        for one in {id(each): each for each in self._rounds.values() if each.until <= t}.values():
            out += self._give_up(t, next(iter(one.members)))
        for (process, name), at in list(self._failures.items()):
            if at <= t:
                del self._failures[process, name]
                if process in self._names and self._broken.get(process) not in ("broken", "waits"):
                    out.append(NotRecovered(process, name))
        return out
