"""Who belongs to which group, as communicators are joined, ended and forgotten.

Whoever has exited stays known as a member of its communicators for as long as somebody living has them.
"""

from __future__ import annotations

from collections.abc import Iterable

from xmigd.groups.endings import Endings
from xmigd.groups.instructions import Instruction, Tie
from xmigd.groups.known import Group
from xmigd.groups.ties import Key, State, Who


class Membership(Endings):
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
        merged = self._groups.setdefault(process, Group({process}))
        others = (one for one in self._ties.ranks(key) if one != process and self._ties.has(one, key))
        if (other := next(others, None)) is not None and self._groups[other] is not merged:
            merged = self._merge(merged, self._groups[other])
        self._give_up(merged)
        if merged.recovering:
            self._break_all(merged, "a member's server was lost")

    def _merge(self, one: Group, other: Group) -> Group:
        small, large = sorted((one, other), key=lambda group: len(group.members))
        for group in (small, large):
            self._give_up(group)
        large.members |= small.members
        large.committing |= small.committing
        large.recovering |= small.recovering
        large.not_before = max(large.not_before, small.not_before)
        large.pause = max(large.pause, small.pause)
        large.renewed = max(large.renewed, small.renewed)
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
        if group is not None and (group.committing or group.standing):
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
        group.committing.pop(process, None)
        if group.round is not None and process in group.round.members:
            self._give_up(group)
        if member.fate not in ("lost", "gone"):
            self._out.append(Tie(process, False))
        self._look_later_whether_it_hangs(group)

    def _all_committed(self, group: Group) -> None:
        """Not while some stand suspended: the others wait for each of them, also for one that is tied to nobody any
        more."""
        if group.committing or group.standing:
            return
        past, group.past = group.past, []
        for process, key, rank in past:
            self._untie(process, key, rank)

    def forget(self, t: int, members: Iterable[str]) -> list[Instruction]:
        """No server has them."""
        self._begin(t)
        self._forget(members)
        return self._out

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
