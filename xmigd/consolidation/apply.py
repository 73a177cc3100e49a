"""Carrying a plan out: move after move, each an operation of its own; back to where it was when one fails, when a job
gets slower (the guard), or when that is requested.

Invariants:
  A process has one move at a time, and every move has its own intent on the disk: nothing here is executed twice,
  whatever becomes of the daemon.
  The operation's request names every move, so that the next daemon can say where each process is.
  Once the way back has begun, the operation cannot be cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from xmigd.consolidation.guard import Guard
from xmigd.errors import Cancelled, XmigError
from xmigd.migrations.service import Moves
from xmigd.operations.operation import Operation
from xmigd.supervisor.process import Process

BACK_WITHIN = 60.0  # seconds in which a process that is being recovered can be moved back
PASSES = ("not_running", "already_moving", "operation_under_way")  # codes of what is over soon
Part = dict[str, Any]


class Application:
    """One plan being applied. Lives in the event loop's thread."""

    def __init__(
        self, operation: Operation, moves: Moves, find: Callable[[str], Process | None], requestor: str
    ) -> None:
        self._operation = operation
        self._moves = moves
        self._find = find  # a process that runs
        self._requestor = requestor
        # Those of an undo were made before: they have a state.
        self.parts: list[Part] = [{"state": "pending"} | dict(part) for part in operation.request["moves"]]

    async def run(self, guard: Guard | None) -> dict[str, Any]:
        """Raises XmigError: everything is as it was, or the message says what is where. Raises Cancelled."""
        try:
            await self._move_all()
            seen = None if guard is None else await guard.watch(self._operation)
        except Cancelled:
            await self._back("it was cancelled")
            raise
        if guard is None or seen is None:
            return self._result()
        undone = await self.undo(guard.to_undo(seen, self.parts))
        guard.publish(seen, undone)
        return self._result() | {"guard": guard.result(seen, undone)}

    async def run_back(self) -> dict[str, Any]:
        """For somebody who wants it undone. Raises XmigError: something stays where it is."""
        if left := await self._all_back():
            raise _incomplete("the plan was to be undone", left)
        moved = sum(part["state"] == "moved_back" for part in self.parts)
        return {"moved": moved, "freed": [], "parts": self.parts, "guard": None}

    def _result(self) -> dict[str, Any]:
        returned = {part["source"] for part in self.parts if part["state"] == "moved_back"}
        return {
            "moved": sum(part["state"] == "succeeded" for part in self.parts),
            "freed": [device for device in self._operation.request["freed"] if device not in returned],
            "parts": self.parts, "guard": None,
        }  # fmt: skip

    async def _move_all(self) -> None:
        for number, part in enumerate(self.parts):
            self._report("moving", number)
            await self._move(part, part["target"], self._operation.cancelled)
            if part["state"] == "failed":
                why = f"process {part['process'][:12]} of job {part['job_name']} could not be moved from " \
                      f"{part['source']} to {part['target']}: {part['why']}"  # fmt: skip
                await self._back(why)
                raise XmigError(
                    f"{why}; the moves before it were undone", code="consolidation_failed",
                    hint="the cause is named; make a new plan when it is gone",
                )  # fmt: skip
            self._operation.check_cancelled()
        self._report("moving", len(self.parts))

    async def _move(self, part: Part, target: str, cancelled: asyncio.Event) -> None:
        """`part` gets its state: succeeded, failed, cancelled, or ended if its program has."""
        process = self._find(part["process"])
        if process is None:
            part["state"] = "ended"
            return
        move: Part = {}
        await self._moves.move_part(process, target, move, requestor=self._requestor, cancelled=cancelled)
        part |= {name: move.get(name) for name in ("operation", "state", "why", "code")}
        if part["code"] == "program_exited" or (part["state"] == "failed" and self._find(part["process"]) is None):
            part["state"] = "ended"
        if part["state"] == "cancelled" and not cancelled.is_set():  # somebody has cancelled this one move
            part["state"] = "failed"

    async def _back(self, why: str) -> None:
        """Undo what was moved, the last first. Raises XmigError: something stays where it is."""
        operation = self._operation
        operation.row = replace(operation.row, may_cancel=False, may_cancel_why="its moves are being undone")
        if left := await self._all_back():
            raise _incomplete(why, left)

    async def _all_back(self) -> list[Part]:
        """Those that stay."""
        self._report("rolling_back", 0)
        left = [part for part in await self.undo(self.parts) if part["state"] == "stays"]
        self._report("rolled_back", 0)
        return left

    async def undo(self, parts: Iterable[Part]) -> list[Part]:
        """Move these back, the last first. Returns those that had been moved: moved_back now, or they stay, or have
        ended."""
        done = [part for part in parts if part["state"] == "succeeded"]
        for part in reversed(done):
            end = time.monotonic() + BACK_WITHIN
            while True:
                await self._move(part, part["source"], asyncio.Event())
                if part["state"] != "failed" or part["code"] not in PASSES or time.monotonic() > end:
                    break
                await asyncio.sleep(0.2)
            if part["state"] != "ended":
                part["state"] = "moved_back" if part["state"] == "succeeded" else "stays"
                process = self._find(part["process"])
                part["device"] = part["target"] if process is None else process.row.device
            self._report(self._operation.row.phase, len(self.parts))
        return done

    def _report(self, phase: str, done: int) -> None:
        parts = [dict(part) for part in self.parts]
        self._operation.progress(phase, parts=parts, done=done, total=len(parts))


def _incomplete(why: str, left: Iterable[Part]) -> XmigError:
    where = ", ".join(f"{part['process'][:12]} on {part['device']}: {part['why']}" for part in left)
    return XmigError(
        f"{why}; not all moves could be undone: {where}", code="consolidation_incomplete",
        hint="these processes run where the message says; move them with xmigctl migrate, or make a new plan",
    )  # fmt: skip


def located(parts: Iterable[Mapping[str, Any]], devices: Mapping[str, str | None]) -> list[Part]:
    """Where each process is after a restart. `devices`: of those that live, as the database knows them."""
    last: dict[str, Part] = {}
    for part in parts:
        name = part["process"]
        source = last[name]["source"] if name in last else part["source"]  # of one with a detour the first
        device = devices.get(name)
        state = "ended" if device is None else "moved" if device == part["target"] else "not_moved"
        last[name] = dict(part) | {"source": source, "device": device, "state": state}
    return list(last.values())
