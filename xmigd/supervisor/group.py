"""Carries what ranks' servers and processes tell to the machine of groups, and does what it says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from xmigd import log
from xmigd.devices.header import decided_round
from xmigd.groups import groups as g
from xmigd.groups.meetings import Meetings
from xmigd.ipc import messages as m
from xmigd.process import events as e

if TYPE_CHECKING:
    from xmigd.supervisor.process import Process

logger = log.get("group")


class Group:
    def __init__(
        self, processes: Mapping[str, Process], meetings: Meetings, group_at: int, expected: Callable[[], list[str]]
    ) -> None:
        """``group_at``: where journals say which round was decided. ``expected``: processes of an earlier daemon
        that have not announced themselves yet."""
        self._processes = processes
        self._meetings = meetings
        self._group_at = group_at
        self._expected = expected
        self._groups = g.Groups(now())
        self._timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    # --- what is told -----------------------------------------------------------------------------------------------

    def reported(self, process: Process, message: m.GroupMessage) -> None:
        t, name = now(), process.row.id
        match message:
            case m.Communicator(state="joined"):
                self._do(self._groups.joined(t, name, message.name, message.rank))
            case m.Communicator(state="ended"):
                self._groups.ended(name, message.name)
            case m.Communicator():
                self._groups.past(name, message.name)
            case m.CommunicatorFailed():
                self._do(self._groups.failed(t, name, message.name))
            case m.GroupWanted():
                self._do(self._groups.wanted(t, name))
            case m.GroupStopped():
                self._do(self._groups.stopped(t, name, message.round, message.counts))
            case m.GroupHeld():
                self._do(self._groups.held(t, name, message.round))
            case m.GroupBusy():
                logger.debug("no snapshot of the group now", process=name[:12], why=message.why)
                self._do(self._groups.busy(t, name, message.round))
        if isinstance(message, m.Communicator):
            process.tell(e.Grouped(t=t, on=self._groups.grouped(name)))
        self._look_again()

    def committed(self, process: Process, snapshot: m.Snapshot) -> None:
        if snapshot.round:
            self._groups.committed(now(), process.row.id, snapshot.round)

    def broken(self, process: Process, reason: str) -> None:
        self._do(self._groups.broken(now(), process.row.id, f"{self._about(process)}: {reason}"))

    def waits(self, process: Process, reason: str) -> None:
        self._do(self._groups.waits(now(), process.row.id, f"{self._about(process)}: {reason}"))

    def is_now(self, process: Process, state: str, why: str) -> None:
        if state == "running":
            self._groups.runs(now(), process.row.id)
        elif state in ("losing", "ended"):
            self._do(self._groups.left(now(), process.row.id, why if state == "losing" else ""))
            self._look_again()

    def _about(self, process: Process) -> str:
        return f"the server of rank {self._groups.rank_of(process.row.id)} is lost"

    # --- what is done -----------------------------------------------------------------------------------------------

    def _do(self, instructions: list[g.Instruction]) -> None:
        for one in instructions:
            match one:
                case g.Stop():
                    self._send(one.process, "group_stop", round=one.round, counts=dict(one.counts))
                case g.Hold():
                    self._send(one.process, "group_hold", round=one.round, gone=list(one.gone))
                case g.Take():
                    self._send(one.process, "group_take", round=one.round)
                case g.Continue():
                    self._send(one.process, "group_continue", round=one.round)
                case g.NotRecovered():
                    self._send(one.process, "communicator_lost", name=one.name)
                case g.Break():
                    self._tell(one.process, e.GroupLost(t=now(), reason=one.reason))
                case g.Hopeless():
                    self._tell(one.process, e.GroupHopeless(t=now(), reason=one.reason))
                case g.Recover():
                    self._recover(one)

    def _recover(self, all_of: g.Recover) -> None:
        decided = max(self._decided(name) for name in all_of.processes)
        logger.info("all ranks recover", ranks=len(all_of.processes), round=decided)
        self._meetings.forget_of(frozenset(all_of.processes))
        for name in all_of.processes:
            self._tell(name, e.GroupGo(t=now(), decided=decided, gone=all_of.gone))

    def _decided(self, name: str) -> int:
        process = self._processes.get(name)
        if process is None or process.memory is None:
            return 0
        return decided_round(process.memory.journal.fileno(), self._group_at)

    def _send(self, to: str, type: str, **fields: object) -> None:
        process = self._processes.get(to)
        server = None if process is None else process.server(process.machine.active)
        if server is not None:
            server.send(m.pack(type, **fields))

    def _tell(self, name: str, event: e.Event) -> None:
        if (process := self._processes.get(name)) is not None:
            process.tell(event)

    # --- time -------------------------------------------------------------------------------------------------------

    def _look_again(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = self._groups.due_at()
        if self._groups.unresolved():
            at = min(at or now() + g.RESOLVE, now() + g.RESOLVE)
        if at is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0, at - now()) / 1e9, self._time_has_come)

    def _time_has_come(self) -> None:
        self._timer = None
        self._do(self._groups.tick(now()))
        if self._groups.unresolved() and not self._expected():
            for name in list(self._groups.unresolved()):
                decided = max(self._decided(each) for each in self._groups.members(name))
                self._do(self._groups.resolve(name, decided))
        self._look_again()


def now() -> int:
    return time.monotonic_ns()
