"""What xMIG decides by itself: a device that faults again and again is drained.

A fault counts if it was the device's and not the program's: the program has come past it, to another snapshot. Before
it acts automation asks the circuit breaker, and it never takes the last device that takes processes. Faults are counted
from the daemon's start on.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Callable

from xmigd import log
from xmigd.errors import Conflict, XmigError
from xmigd.migrations.drains import Drains
from xmigd.migrations.places import Places
from xmigd.policies.breaker import Breaker
from xmigd.policies.service import DevicePolicy
from xmigd.security.audit import XMIGD, Audit

logger = log.get("automation")


class Automation:
    """Lives in the event loop's thread."""

    def __init__(
        self, *, breaker: Breaker, audit: Audit, drains: Drains, places: Places, policy: Callable[[], DevicePolicy]
    ) -> None:
        self._breaker = breaker
        self._audit = audit
        self._drains = drains
        self._places = places
        self._policy = policy
        self._faults: defaultdict[str, deque[float]] = defaultdict(deque)
        self._acting: dict[str, asyncio.Task[None]] = {}

    def device_faulted(self, device: str) -> None:
        """A program has come past a fault of this device."""
        policy, now = self._policy(), time.monotonic()
        faults = self._faults[device]
        faults.append(now)
        while faults[0] < now - policy.window_seconds:
            faults.popleft()
        if 0 < policy.max_faults <= len(faults) and device not in self._acting:
            why = f"{len(faults)} faults of the device within {policy.window_seconds:g} s"
            task = self._acting[device] = asyncio.get_running_loop().create_task(self._drain(device, why))
            task.add_done_callback(lambda _: self._acting.pop(device, None))

    async def _drain(self, device: str, why: str) -> None:
        try:
            known = {place.id: place for place in await self._places.known()}
            if known[device].cordoned:
                return
            if not any(p.configured and p.healthy and not p.cordoned for p in known.values() if p.id != device):
                logger.warning("a failing device is left as it is", device=device, why="it is the only one")
                return
            self._breaker.check()
            intent = await self._audit.intent(XMIGD, f"drain {device}", detail={"why": why})
            self._breaker.acted("drain", "device", device, why)
            outcome = "done"
            try:
                await self._drains.drain(device, reason=why, requestor=XMIGD.name)
            except XmigError as error:
                outcome = error.code
            self._audit.outcome(intent, XMIGD, f"drain {device}", outcome)
            logger.warning("draining a device", device=device, why=why, outcome=outcome)
        except Conflict as error:
            logger.warning("a failing device is left as it is", device=device, why=error.message)
        except XmigError as error:
            logger.error("a failing device could not be drained", device=device, why=error.message)
