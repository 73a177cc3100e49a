"""What ends in a group, for whatever reason: a round, a rank's departure, a suspension, all servers."""

from __future__ import annotations

from typing import Literal

from xmigd.groups.instructions import Break, Continue, NotSuspended, Stays
from xmigd.groups.known import Group, Known
from xmigd.groups.patience import (
    BETWEEN_ROUNDS,
    FIRST_PAUSE,
    FIRST_SHORT_PAUSE,
    LAST_PAUSE,
    LAST_SHORT_PAUSE,
    MOST_PATIENCE,
    STUCK_PATIENCE,
)


class Endings(Known):
    def _give_up(self, group: Group, why: Literal["late", "failed", "refused", "other"] = "other") -> None:
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

    def _over(self, group: Group) -> None:
        assert group.round is not None
        del self._rounds[group.round.number]
        group.round = None

    def _stays(self, group: Group, why: str, *, changed: bool = False) -> None:
        if group.leaving is not None:
            self._out.append(Stays(group.leaving.process, why, changed))
            group.leaving = None
            self._leaving.remove(group)

    def _not_suspended(self, group: Group, why: str) -> None:
        if group.suspending is None:
            return
        suspending, group.suspending = group.suspending, None
        self._suspending.remove(group)
        if group.round is not None and group.round.suspends:
            self._give_up(group)
        self._out += [NotSuspended(one, why) for one in sorted(suspending.members) if self._ties.is_living(one)]

    def _break_all(self, group: Group, reason: str) -> None:
        for one in sorted(group.members):
            if self._members[one].fate == "well":
                self._members[one].fate = "broken"
                self._out.append(Break(one, reason))

    def _moves_on(self, group: Group) -> None:
        for one in group.members:
            self._members[one].stuck = 0

    def _forget_failures(self, process: str) -> None:
        for case in [one for one in self._failures if one[0] == process]:
            del self._failures[case]

    def _look_later_whether_it_hangs(self, group: Group) -> None:
        """Somebody is stuck, or is not there any more, which the others may have been waiting for."""
        if self._opened and self._hangs_at(group) is not None:
            self._hangs[min(self._living(group))] = self._t + STUCK_PATIENCE
