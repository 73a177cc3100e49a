"""What ties programs together: carries events to the machine of groups and does what it says."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping

from xmigd import log
from xmigd.devices import header
from xmigd.groups import groups as g
from xmigd.groups.groups import Groups, Who
from xmigd.groups.meetings import Meetings, Offer
from xmigd.ipc import messages as m
from xmigd.logs.log import JobLog
from xmigd.process import events as e
from xmigd.supervisor.process import Process, now

logger = log.get("groups")

SETTLE = 0.5  # seconds that adopted servers have to say what they are members of


class Ranks:
    """Of all programs."""

    def __init__(self, processes: Mapping[str, Process], job_log: JobLog, group_at: int) -> None:
        self._processes = processes
        self._job_log = job_log
        self._group_at = group_at
        self._loop = asyncio.get_running_loop()
        self._meetings = Meetings()
        self._groups = Groups(now())
        self._events: deque[Callable[[int], list[g.Instruction]]] = deque()
        self._busy = False
        self._timer: asyncio.TimerHandle | None = None
        self._opening: asyncio.TimerHandle | None = None

    # --- what happens ------------------------------------------------------------------------------------------------

    def reported(self, process: Process, message: m.RankMessage) -> None:
        """By the server that has the process."""
        who = _who(process)
        match message:
            case m.Meet():
                self._meet(process, message)
            case m.Communicator(name=name, rank=rank, ranks=ranks, state=state):
                self._tell(lambda t: self._groups.communicator(t, who, name, rank, ranks, state))
            case m.CommunicatorFailed(name=name, rank=rank, why=why):
                logger.warning("a collective failed", process=who.process[:12], rank=rank, why=why)
                self._tell(lambda t: self._groups.failed(t, who.process, name))
            case m.GroupWanted():
                self._tell(lambda t: self._groups.wanted(t, who.process))
            case m.GroupStopped(round=number, counts=counts):
                self._tell(lambda t: self._groups.stopped(t, who.process, number, counts))
            case m.GroupHeld(round=number):
                self._tell(lambda t: self._groups.held(t, who.process, number))
            case m.GroupBusy(round=number, why=why):
                logger.debug("no group snapshot now", process=who.process[:12], round=number, why=why)
                self._tell(lambda t: self._groups.busy(t, who.process, number))

    def committed(self, process: Process, number: int) -> None:
        self._tell(lambda t: self._groups.committed(t, process.row.id, number))

    def changed(self, process: Process, instruction: e.Instruction) -> None:
        """What its machine says of it."""
        name = process.row.id
        match instruction:
            case e.GroupBroken(reason):
                self._tell(lambda t: self._groups.broken(t, name, reason))
            case e.AwaitGroup():
                self._tell(lambda t: self._groups.awaits(t, name))
            case e.SaveState(state="losing" | "lost", why=why):
                self._tell(lambda t: self._groups.lost(t, name, why))
            case e.SaveState(state="draining" | "ended"):
                self._tell(lambda t: self._groups.gone(t, name))

    def finished(self, process: Process) -> None:
        self._meetings.gone(process.row.id)

    def orphaned(self, process: Process) -> None:
        """It was perhaps a member of a group, and waits until that is known."""
        self._groups.orphan(_who(process))
        process.tell(e.Grouped(t=now(), on=True))

    def settled(self) -> None:
        """Nobody is missing any more whom an earlier daemon knew; what they are members of they say in a moment."""
        self._opening = self._loop.call_later(SETTLE if self._processes else 0, self._open)

    def in_rounds(self, process: Process) -> bool:
        """Has it prepared group snapshots?"""
        return any(self._rounds(process))

    def close(self) -> None:
        for timer in (self._timer, self._opening):
            if timer is not None:
                timer.cancel()

    # --- what is done ------------------------------------------------------------------------------------------------

    def _tell(self, event: Callable[[int], list[g.Instruction]]) -> None:
        """Events that come of carrying out others wait their turn."""
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._events:
                for instruction in self._events.popleft()(now()):
                    if (process := self._processes.get(instruction.process)) is not None:
                        self._do(process, instruction)
        finally:
            self._busy = False
        self._set_timer()

    def _do(self, process: Process, instruction: g.Instruction) -> None:
        match instruction:
            case g.Tie(on=on):
                process.tell(e.Grouped(t=now(), on=on))
            case g.Stop(round=number, counts=counts):
                process.send_active(m.pack("group_stop", round=number, counts=dict(counts)))
            case g.Hold(round=number, gone=gone):
                process.send_active(m.pack("group_hold", round=number, gone=list(gone)))
            case g.Take(round=number):
                process.send_active(m.pack("group_take", round=number))
            case g.Continue(round=number):
                process.send_active(m.pack("group_continue", round=number))
            case g.Resolve(round=number):
                decided = any(self._rounds(one)[1] == number for one in self._processes.values())
                logger.info("a round of an earlier daemon", process=process.row.id[:12], round=number, decided=decided)
                process.send_active(m.pack("group_take" if decided else "group_continue", round=number))
            case g.Break(reason=reason):
                process.tell(e.GroupLost(t=now(), reason=reason))
            case g.Hopeless(reason=reason):
                process.tell(e.GroupHopeless(t=now(), reason=reason))
            case g.Recover(members=members):
                self._recover(members)
            case g.CommunicatorLost(name=name):
                process.send_active(m.pack("communicator_lost", name=name))
            case g.Note(text=text):
                logger.warning("a group recovers", process=process.row.id[:12], why=text)
                self._job_log.line(process.job, text, source="xmigd", level="warning", process=process.row.id)

    def _recover(self, members: Mapping[str, tuple[str, ...]]) -> None:
        self._meetings.forget_of(members)
        present = {name: self._processes[name] for name in members if name in self._processes}
        if len(members) > 1 and any(self._forsaken(process) for process in present.values()):
            why = "a rank's journal was full, and it took a snapshot without the others, which none of all followed"
            for process in present.values():
                process.tell(e.GroupHopeless(t=now(), reason=why))
            return
        decided = max((self._rounds(process)[1] for process in present.values()), default=0)
        logger.info("a group goes on", members=len(present), round=decided)
        for name, process in present.items():
            process.tell(e.GroupGo(t=now(), decided=decided, gone=members[name]))

    def _rounds(self, process: Process) -> tuple[int, int]:
        """The last that its journal has prepared, and the last decided."""
        if process.memory is None:
            return 0, 0
        try:
            return header.rounds(process.memory.journal.fileno(), self._group_at)
        except OSError:
            return 0, 0

    def _forsaken(self, process: Process) -> bool:
        return process.memory is not None and header.forsaken(process.memory.journal.fileno(), self._group_at)

    def _open(self) -> None:
        marked = [process.row.id for process in self._processes.values() if self.in_rounds(process)]
        self._tell(lambda t: self._groups.open(t, marked))

    def _meet(self, process: Process, message: m.Meet) -> None:
        """A rank of a communicator looks for the others."""
        offer = Offer(message.meeting, message.rank, message.ranks, message.offer)
        for answer in self._meetings.attend(now(), process.row.id, process.row.uid, offer):
            if (other := self._processes.get(answer.process)) is not None:
                other.met(answer)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due = self._groups.due
        self._timer = None if due is None else self._loop.call_later(max(0, due - now()) / 1e9, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._tell(self._groups.wake)


def _who(process: Process) -> Who:
    return Who(process.row.id, process.row.uid, process.job.id)
