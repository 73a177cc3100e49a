"""Ranks that get no further, though no server is lost.

Failures: a collective that fails is explained by the loss of a rank, which may be seen later. If no rank is lost, none
has left the communicator, and a connection has ended, it was the network between nodes: all are recovered like after a
loss, once all nodes are in reach again. Otherwise the program gets its error.

Hangs: a rank whose device waits for other ranks, and whose program waits for the device, says so when it has not got
further for long. That may be as it should be, as long as one rank does not: its program is about to do what the others
wait for. If all do, nothing that any of them waits for can happen any more, and they are recovered like after a loss.
"""

from __future__ import annotations

from xmigd.groups.instructions import CommunicatorLost, Doubt, Instruction
from xmigd.groups.known import Failure
from xmigd.groups.patience import LOOK_AGAIN, NEVER
from xmigd.groups.recoveries import Recoveries
from xmigd.groups.ties import Key


class Failures(Recoveries):
    def failed(self, t: int, process: str, name: str, *, severed: bool = False) -> list[Instruction]:
        """A collective failed in its server. `severed`: as a connection with another rank has ended."""
        self._begin(t)
        if self._ties.is_living(process):
            self._look_why(process, (self._members[process].who.uid, name), severed=severed)
        elif self._opened and process not in self._members:
            self._out.append(CommunicatorLost(process, name))  # the others have left it for good
        return self._out

    def _look_why(self, process: str, key: Key, *, severed: bool = False) -> None:
        """The loss of another node's rank is known here once that node's daemon has seen it, and has the connection to
        send it: nobody is given up before each node was heard."""
        case, group, found = (process, key), self._groups.get(process), self._communicators.get(key)
        if group is not None and group.recovering:
            self._failures.pop(case, None)
            return  # which ends its server
        if self._opened and (found is None or not self._ties.all_live(found)):
            self._failures.pop(case, None)
            self._out.append(CommunicatorLost(process, key[1]))
            return
        failure = self._failures.setdefault(case, Failure(self._t + LOOK_AGAIN))
        failure.severed |= severed
        if failure.due > self._t:
            return
        if not self._opened:
            failure.due = self._t + LOOK_AGAIN
        elif not failure.heard:
            failure.due = NEVER
            self._out.append(Doubt(process, key[1]))
        else:
            del self._failures[case]
            group = self._current(process)
            whole = found is not None and found.is_whole and self._ties.has(process, key)
            if failure.severed and whole and group is not None:
                self._recover_all(group, f"rank {self._ties.rank_of(process)} lost its connection to another rank")
            else:
                self._out.append(CommunicatorLost(process, key[1]))

    def heard(self, t: int, process: str, name: str) -> list[Instruction]:
        """After a `Doubt`: what the nodes knew then is known here."""
        self._begin(t)
        case = (process, (self._members[process].who.uid, name)) if process in self._members else None
        if case is not None and (failure := self._failures.get(case)) is not None:
            failure.heard, failure.due = True, t + LOOK_AGAIN
        return self._out

    def stuck(self, t: int, process: str, seconds: float) -> list[Instruction]:
        """Its device waits for other ranks, its program for the device, without progress for so long. 0: no longer."""
        self._begin(t)
        member, group = self._members.get(process), self._groups.get(process)
        if member is not None and group is not None and member.fate == "well":
            member.stuck, member.stuck_at = seconds, t
            self._look_later_whether_it_hangs(group)
        return self._out

    def _look_whether_it_hangs(self, process: str) -> None:
        group = self._current(process)
        at = None if group is None else self._hangs_at(group)
        if group is None or at is None:
            return
        if at > self._t:
            self._hangs[process] = at
            return
        self._recover_all(
            group, f"no rank has got further for {min(self._members[one].stuck for one in self._living(group)):g} s"
        )
