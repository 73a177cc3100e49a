"""What is known of processes that communicators tie together, and their groups as they are now. Decides nothing.

A *group* is a connected component: processes, tied by communicators that at least one living process has in its state.
The machine of groups is this state and what each part above decides; what a part calls lies below it:

  known, endings, membership, rounds, requested, recoveries, failures, groups
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from xmigd.groups.instructions import Instruction
from xmigd.groups.patience import NEVER, PATIENCE, STUCK_PATIENCE, SUSPEND_PATIENCE
from xmigd.groups.ties import Fate, Key, Ties


@dataclass(slots=True)
class Failure:
    """Of a communicator, in the server of a process."""

    due: int  # when to look for its reason; NEVER: once all nodes are heard
    severed: bool = False  # a connection has ended
    heard: bool = False  # by all nodes


@dataclass(slots=True)
class Round:
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
class Leaving:
    """A rank hands over to another server at the next round."""

    process: str
    keys: frozenset[Key]  # its communicators
    communicators: Mapping[str, tuple[int, ...]]
    deadline: int


@dataclass(slots=True)
class Suspending:
    deadline: int
    members: set[str] = field(default_factory=set)  # that are to be
    ready: set[str] = field(default_factory=set)  # of these


@dataclass(slots=True, eq=False)
class Group:
    members: set[str] = field(default_factory=set)
    round: Round | None = None
    # Who has not reported its snapshot yet, and of which round: two groups that have become one have two.
    committing: dict[str, int] = field(default_factory=dict)
    recovering: bool = False
    patience: int = PATIENCE
    pause: int = 0
    not_before: int = 0
    elsewhere: int = 0  # rounds in a row in which its ranks were not at the same place
    loose: bool = False  # a tie is gone: it may be several groups now
    past: list[tuple[str, Key, int]] = field(default_factory=list)  # ties that hold until all have committed, and stand
    leaving: Leaving | None = None
    renewed: int = 0  # the last round at which a rank left its server: the others have used other communicators since
    suspending: Suspending | None = None
    standing: set[str] = field(default_factory=set)  # of a round that suspends: who does not stand suspended yet
    busy: str = ""  # the last reason that a member gave for not stopping


class Known:
    def __init__(self, first_round: int, suspend_patience: int = SUSPEND_PATIENCE) -> None:
        """`first_round`: higher than any that an earlier daemon began."""
        self._suspend_patience = suspend_patience
        self._first_round = self._next_round = first_round
        self._ties = Ties()
        self._communicators, self._members = self._ties.communicators, self._ties.members
        self._groups: dict[str, Group] = {}  # by process
        self._rounds: dict[int, Group] = {}  # that are under way, by number
        self._failures: dict[tuple[str, Key], Failure] = {}  # by process and communicator
        self._hangs: dict[str, int] = {}  # likewise, whether the whole group of this process is stuck
        self._orphans: set[str] = set()
        self._leaving: list[Group] = []  # in which a rank is to leave its server
        self._suspending: list[Group] = []
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

    def _begin(self, t: int) -> None:
        self._t, self._out = t, []

    def is_to_pause(self, process: str) -> bool:
        return process in self._pausing

    def is_to_stand(self, process: str) -> bool:
        """Is its group being suspended, and does not stand suspended as a whole yet?"""
        group = self._groups.get(process)
        return group is not None and bool(group.standing)

    def another_leaves(self, process: str) -> bool:
        """Is another rank of its group to leave its server at the next round?"""
        group = self._groups.get(process)
        return group is not None and group.leaving is not None and group.leaving.process != process

    def fate_of(self, process: str) -> Fate | None:
        """None: it is in no group."""
        member = self._members.get(process)
        return None if member is None else member.fate

    def rank_of(self, process: str) -> int:
        """In the largest of its communicators; 0: it has none."""
        return self._ties.rank_of(process)

    def lacking(self, process: str) -> tuple[str, ...]:
        """Its communicators that another rank is missing in."""
        return self._ties.lacking(process)

    def others(self, process: str) -> list[str]:
        """Living members of its group."""
        group = self._groups.get(process)
        return [] if group is None else sorted(one for one in self._living(group) if one != process)

    def whole(self, process: str) -> dict[Key, tuple[str, ...]]:
        """The communicators of its group that lack nobody: whose ranks they are."""
        group = self._groups.get(process)
        return {} if group is None else self._ties.whole(group.members)

    def _living(self, group: Group) -> list[str]:
        return [one for one in group.members if self._ties.is_living(one)]

    def _current(self, process: str) -> Group | None:
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
            made = Group(part, patience=group.patience, pause=group.pause, not_before=group.not_before)
            for one in part:
                self._groups[one] = made
        return self._groups[process]

    def _all_ready(self, group: Group) -> bool:
        return group.suspending is not None and group.suspending.ready >= set(self._living(group))

    def _again_at(self, group: Group) -> int:
        """When a round can begin; while one is under way, far away."""
        return group.not_before if group.round is None and not group.committing else NEVER

    def _to_pause(self) -> list[Group]:
        found = {id(group): group for one in self._pausing if (group := self._groups.get(one)) is not None}
        return [
            group for group in found.values()
            if self._opened and not group.recovering and self._pausing >= set(self._living(group))
        ]  # fmt: skip

    def _hangs_at(self, group: Group) -> int | None:
        """When its ranks, which all are stuck, have been for long enough."""
        if group.recovering or any(self._ties.is_living(one) and not self._members[one].stuck for one in group.members):
            return None
        return max((self._members[one].stuck_at + STUCK_PATIENCE for one in self._living(group)), default=None)
