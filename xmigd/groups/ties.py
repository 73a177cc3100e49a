"""Who is a member of which communicators, and whom they tie together. Pure, and decides nothing.

A process that has exited stays known as a member of its communicators as long as somebody living has them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

State = Literal["joined", "ended", "past"]
# broken: its server is lost, its exit not seen yet. lost: it cannot be recovered; gone: its program has exited.
Fate = Literal["well", "broken", "waits", "lost", "gone"]
Key = tuple[int, str]  # of a communicator: a user's, by name


@dataclass(frozen=True, slots=True)
class Who:
    process: str
    uid: int
    job: str


@dataclass(slots=True)
class Communicator:
    name: str
    size: int
    ranks: dict[int, str] = field(default_factory=dict)
    states: dict[int, State] = field(default_factory=dict)
    assumed: set[str] = field(default_factory=set)  # processes whose rank is not known yet

    @property
    def is_whole(self) -> bool:
        """No rank is missing, and none has left it. Whether they live is another question."""
        return len(self.ranks) == self.size and set(self.states.values()) == {"joined"}

    @property
    def absent(self) -> list[int]:
        """Ranks that nobody is known to be."""
        return [rank for rank in range(self.size) if rank not in self.ranks]


@dataclass(slots=True)
class Member:
    who: Who
    fate: Fate = "well"
    has: dict[Key, set[int]] = field(default_factory=dict)  # ranks of communicators that are not past
    stuck: float = 0  # seconds without progress, as it reported; 0: it gets further
    stuck_at: int = 0  # when that was


class Ties:
    def __init__(self) -> None:
        self.communicators: dict[Key, Communicator] = {}
        self.members: dict[str, Member] = {}

    def is_living(self, process: str) -> bool:
        return process in self.members and self.members[process].fate not in ("lost", "gone")

    def has(self, process: str, key: Key) -> bool:
        return process in self.members and key in self.members[process].has

    def all_live(self, communicator: Communicator) -> bool:
        """All of its ranks that are known."""
        return all(self.is_living(one) for one in communicator.ranks.values())

    def ranks(self, key: Key) -> Collection[str]:
        """Whose they are, as far as that is known."""
        return self.communicators[key].ranks.values()

    def component(self, process: str) -> set[str]:
        """All whom communicators tie to it."""
        part, seen, todo = {process}, set[Key](), [process]
        while todo:
            for key in self.members[todo.pop()].has.keys() - seen:
                seen.add(key)
                more = {one for one in self.ranks(key) if self.has(one, key)} - part
                part |= more
                todo += more
        return part

    def rank_of(self, process: str) -> int:
        """In the largest of its communicators; 0: it has none."""
        has = self.members[process].has if process in self.members else {}
        key = max(has, key=lambda one: self.communicators[one].size, default=None)
        return 0 if key is None else min(has[key])

    def lacking(self, process: str) -> tuple[str, ...]:
        """Its communicators that another rank is missing in."""
        member = self.members.get(process)
        found = [] if member is None else [self.communicators[key] for key in member.has]
        return tuple(sorted(one.name for one in found if len(one.ranks) < one.size or not self.all_live(one)))

    def whole(self, processes: Iterable[str]) -> dict[Key, tuple[str, ...]]:
        """Their communicators that lack nobody: whose ranks they are."""
        found = {key: self.communicators[key] for one in processes for key in self.members[one].has}
        return {
            key: tuple(one.ranks[rank] for rank in range(one.size))
            for key, one in found.items()
            if one.is_whole and self.all_live(one)
        }

    def left(self, processes: Iterable[str]) -> dict[Key, set[str]]:
        """Their communicators, and who has ended each or is not living."""
        keys = {key for one in processes for key in self.members[one].has}
        return {
            key: {
                process for rank, process in self.communicators[key].ranks.items()
                if self.communicators[key].states[rank] != "joined" or not self.is_living(process)
            } for key in keys
        }  # fmt: skip

    def left_by_others(self, process: str, left: Mapping[Key, set[str]]) -> tuple[str, ...]:
        """Names of its communicators that another one has left."""
        has = self.members[process].has
        return tuple(sorted(key[1] for key in has if len(left[key]) > (process in left[key])))

    def join(self, who: Who, key: Key, rank: int, ranks: int, state: State) -> bool:
        """Is it tied to the others by this, and was not before?"""
        found = self.communicators.get(key)
        if found is None:
            found = self.communicators[key] = Communicator(key[1], ranks)
        if rank >= found.size or found.size != ranks:
            return False  # where ranks meet it is refused
        self._correct(found, key, who.process, rank)
        if found.ranks.setdefault(rank, who.process) != who.process:
            return False
        found.states[rank] = state
        member = self.members.setdefault(who.process, Member(who))
        if member.fate in ("lost", "gone") or rank in member.has.get(key, ()):
            return False
        member.has.setdefault(key, set()).add(rank)
        return True

    def assume(self, key: Key, rank: int, process: str) -> None:
        """It is probably this rank."""
        found = self.communicators[key]
        found.ranks[rank], found.states[rank] = process, "joined"
        found.assumed.add(process)
        self.members[process].has.setdefault(key, set()).add(rank)

    def _correct(self, found: Communicator, key: Key, process: str, rank: int) -> None:
        """Of a communicator whose rank's server died with the daemon it was only assumed which one that was."""
        if process not in found.assumed:
            return
        found.assumed.discard(process)
        other = found.ranks.get(rank)
        if other != process and (other is None or other not in found.assumed):
            return
        freed = [one for one, owner in found.ranks.items() if owner == process and one != rank]
        for one in freed:
            del found.ranks[one]
        if other is not None and other != process:
            self._assign_rank(found, key, freed[0], other)
        self._assign_rank(found, key, rank, process)

    def _assign_rank(self, found: Communicator, key: Key, rank: int, process: str) -> None:
        found.ranks[rank], found.states[rank] = process, "joined"
        self.members[process].has[key] = {rank}
