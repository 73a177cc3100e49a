"""What the machine of groups (groups.py) wants done, each for one process; supervisor/group.py carries it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Instruction:
    process: str


@dataclass(frozen=True, slots=True)
class Tie(Instruction):
    """From now on it is a group's member, or is none any more."""

    on: bool


@dataclass(frozen=True, slots=True)
class Stop(Instruction):
    round: int
    counts: Mapping[str, int]
    behind: int | None = None  # launches and copies behind a collective, where others have stopped


@dataclass(frozen=True, slots=True)
class Hold(Instruction):
    round: int
    gone: tuple[str, ...]
    suspends: bool = False
    same_place: bool = False  # all are as many launches and copies behind the same collective


@dataclass(frozen=True, slots=True)
class Take(Instruction):
    round: int
    moves: bool = False  # a rank of the group does, and all use what they have prepared for that
    leaves: bool = False  # this one
    communicators: tuple[int, ...] = ()
    suspends: bool = False  # with all others
    pauses: bool = False  # likewise, and goes on from there


@dataclass(frozen=True, slots=True)
class NotSuspended(Instruction):
    """It was to be suspended with all members of its group, and is not."""

    reason: str


@dataclass(frozen=True, slots=True)
class AllSuspended(Instruction):
    """All members of its group stand suspended: what it has on its device can go."""


@dataclass(frozen=True, slots=True)
class Stays(Instruction):
    """It was to leave its server, and does not. `changed`: for its communicators are others now."""

    reason: str
    changed: bool = False


@dataclass(frozen=True, slots=True)
class Continue(Instruction):
    round: int


@dataclass(frozen=True, slots=True)
class Resolve(Instruction):
    """It is held in a round of an earlier daemon: taken if any journal says that it was decided, else given up."""

    round: int


@dataclass(frozen=True, slots=True)
class Break(Instruction):
    """Another member's server is lost: kill this one's, too."""

    reason: str


@dataclass(frozen=True, slots=True)
class Hung(Instruction):
    """No member gets further: kill its server, as those of all others."""

    reason: str


@dataclass(frozen=True, slots=True)
class Hopeless(Instruction):
    reason: str


@dataclass(frozen=True, slots=True)
class Recover(Instruction):
    """All members wait: let each go on, from the round that any of their journals says was decided last. `process` is
    the first of them. With each, the communicators that it does not make again."""

    members: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Doubt(Instruction):
    """A collective has failed, and nobody is known to be lost: `heard`, once all nodes have sent what they knew."""

    name: str


@dataclass(frozen=True, slots=True)
class CommunicatorLost(Instruction):
    name: str


@dataclass(frozen=True, slots=True)
class Settled(Instruction):
    """The group of this process has a new snapshot, of all its ranks."""


@dataclass(frozen=True, slots=True)
class Note(Instruction):
    text: str
