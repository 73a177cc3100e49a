"""The machine of groups, whole: what the parts decide, when time passes, and with what a new daemon begins. Pure.

Nothing is started before `open`, when nobody can be missing any more whom an earlier daemon knew.
"""

from __future__ import annotations

from collections.abc import Iterable

from xmigd.groups.failures import Failures
from xmigd.groups.instructions import Hopeless, Instruction, Resolve, Tie
from xmigd.groups.known import Group
from xmigd.groups.patience import NEVER
from xmigd.groups.ties import Communicator, Key, Member, Who


class Groups(Failures):
    def orphan(self, who: Who) -> None:
        """Its server is gone, with an earlier daemon, and only the others may know what ties it to them."""
        self._members[who.process] = Member(who, "broken")
        self._orphans.add(who.process)

    def woken(self, t: int, who: Who, other: str) -> list[Instruction]:
        """It was suspended at the round that this one has decided last, and that one runs: they are recovered together.
        What it is a member of its next server says."""
        self._begin(t)
        self._members[who.process] = Member(who, "broken")
        group = self._groups.get(other) or Group()
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
