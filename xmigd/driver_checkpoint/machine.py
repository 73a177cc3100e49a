"""A move, a suspension or a resumption with the driver's checkpoints: results in, calls out, no I/O, no clock.

    RUNNING ──lock──▶ LOCKED ──checkpoint──▶ CHECKPOINTED ──restore──▶ LOCKED ──unlock──▶ RUNNING

What is called next follows from where the driver says that the process is and from where it is to be (`goal`): a call
whose answer was lost, or that did something else than it reported, is no special case.

Invariants:
  Before the restore on the target has succeeded, every failure makes the source the goal.
  Nothing is restored before the room for it was seen: a restore that runs out of memory leaves it stuck for good.
  It ends RUNNING, or says in which state it had to be left, and why.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["move", "suspend", "resume"]
State = Literal["running", "locked", "checkpointed", "failed", "gone"]
Goal = Literal["target", "source", "host"]
CallName = Literal["lock", "room", "checkpoint", "restore", "unlock", "wait"]
Phase = Literal["locking", "saving", "restoring", "unlocking", "rolling_back", "over"]
Outcome = Literal["running", "done", "failed", "cancelled"]
Location = Literal["source", "target", "host", "lost"]

MAX_RETRIES = 3  # of a call on the way back that fails; room is waited for longer
MAX_WAITS = 60  # for room on the way back, a `wait` each


@dataclass(frozen=True, slots=True)
class Call:
    """What is to be done next. `where`: of room and restore, which side it is about; host: the host's memory."""

    name: CallName
    where: Literal["source", "target", "host"] = "source"


@dataclass(frozen=True, slots=True)
class Result:
    """How a call ended, and the process's state as the driver says afterwards."""

    state: State
    error: str | None = None
    code: str = "driver_refused"


@dataclass
class Checkpointing:
    """See the module's docstring. `begin` once, then `after` each call; None: it is over."""

    kind: Kind
    goal: Goal = "target"
    phase: Phase = "locking"
    outcome: Outcome = "running"
    location: Location = "source"
    why: str | None = None  # the first failure
    code: str | None = None
    restored: Literal["source", "target"] | None = None
    has_room: set[str] = field(default_factory=set)
    cancelled: bool = False
    retries: int = 0
    waits: int = 0
    wait_due: bool = False
    last: Call | None = None

    def begin(self, state: State, *, abandoned: bool = False) -> Call | None:
        """`state`: where the process is now. `abandoned`: an earlier daemon left it there; it goes back."""
        if abandoned:
            self._go_back("xmigd ended in the middle of it", code="interrupted")
        elif self.kind == "suspend":
            self.goal = "host"
        elif self.kind == "resume":
            self.location = "host"
            self.phase = "restoring"
        return self._next(state)

    @property
    def may_cancel(self) -> bool:
        """Until the restore on the target is called: from then on the driver decides."""
        return self.goal != "source" and self.restored is None and not self._is(("restore",)) and self.kind != "resume"

    def cancel(self, why: str) -> bool:
        """Go back. Takes effect when the call under way is over."""
        if not self.may_cancel:
            return False
        self.cancelled = True
        self._go_back(why, code="cancelled")
        return True

    def after(self, result: Result) -> Call | None:
        """`last` is over."""
        call = self.last
        assert call is not None, "nothing was called"
        if call.name == "room":
            if result.error is None:
                self.has_room.add(call.where)
            else:
                self._no_room(result)
        elif call.name == "restore" and result.state in ("locked", "running"):
            # What the driver says counts, even if the answer was an error.
            self.restored = "source" if call.where == "source" else "target"
            self.location = self.restored
        elif result.error is not None:
            self._failed(result)
        self.last = None
        return self._next(result.state)

    def _next(self, state: State) -> Call | None:
        if state in ("failed", "gone"):
            why = "the driver gave the process up" if state == "failed" else "the process has ended"
            return self._over("failed", "lost", why, code="process_lost" if state == "failed" else "process_ended")
        if self.outcome != "running":
            return None
        decide = {"running": self._running, "locked": self._locked, "checkpointed": self._checkpointed}[state]
        call = decide()
        if call is not None:
            self.last = call
        return call

    def _running(self) -> Call | None:
        if self.restored == "target":
            return self._over("done", "target")
        if self.goal == "source":
            return self._over("cancelled" if self.cancelled else "failed", self.restored or "source")
        if self.kind == "resume":
            return self._over("failed", "source", "the process is running already", code="not_suspended")
        self.phase = "locking"
        return Call("lock")

    def _locked(self) -> Call | None:
        if self.restored is not None or self.goal == "source":
            if self.retries > MAX_RETRIES:
                return self._over("failed", self.restored or "source", "the process stays locked", code="stays_locked")
            self.phase = "unlocking" if self.goal != "source" else "rolling_back"
            return Call("unlock")
        self.phase = "saving"
        return Call("checkpoint") if "host" in self.has_room else Call("room", "host")

    def _checkpointed(self) -> Call | None:
        self.location = "host"
        self.restored = None
        if self.goal == "host":
            return self._over("done", "host")
        if self.kind == "resume" and self.goal == "source":
            return self._over("failed", "host")  # it was in the host's memory and stays there
        side: Literal["source", "target"] = "source" if self.goal == "source" else "target"
        if self.retries > MAX_RETRIES or self.waits > MAX_WAITS:
            return self._over("failed", "host", "it could not be restored at all", code="stays_checkpointed")
        self.phase = "restoring" if side == "target" else "rolling_back"
        if side not in self.has_room:
            wait, self.wait_due = self.wait_due, False
            return Call("wait" if wait else "room", side)
        self.has_room.discard(side)  # seen once, good for one call
        return Call("restore", side)

    def _no_room(self, result: Result) -> None:
        if self.goal == "source":
            # The memory that it had is taken; whoever has it may end.
            self.waits += 1
            self.wait_due = True
        else:
            self._go_back(result.error or "", result.code)

    def _failed(self, result: Result) -> None:
        if self.goal == "source" or self.restored is not None:
            self.retries += 1
        else:
            self._go_back(result.error or "", result.code)

    def _go_back(self, why: str, code: str) -> None:
        self.goal = "source"
        self.phase = "rolling_back"
        if self.why is None:
            self.why, self.code = why, code

    def _over(
        self, outcome: Outcome, location: Location, why: str | None = None, code: str | None = None
    ) -> Call | None:
        """Nothing more is called."""
        if self.outcome == "running":
            self.outcome = outcome
        self.location = location
        self.phase = "over"
        if why is not None:
            self.why = f"{self.why}; then: {why}" if self.why else why
            self.code = code if self.code is None or code in ("process_lost", "process_ended") else self.code
        return None

    def _is(self, names: tuple[str, ...]) -> bool:
        return self.last is not None and self.last.name in names
