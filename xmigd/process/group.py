"""A process that communicates: what its recovery has to do with the other members of its group.

Its server is never replaced alone. The group hears at once that it is lost (`GroupBroken`), all the others' servers are
killed (`GroupLost`), and whoever has seen its server's exit waits (`AwaitGroup`), with a warm server if there is one.
When all wait, all go on (`GroupGo`). What else happens to them until then is each machine's own business.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

from xmigd.process import events as e
from xmigd.process.core import Core, Death
from xmigd.process.limits import Limits

CUDA_ERROR_DEVICE_UNAVAILABLE = 46


class GroupMember(Core):
    """The part of a process's machine that its group sees."""

    def __init__(self, limits: Limits | None) -> None:
        super().__init__(limits)
        self.grouped = False
        self.awaits_group = False
        self._deaths: dict[int, Death] = {}
        self._broken = False  # the group knows that the server is lost
        self._go_ahead: e.GroupGo | None = None  # since the last server was lost

    def _take_of_group(self, event: e.Event) -> None:
        match event:
            case e.Grouped():
                self.grouped = event.on
                if not event.on:
                    waited, self.awaits_group, self._broken = self.awaits_group, False, False
                    if waited:
                        self._assign_if_warm()
            case e.GroupLost():
                self._group_lost(event.reason)
            case e.GroupGo() if self.awaits_group:
                self._go_ahead, self._broken, self.awaits_group = event, False, False
                self._assign_if_warm()
            case e.GroupHopeless():
                self._group_hopeless(event.reason)
            case _:
                pass

    def _break(self, reason: str) -> None:
        """Its server is lost, or will be."""
        if self.grouped and not self._broken and self.state in ("running", "recovering"):
            self._broken = True
            self._out.append(e.GroupBroken(reason))

    def _broken_for_good(self, reason: str) -> None:
        """Its server's exit has been seen: a go-ahead of the group was for that one."""
        self._break(reason)
        self._go_ahead = None

    def _waits_in_vain(self, reason: str) -> None:
        """It is lost for good. A go-ahead may be on its way, and others have theirs: they would go on without it."""
        if self.awaits_group:
            self.awaits_group = False
            self._out.append(e.GroupBroken(reason))

    def _await_group(self) -> None:
        if self._must_wait_for_group and not self.awaits_group:
            self.awaits_group = True
            self._out.append(e.AwaitGroup())

    @property
    def _must_wait_for_group(self) -> bool:
        return self.grouped and self.state == "recovering" and self._go_ahead is None

    def _with_group(self, assign: e.Assign) -> e.Assign:
        go = self._go_ahead
        return (
            assign if go is None else replace(assign, decided=go.decided, gone=go.gone, communicators=go.communicators)
        )

    def _assign_if_warm(self) -> None:
        if self.state == "recovering" and self.active is not None and self.servers[self.active] == "warm":
            self._assign()

    def _group_lost(self, reason: str) -> None:
        if not self.grouped or self.state not in ("running", "recovering"):
            return
        self._broken = True
        if self._kill_for_group(reason) or self.awaits_group or self.state == "running":
            return
        self._go_ahead = None
        if self.active is not None and self.servers[self.active] != "dying":
            self._await_group()  # it was to get its next server any moment

    def _kill_for_group(self, reason: str) -> bool:
        """Is an exit to come, of a server that has the process?"""
        if self.active is None or self.servers[self.active] not in ("assigned", "dying"):
            return False
        if self.servers[self.active] == "assigned":
            self._deaths.setdefault(self.active, Death(None, self._t, innocent=True, why=reason))
            self._kill(self.active, reason)
        return True

    def _group_hopeless(self, reason: str) -> None:
        if self.state not in ("running", "recovering"):
            return
        self.unrecoverable = reason
        if not self._kill_for_group(reason) and self.state == "recovering":
            self.awaits_group = False
            if self.standby is None:
                self.standby, self.active = self.active, None  # what waits can be the one that says so
            self._lose(CUDA_ERROR_DEVICE_UNAVAILABLE, reason)

    @abstractmethod
    def _assign(self) -> None:
        """The active server is warm: give it the process."""

    @abstractmethod
    def _lose(self, error: int, why: str) -> None:
        """It cannot be recovered."""
