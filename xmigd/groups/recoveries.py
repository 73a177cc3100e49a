"""Members recover together: if the server of one is lost, all servers are killed, and once all members wait, all go on
from the round that was decided last, at the same moment.
"""

from __future__ import annotations

from typing import Literal

from xmigd.groups.instructions import Break, Hopeless, Hung, Instruction, Note, NotSuspended, Recover
from xmigd.groups.known import Group
from xmigd.groups.requested import Requested


class Recoveries(Requested):
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
        stood = self._stood(group)
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
        self._do_not_stand(stood, "the server of a rank was lost")
        return self._out

    def held_again(self, t: int, process: str, number: int) -> list[Instruction]:
        group = self._groups.get(process)
        if group is None or group.committing.get(process) != number or group.renewed != number:
            return super().held_again(t, process, number)
        # A rank moved with it, and what this one was to use from then on may be gone.
        why = "a rank of its group moved while a daemon was not there"
        return [Break(process, why), *self.broken(t, process, why)]

    def refuses(self, t: int, process: str, why: str) -> list[Instruction]:
        """It was to be suspended with all others, and is not: nor are they. If they stand suspended already, all are
        recovered: what it has done since is not known."""
        self._begin(t)
        group = self._groups.get(process)
        if group is None or not self._ties.is_living(process):
            return self._out
        why = f"rank {self._ties.rank_of(process)} is not suspended: {why}"
        if group.suspending is not None and process in group.suspending.members:
            self._not_suspended(group, why)
        stood = self._stood(group)
        if stood:
            self._out.append(Note(process, f"{why}: all {len(stood)} ranks recover together"))
            group.recovering = True
            self._moves_on(group)
            self._break_all(group, why)
            self._do_not_stand(stood, why)
        return self._out

    def _stood(self, group: Group) -> list[str]:
        """Who stood suspended, or was to, until now."""
        stood = sorted(self._living(group)) if group.standing else []
        group.standing = set()
        return stood

    def _do_not_stand(self, members: list[str], why: str) -> None:
        """Behind what becomes of their servers: or they would go on in between."""
        self._out += [NotSuspended(one, why) for one in members]

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

    def _recover_all(self, group: Group, reason: str) -> None:
        """Nobody's server is lost, and no rank gets further. Each gets a fault, and so many of these end them all."""
        self._give_up(group)
        self._stays(group, reason)
        self._not_suspended(group, reason)
        stood = self._stood(group)
        living = sorted(self._living(group))
        self._out.append(Note(living[0], f"{reason}: all {len(living)} ranks recover together"))
        group.recovering = True
        self._moves_on(group)
        for one in living:
            self._members[one].fate = "broken"
            self._out.append(Hung(one, reason))
        self._do_not_stand(stood, reason)

    def awaits(self, t: int, process: str) -> list[Instruction]:
        """Its server's exit has been seen, and its next one gets it when all others have come so far."""
        self._begin(t)
        group = self._groups.get(process)
        if self._ties.is_living(process):
            self._members[process].fate = "waits"
            if group is not None:
                self._look_whether_all_wait(group)
        return self._out

    def _look_whether_all_wait(self, group: Group) -> None:
        if not self._opened or not group.recovering:
            return
        if any(self._members[one].fate in ("well", "broken") for one in group.members):
            return
        living = self._living(group)
        group.recovering, group.committing = False, {}
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
        group.committing.pop(process, None)
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
