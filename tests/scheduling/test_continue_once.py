"""What a preemption left goes on once, also if a scheduler asks twice: the second request has looked before the first
one's restoration was known, and would begin its own after that is over."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from xmigd.checkpoints.restoring import RESTORE
from xmigd.errors import Conflict
from xmigd.scheduling.service import Preemptions

CALLER: Any = SimpleNamespace(name="scheduler")


class Operations:
    def __init__(self) -> None:
        self.restored: list[Any] = []

    def register(self, kind: str, resolver: object) -> None:
        pass

    def active(self) -> list[Any]:
        return []

    def find(self, *, kind: str, **_: object) -> list[Any]:
        return self.restored if kind == RESTORE else [SimpleNamespace(result={"checkpoint": "c"})]


class Restoring:
    """A restoration that is over as soon as it is accepted, which takes a while."""

    def __init__(self, operations: Operations) -> None:
        self.operations = operations
        self.comes = asyncio.Event()
        self.may = asyncio.Event()

    async def restore(self, *_: object, **__: object) -> Any:
        self.comes.set()
        await self.may.wait()
        row = SimpleNamespace(result={"job": f"job {len(self.operations.restored)}"})
        self.operations.restored.append(row)
        return row


def test_two_requests_at_once() -> None:
    async def run() -> list[Any]:
        operations = Operations()
        restoring = Restoring(operations)
        fakes: dict[str, Any] = {
            "supervisor": SimpleNamespace(processes_of=lambda job: []), "moves": None, "processes": None,
            "jobs": SimpleNamespace(find=lambda job, caller: SimpleNamespace(name=job, state="ended")),
            "operations": operations, "checkpoints": None, "restoring": restoring,
        }  # fmt: skip
        preemptions = Preemptions(**fakes)
        asking = [asyncio.ensure_future(preemptions.continue_(CALLER, "j", [])) for _ in range(2)]
        await restoring.comes.wait()
        await asyncio.wait(asking, timeout=0.2)  # the other one has looked by then, or waits
        restoring.may.set()
        return await asyncio.gather(*asking, return_exceptions=True)

    found = asyncio.run(run())
    (refused,) = [each for each in found if isinstance(each, Conflict)]
    assert refused.code == "continued_already"
