"""What is requested of a group and done with a round: a rank leaves its server, all pause, or all are suspended.

Suspensions: all members are suspended with one round, once each has prepared what it can while its program runs. Who
stands suspended waits until all do: until then a loss is a loss of all, which are recovered and run. After that the
group is forgotten: nobody is there who could have a part in anything. Those who are resumed together say again what
they are members of (resumptions.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from xmigd.groups.instructions import AllSuspended, Instruction, NotSuspended, Stays
from xmigd.groups.known import Group, Leaving, Suspending
from xmigd.groups.patience import BETWEEN_ROUNDS, GATHER_PATIENCE, NEVER
from xmigd.groups.rounds import Rounds
from xmigd.groups.ties import Key


class Requested(Rounds):
    def leave(
        self, t: int, process: str, keys: Iterable[Key], communicators: Mapping[str, tuple[int, ...]], patience: int
    ) -> list[Instruction]:  # fmt: skip
        """It hands over to another server, which has these communicators; these attempts have made them. As soon as all
        stand still; `Stays` says that it does not."""
        self._begin(t)
        group = self._current(process)
        why = ""
        if group is None or not self._ties.is_living(process):
            why = "it is in no communicator any more"
        elif group.recovering:
            why = "its group is being recovered"
        elif group.leaving is not None and group.leaving.process == process:
            return self._out
        elif group.leaving is not None:
            self._out.append(Stays(process, "another rank is about to leave its server", changed=True))
            return self._out
        elif group.suspending is not None or group.standing:
            why = "its group is being suspended"
        if why or group is None:
            self._out.append(Stays(process, why))
            return self._out
        group.leaving = Leaving(process, frozenset(keys), dict(communicators), t + patience)
        self._leaving.append(group)
        group.pause, group.not_before = 0, min(group.not_before, t + BETWEEN_ROUNDS)
        self._begin_round(group)
        return self._out

    def not_yet(self, t: int, process: str) -> list[Instruction]:
        """What was made for it is void: it is to leave when all is made once more."""
        self._begin(t)
        group = self._groups.get(process)
        if group is not None and group.leaving is not None and group.leaving.process == process:
            self._stays(group, "a server that was to go on with it has been replaced", changed=True)
        return self._out

    def stay(self, t: int, process: str, why: str) -> list[Instruction]:
        """Nobody wants it to leave any more. If it has, nothing follows."""
        self._begin(t)
        group = self._groups.get(process)
        if group is not None and group.leaving is not None and group.leaving.process == process:
            self._stays(group, why)
        if group is not None and group.suspending is not None and process in group.suspending.members:
            self._not_suspended(group, f"rank {self._ties.rank_of(process)} is not suspended: {why}")
        return self._out

    def pause(self, t: int, processes: Iterable[str]) -> list[Instruction]:
        """At a round each, as soon as all living members of a group are to; until then, or until `not_to_pause`."""
        self._begin(t)
        self._pausing |= set(processes)
        for group in self._to_pause():
            group.pause, group.not_before = 0, min(group.not_before, t + BETWEEN_ROUNDS)
            self._begin_round(group)
        return self._out

    def not_to_pause(self, t: int, processes: Iterable[str]) -> list[Instruction]:
        """Those that have paused already stay so."""
        self._begin(t)
        self._pausing -= set(processes)
        return self._out

    def suspend(self, t: int, process: str) -> list[Instruction]:
        """It is being prepared for that. `NotSuspended` says that it is not done."""
        self._begin(t)
        group = self._current(process)
        if group is None or not self._ties.is_living(process):
            return self._out
        why = ""
        if group.recovering:
            why = "its group is being recovered"
        elif group.leaving is not None:
            why = "a rank of its group moves to another server"
        elif group.standing:
            why = "its group is being suspended"
        if why:
            self._out.append(NotSuspended(process, why))
            return self._out
        if group.suspending is None:
            group.suspending = Suspending(t + GATHER_PATIENCE)
            self._suspending.append(group)
        group.suspending.members.add(process)
        if group.suspending.members >= set(self._living(group)):
            group.suspending.deadline = NEVER  # preparing takes what it takes
        return self._out

    def prepared(self, t: int, process: str) -> list[Instruction]:
        """Nothing is left to do for its suspension while its program runs."""
        self._begin(t)
        group = self._groups.get(process)
        if group is None or group.suspending is None or process not in group.suspending.members:
            self._out.append(NotSuspended(process, "its group is not being suspended any more"))
            return self._out
        group.suspending.ready.add(process)
        self._look_whether_all_are_ready(group)
        return self._out

    def _look_whether_all_are_ready(self, group: Group) -> None:
        if group.suspending is None or not self._all_ready(group):
            return
        group.suspending.deadline = min(group.suspending.deadline, self._t + self._suspend_patience)
        group.pause, group.not_before = 0, min(group.not_before, self._t + BETWEEN_ROUNDS)
        self._begin_round(group)

    def suspended(self, t: int, process: str) -> list[Instruction]:
        """It stands still after a round that suspends, and everything that it needs has left its device."""
        self._begin(t)
        group = self._groups.get(process)
        if group is not None and process in group.standing:
            group.standing.discard(process)
            self._look_whether_all_are_suspended(group)
        return self._out

    def _look_whether_all_are_suspended(self, group: Group) -> None:
        if group.standing:
            return
        self._out += [AllSuspended(one) for one in sorted(self._living(group))]
        self._forget(group.members)

    def _why_not_suspended(self, group: Group) -> str:
        if not self._all_ready(group):
            return "not all ranks of its group are to be suspended"
        return f"the ranks could not stand still together in time{group.busy and f': {group.busy}'}"
