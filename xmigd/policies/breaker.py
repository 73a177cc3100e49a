"""The circuit breaker: automation stops when it acts too often, until a person closes it.

What counts is what automation does to jobs by itself: drains of failing devices (automation.py), processes given up as
lost.
Recoveries in place do not count: they change nothing that anybody sees. While it is open, whoever acts by themselves
asks `check` first and is refused; what people ask for is done. It stays open across restarts.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from xmigd import log
from xmigd.database import models
from xmigd.database.writer import Writer
from xmigd.errors import Conflict
from xmigd.events.bus import Bus
from xmigd.policies.service import BreakerPolicy

logger = log.get("breaker")

Action = Literal["loss", "cordon", "drain", "lose"]
ROW = 1


class Breaker:
    def __init__(self, writer: Writer, readers: Engine, bus: Bus, policy: Callable[[], BreakerPolicy]) -> None:
        self._writer = writer
        self._bus = bus
        self._policy = policy
        self.acts: Counter[Action] = Counter()  # since the daemon's start
        self.refused = 0
        with Session(readers) as session:
            row = session.get(models.Breaker, ROW)
            self.is_open = row is not None and row.state == "open"
            self.why = "" if row is None else row.why
            self.changed_at = None if row is None else row.changed_at
            self._actions: list[dict[str, Any]] = [] if row is None else list(row.actions)

    def actions(self) -> list[dict[str, Any]]:
        """Those that count now, oldest first."""
        since = time.time() - self._policy().window_seconds
        self._actions = [action for action in self._actions if action["at"] >= since]
        return list(self._actions)

    def check(self) -> None:
        """Raises Conflict: automation is to leave things alone."""
        if self.is_open:
            self.refused += 1
            raise Conflict(
                f"the circuit breaker is open: {self.why}", code="breaker_open",
                hint="find out why so much happened, then POST /v1/circuit-breaker:reset",
            )  # fmt: skip

    def acted(self, action: Action, subject_type: str, subject_id: str, why: str = "") -> None:
        """Automation has done something by itself."""
        self.acts[action] += 1
        self.actions()
        self._actions.append(
            {"at": time.time(), "action": action, "subject": {"type": subject_type, "id": subject_id}, "why": why}
        )
        policy = self._policy()
        if not self.is_open and len(self._actions) >= policy.max_actions:
            count, window = len(self._actions), policy.window_seconds
            actions = "action" if count == 1 else "actions"
            self._open(f"{count} automatic {actions} within {window:g} s, the last one: {action}")
        row = self._row()
        self._writer.record("breaker.acted", lambda session: session.merge(row))

    async def reset(self, by: str) -> None:
        """A person closes it."""
        before = (self.is_open, self.why, self.changed_at, self._actions)
        self._actions = []
        was_open, self.is_open, self.why, self.changed_at = self.is_open, False, f"closed by {by}", time.time()
        row = self._row()
        try:
            await self._writer.write("breaker.reset", lambda session: session.merge(row))
        except Exception:
            self.is_open, self.why, self.changed_at, self._actions = before
            raise
        if was_open:
            self._tell()

    def _open(self, why: str) -> None:
        self.is_open, self.why, self.changed_at = True, why, time.time()
        logger.error("the circuit breaker is open: automation stops", why=why)
        self._tell()

    def _tell(self) -> None:
        data = {"state": self.state, "why": self.why}
        self._bus.publish("breaker.changed", "circuit-breaker", "automation", None, data)

    @property
    def state(self) -> Literal["open", "closed"]:
        return "open" if self.is_open else "closed"

    def _row(self) -> models.Breaker:
        return models.Breaker(
            id=ROW, state=self.state, why=self.why, changed_at=self.changed_at, actions=list(self._actions)
        )
