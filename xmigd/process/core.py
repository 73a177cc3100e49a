"""What the machines of a process stand on: its state, its servers with their numbers, timers, what is to be done."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Literal

from xmigd.process import events as e
from xmigd.process.limits import Limits

State = Literal["starting", "running", "recovering", "suspended", "losing", "lost", "draining", "ended"]
# preparing: a standby, from the moment in which the server of its process begins to end.
# copying: the target of a move, before it has the process; a holder, before it has everything.
# stopped: the source, once it has handed over.
ServerState = Literal["spawning", "warm", "preparing", "copying", "assigned", "stopped", "keeping", "dying"]

TRANSITIONS: dict[State, frozenset[State]] = {
    "starting": frozenset({"running", "recovering", "suspended", "ended"}),  # at once: found by a new daemon
    "running": frozenset({"recovering", "suspended", "losing", "draining", "ended"}),
    "suspended": frozenset({"running", "recovering", "ended"}),
    "recovering": frozenset({"running", "losing", "draining", "ended"}),
    "losing": frozenset({"lost", "ended"}),
    "lost": frozenset({"ended"}),
    "draining": frozenset({"ended"}),
    "ended": frozenset(),
}

FIRST_BACKOFF = 0.1
LAST_BACKOFF = 5.0


@dataclass(frozen=True, slots=True)
class Transition:
    t: int
    source: State
    target: State
    cause: e.Event | None
    why: str


@dataclass(frozen=True, slots=True)
class Death:
    """Why a server is dying or dead, as far as it is known before its exit is seen."""

    record: e.FaultRecord | None
    occurred: int | None = None
    innocent: bool = False  # injected, or from outside: says nothing about the program
    expected: int | None = None  # the stall that was expected when it happened, ns
    why: str = ""  # where there is no record


class Core(ABC):
    """Small parts, without a story. `handle` is the only entry."""

    def __init__(self, limits: Limits | None) -> None:
        self.limits = limits or Limits()
        self.state: State = "starting"
        self.servers: dict[int, ServerState] = {}
        self.active: int | None = None
        self.standby: int | None = None
        self.armed: dict[int, e.Injection] = {}
        self.unrecoverable: str | None = None
        self._salvage = False  # a server of a process that is being lost stands still for its last checkpoint, or will
        self.opened = False  # the devices: before the program needs them it costs them nothing, and has no standby
        self.story: deque[Transition] = deque(maxlen=64)
        self._timers: set[str] = set()
        self._next_server = 0
        self._backoff = FIRST_BACKOFF
        self._snapshot = (0, 0)  # number, sequence
        self._alone = False  # the device takes one server only
        self._joining: set[int] = set()  # servers that make communicators
        self._cause: e.Event | None = None
        self._out: list[e.Instruction] = []
        self._t = 0

    def handle(self, event: e.Event) -> list[e.Instruction]:
        """Take an event; return what is to be done, in order."""
        self._cause, self._out, self._t = event, [], event.t
        written_off = isinstance(event, e.ServerEvent) and event.server not in self.servers
        if self.state != "ended" and not written_off:
            self._take(event)
        return self._out

    @abstractmethod
    def _take(self, event: e.Event) -> None:
        """What it means, and what is to be done."""

    def _new_number(self) -> int:
        number = self._next_server
        self._next_server += 1
        return number

    def _spawn(self) -> int:
        number = self._new_number()
        self.servers[number] = "spawning"
        self._out.append(e.Spawn(number, late=not self.opened or (self.state == "losing" and not self._salvage)))
        return number

    def _want_standby(self, settle: float = 0.0) -> None:
        """Now, or once the active server is past what a standby that starts would hold up. It waits once only: what
        the server does afterwards does not leave the process without a standby for longer."""
        if not self._standby_wanted or self.standby is not None or self._timers & {"spawn", "settle", "join"}:
            return
        if self.active in self._joining:
            self._timer("join", self.limits.join_patience)
        elif settle:
            self._timer("settle", settle)
        else:
            self.standby = self._spawn()

    def _spawn_standby(self) -> None:
        """It has waited long enough."""
        self._do_not_wait()
        if self._standby_wanted and self.standby is None and "spawn" not in self._timers:
            self.standby = self._spawn()

    def _do_not_wait(self) -> None:
        self._clear("settle")
        self._clear("join")

    @property
    def _standby_wanted(self) -> bool:
        return self.limits.standby and self.opened and not self._alone

    def _drop_standby(self) -> None:
        self._do_not_wait()
        if self.standby is not None:
            number, self.standby = self.standby, None
            self._kill(number, "its process needs no standby any more")

    def _kill(self, number: int, why: str) -> None:
        self.servers[number] = "dying"
        self._out.append(e.Kill(number, why))

    def _timer(self, name: str, seconds: float) -> None:
        self._timers.add(name)
        self._out.append(e.SetTimer(name, seconds))

    def _clear(self, name: str) -> None:
        if name in self._timers:
            self._timers.discard(name)
            self._out.append(e.ClearTimer(name))

    def _go(self, target: State, why: str) -> None:
        assert target in TRANSITIONS[self.state]
        self.story.append(Transition(self._t, self.state, target, self._cause, why))
        self.state = target
        self._save(why)

    def _save(self, why: str) -> None:
        self._out.append(e.SaveState(self.state, self.active, why))
