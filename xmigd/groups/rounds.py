"""Snapshots of all members of a group.

All living members stop between two records, right behind a collective where they can; those behind go on until each
communicator has seen the same number of operations on all its ranks, and each pair of ranks the same number of sends
and receives; those who are not as far behind the same collective as others go on once (decision 0052). Then all prepare
their snapshot, and once all have, each is sent `take`. That is the decision; a server writes it into its journal before
it overwrites anything, so it is known from the journals alone.

Invariants: a group has one round at a time, and none while it recovers; nobody is sent `take` in a round that not all
have prepared.
"""

from __future__ import annotations

from collections.abc import Mapping

from xmigd.groups.instructions import Continue, Hold, Instruction, Resolve, Settled, Stop, Take
from xmigd.groups.known import Group, Leaving, Round
from xmigd.groups.membership import Membership
from xmigd.groups.patience import (
    BETWEEN_ROUNDS,
    GRACE,
    HOLD_PATIENCE,
    LEAVE_PATIENCE,
    MOST_PATIENCE,
    OF_ROUNDS,
    PATIENCE,
    SUSPEND_HOLD_PATIENCE,
    SUSPEND_STOP_PATIENCE,
    TRIES,
)


class Rounds(Membership):
    def wanted(self, t: int, process: str) -> list[Instruction]:
        self._begin(t)
        if not self._opened or not self._ties.is_living(process):
            return self._out
        group = self._current(process)
        if group is not None:
            self._begin_round(group)
        return self._out

    def _begin_round(self, group: Group) -> None:
        busy = group.round is not None or group.committing or group.recovering
        if busy or not self._opened or self._t < group.not_before:
            return
        members = set(self._living(group))
        suspends = self._all_ready(group)
        patience = SUSPEND_STOP_PATIENCE if suspends else group.patience if group.leaving is None else LEAVE_PATIENCE
        group.round = Round(self._next_round, members, set(members), self._t + GRACE + patience, suspends)
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

    def _compare(self, group: Group, round: Round) -> None:
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
    def _may_level(group: Group) -> bool:
        """Ranks that do different things (stages of a pipeline) would stand for longer in vain."""
        return group.elsewhere % OF_ROUNDS < TRIES

    def _send_on(self, round: Round, counts: Mapping[str, Mapping[str, int]], behind: int | None) -> None:
        round.missing = set(counts)
        self._out += [Stop(one, round.number, counts[one], behind) for one in sorted(counts)]

    def _behind(self, group: Group, round: Round, highest: dict[str, int]) -> dict[str, dict[str, int]]:
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
        if group is not None and group.committing.get(process) == number:
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

    def busy(self, t: int, process: str, number: int, why: str = "") -> list[Instruction]:
        self._begin(t)
        group = self._rounds.get(number)
        if group is not None and group.round is not None and process in group.round.members:
            group.busy = why
            self._give_up(group, "failed" if group.round.holding else "refused")
        return self._out

    def _decide(self, group: Group, round: Round) -> None:
        self._over(group)
        self._moves_on(group)
        group.committing = dict.fromkeys(round.members, round.number)
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
        group.leaving, group.renewed = None, round.number
        self._leaving.remove(group)
        for one in sorted(round.members):
            self._out.append(Take(one, round.number, True, one == leaving.process, leaving.communicators.get(one, ())))

    def _has_no_more(self, leaving: Leaving) -> bool:
        """Than its next server has?"""
        whole = self.whole(leaving.process)
        return all(key in leaving.keys for key, ranks in whole.items() if leaving.process in ranks)

    def committed(self, t: int, process: str, number: int) -> list[Instruction]:
        self._begin(t)
        group = self._groups.get(process)
        if group is not None and group.committing.get(process) == number:
            del group.committing[process]
            self._all_committed(group)
            if not group.committing and not group.recovering and not group.standing:
                self._out.append(Settled(process))
        return self._out
