"""Processes that were suspended as one group are resumed as one: nobody executes anything before all can. Pure.

Each rank's next server makes its memory and brings its content, and waits. When all are so far, all are let in. Until
then each of them can still be given up, and is as suspended as before; after that they are a group like any other, and
a loss is a loss of all.

Invariant: a process is let in together with all others of its resumption, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from xmigd.groups.instructions import Instruction


@dataclass(frozen=True, slots=True)
class LetIn(Instruction):
    """It and all others have what they need: it goes on."""


@dataclass(frozen=True, slots=True)
class NotResumed(Instruction):
    """Another one cannot be resumed: this one stays suspended."""

    reason: str


@dataclass(slots=True, eq=False)
class _Resumption:
    members: set[str]
    missing: set[str]  # who is not so far


class Resumptions:
    def __init__(self) -> None:
        self._of: dict[str, _Resumption] = {}  # by process

    def begin(self, members: Iterable[str]) -> None:
        """None of them is being resumed."""
        new = _Resumption(set(members), set(members))
        self._of |= dict.fromkeys(new.members, new)

    def members(self, process: str) -> set[str]:
        """Who is resumed with it; empty: it is not."""
        found = self._of.get(process)
        return set() if found is None else set(found.members)

    def restored(self, process: str) -> list[Instruction]:
        """Its next server has everything, and waits."""
        found = self._of.get(process)
        if found is None:
            return [NotResumed(process, "the ranks that it was to go on with are not resumed any more")]
        found.missing.discard(process)
        return self._look(found)

    def failed(self, process: str, why: str) -> list[Instruction]:
        """It stays suspended, and so do all others."""
        found = self._of.get(process)
        if found is None:
            return []
        self._end(found)
        return [NotResumed(one, f"another rank is not resumed: {why}") for one in sorted(found.members - {process})]

    def gone(self, process: str) -> list[Instruction]:
        """Its program has ended: the others go on without it."""
        found = self._of.pop(process, None)
        if found is None:
            return []
        found.members.discard(process)
        found.missing.discard(process)
        return self._look(found)

    def _look(self, found: _Resumption) -> list[Instruction]:
        if found.missing or not found.members:
            return []
        self._end(found)
        return [LetIn(one) for one in sorted(found.members)]

    def _end(self, found: _Resumption) -> None:
        for one in found.members:
            self._of.pop(one, None)
