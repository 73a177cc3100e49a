"""A suspension that is past its point of no return at the deadline: a moment in which no real server stays."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from xmigd.errors import Conflict
from xmigd.operations.operation import Operation
from xmigd.operations.repository import OperationRow
from xmigd.scheduling.service import Preemptions


def row(kind: str, **fields: Any) -> OperationRow:
    values: dict[str, Any] = {
        "id": kind, "kind": kind, "state": "running", "phase": "begun", "subject_type": "job", "subject_id": "j",
        "job_id": "j", "owner": 0, "requestor": "me", "request": {}, "created_at": time.time(), "may_cancel": True,
    }  # fmt: skip
    return OperationRow(**values | fields)


@dataclass
class World:
    """A node of one process, whose suspension ends after the deadline, and which cannot be cancelled."""

    process: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(state="running", moving=SimpleNamespace(place="source"))
    )
    cancelled: list[str] = field(default_factory=list)
    resumptions: str = "succeeded"

    # Operations
    def register(self, kind: str, resolver: object) -> None:
        pass

    def active(self) -> list[OperationRow]:
        return []

    async def ended(self, part: OperationRow) -> OperationRow:
        while part.kind == "suspension" and not self.cancelled:
            await asyncio.sleep(0.001)
        if part.kind == "suspension":
            self.process.state, self.process.moving.place = "suspended", "host"
        elif self.resumptions == "succeeded":
            self.process.state, self.process.moving.place = "running", "source"
        return replace(part, state="succeeded" if part.kind == "suspension" else self.resumptions)  # type: ignore[arg-type]

    def cancel(self, operation: str) -> None:
        self.cancelled.append(operation)
        raise Conflict("it hands over", code="too_late_to_cancel")

    # Supervisor
    def processes_of(self, job: str) -> list[SimpleNamespace]:
        return [self.process]

    # Moves
    async def suspend_job(self, processes: object, to: str, *, requestor: str) -> OperationRow:
        return row("suspension")

    async def resume_job(self, processes: object, devices: object, *, requestor: str) -> OperationRow:
        return row("resumption")


def refusal(world: World) -> Conflict:
    anything: Any = world
    preemptions = Preemptions(
        supervisor=anything, moves=anything, checkpoints=anything, restoring=anything, operations=anything,
        jobs=anything, processes=anything,
    )  # fmt: skip

    async def preempt() -> None:
        operation = Operation(row("preemption"), lambda operation, new: None)
        await preemptions._preempt(operation, "j", "either", time.monotonic() + 0.05)

    with pytest.raises(Conflict) as caught:
        asyncio.run(preempt())
    return caught.value


def test_it_is_taken_back() -> None:
    world = World()
    error = refusal(world)
    assert (error.code, error.process_location) == ("deadline_exceeded", "source")
    assert "goes on running" in error.message
    assert (world.process.state, world.cancelled) == ("running", ["suspension"])


def test_it_cannot_be_taken_back() -> None:
    """Somebody else has its device: the answer says where the job is."""
    world = World(resumptions="failed")
    error = refusal(world)
    assert (error.code, error.process_location) == ("deadline_exceeded", "host")
    assert "goes on running" not in error.message
    assert world.process.state == "suspended"
