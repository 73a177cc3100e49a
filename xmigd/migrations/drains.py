"""Drains: a device is cordoned, and every process moved off it, one after the other; and the plan of one before it.

What is not done in time is reported. A move that is under way then is cancelled: its process is on one device or on the
other, never on both.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from xmigd.errors import NotFound, XmigError
from xmigd.migrations import plan as plans
from xmigd.migrations.places import Places
from xmigd.migrations.plan import Target
from xmigd.migrations.service import Moves
from xmigd.operations.operation import Operation
from xmigd.operations.repository import OperationRow
from xmigd.operations.service import Operations
from xmigd.process.migration_events import Reason
from xmigd.supervisor.process import Process
from xmigd.supervisor.supervisor import Supervisor

AWAY = ("suspended", "lost", "ended")  # nothing of such processes is on a device


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What would become of a process."""

    process: Process
    target: str | None  # None: it is stuck
    needed_bytes: int
    reasons: list[Reason] = field(default_factory=list)
    expected_downtime_ms: float | None = None


class Drains:
    def __init__(
        self, *, supervisor: Supervisor, moves: Moves, operations: Operations, places: Places, devices: Sequence[str]
    ) -> None:
        """`devices`: of this node."""
        self._supervisor = supervisor
        self._moves = moves
        self._operations = operations
        self._places = places
        self._devices = devices
        self.before: Callable[[list[Process]], Awaitable[None]] | None = None  # with those that will be moved

    async def plan(self, devices: Sequence[str]) -> list[Step]:
        """If these were drained now, one process after the other. Changes nothing. Raises NotFound."""
        for device in devices:
            self._check(device)
        known = {place.id: place for place in await self._places.known()}
        for device in devices:
            known[device] = replace(known[device], cordoned=True, cordon_reason="it would be drained")
        steps = []
        for process in self._on(devices):
            downtime = await asyncio.to_thread(self._moves.estimate, process)
            targets = plans.make_plan(process, known.values(), downtime=downtime).targets
            needed, best = plans.needed_bytes(process), _best(targets)
            step = Step(process=process, target=None, needed_bytes=sum(needed), reasons=_reasons(targets))
            if best is not None:
                expected = best.expected_downtime_ms
                step = replace(step, target=best.device, reasons=[], expected_downtime_ms=expected)
                for name, bytes in zip(plans.names_of(best.device), needed, strict=True):
                    if (free := known[name].free_bytes) is not None:  # it is there for nobody else any more
                        known[name] = replace(known[name], free_bytes=max(0, free - bytes))
            steps.append(step)
        return steps

    async def drain(
        self, device: str, *, reason: str, requestor: str, within: float | None = None
    ) -> OperationRow:  # fmt: skip
        """Cordon it, and move every process off it, one after the other. `within`: seconds from now on. Raises
        NotFound."""
        self._check(device)
        ends = None if within is None else time.monotonic() + within

        async def work(operation: Operation) -> dict[str, Any]:
            return await self._drain(operation, device, reason, requestor, ends)

        return await self._operations.start(
            "drain", subject=("device", device), requestor=requestor, work=work, request={"device": device}
        )

    def _check(self, device: str) -> None:
        if device not in self._devices:
            raise NotFound(f"there is no device {device!r}", hint="GET /v1/devices lists them")

    def _on(self, devices: Iterable[str]) -> list[Process]:
        return [
            process
            for process in list(self._supervisor.processes.values())
            if process.state not in AWAY and set(devices).intersection(plans.names_of(process.row.device))
        ]

    async def _drain(
        self, operation: Operation, device: str, reason: str, requestor: str, ends: float | None
    ) -> dict[str, Any]:  # fmt: skip
        await self._places.cordon(device, reason, requestor)
        parts: list[dict[str, Any]] = []
        processes = self._on([device])
        if self.before is not None:
            await self.before(processes)
        for process in processes:
            operation.check_cancelled()
            if process.state in AWAY:
                continue  # meanwhile
            part: dict[str, Any] = {"process": process.row.id, "source": process.row.device, "target": None}
            parts.append(part)
            operation.progress("moving", parts=parts, done=len(parts) - 1)
            if ends is not None and time.monotonic() >= ends:
                part |= {"state": "not_begun", "why": "the time was up before its turn"}
            else:
                await self._drain_one(operation, process, part, requestor, ends)
            operation.progress("moving", parts=parts, done=len(parts))
        failed = [part for part in parts if part["state"] != "succeeded"]
        if failed:
            left = ", ".join(f"{part['process'][:12]}: {part['why']}" for part in failed)
            raise XmigError(
                f"{len(parts) - len(failed)} of {len(parts)} processes were moved; on {device} stay {left}",
                code="drain_incomplete", hint="make room elsewhere and drain again; the device stays cordoned",
            )  # fmt: skip
        return {"device": device, "moved": len(parts), "parts": parts}

    async def _drain_one(
        self, operation: Operation, process: Process, part: dict[str, Any], requestor: str, ends: float | None
    ) -> None:  # fmt: skip
        targets = (await self._moves.plan(process)).targets
        best = _best(targets)
        if best is None:
            why = "; ".join(dict.fromkeys(reason.text for reason in _reasons(targets)))
            part |= {"state": "failed", "why": why or "there is no other device"}
            return
        await self._moves.move_part(
            process, best.device, part, requestor=requestor, cancelled=operation.cancelled, ends=ends
        )


def _best(targets: Iterable[Target]) -> Target | None:
    return max((each for each in targets if each.allowed), key=lambda each: each.room_bytes or 0, default=None)


def _reasons(targets: Iterable[Target]) -> list[Reason]:
    """Why it can go nowhere, each reason once. That its own device is no target is none."""
    found = (reason for target in targets for reason in target.reasons if reason.code != "same_device")
    return list({(reason.code, reason.text): reason for reason in found}.values())
