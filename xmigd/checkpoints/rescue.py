"""What remains of a process that is lost: a last checkpoint, or the newest that there is.

The program ends soon after it is informed that it is lost. So it is informed when the checkpoint is on the disk and was
read again, or cannot be made.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from xmigd import log
from xmigd.checkpoints.service import Checkpoints
from xmigd.errors import Conflict, XmigError, as_problem
from xmigd.events.bus import Bus
from xmigd.operations.service import Operations
from xmigd.process import events as e
from xmigd.supervisor.process import Process
from xmigd.supervisor.state import now

logger = log.get("rescue")


class Rescue:
    def __init__(self, *, checkpoints: Checkpoints, operations: Operations, bus: Bus) -> None:
        self._checkpoints = checkpoints
        self._operations = operations
        self._bus = bus
        self._tasks: set[asyncio.Task[None]] = set()

    def being_lost(self, process: Process) -> None:
        """If a server stands at its last snapshot, that is saved first."""
        task = asyncio.get_running_loop().create_task(self._rescue(process))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _rescue(self, process: Process) -> None:
        if not process.held:
            await self._newest(process)
            return
        reason = "its last checkpoint is made"
        try:
            checkpoint = await self._save(process)
            self._report(process, checkpoint, new=True, age=0.0)
        except XmigError as error:
            reason = f"its last checkpoint could not be made: {error}"
            problem = as_problem(error)
            data = {
                "why": "last", "code": error.code, "detail": problem["detail"], "hint": problem.get("hint", ""),
                "failures": 1, "operation": problem.get("operation"),
            }  # fmt: skip
            logger.warning("the last checkpoint could not be made", process=process.row.id[:12], why=str(error))
            self._bus.publish("checkpoint.failed", "job", process.job.id, process.job.id, data, owner=process.job.uid)
            await self._newest(process)
        except Exception:
            reason = "its last checkpoint could not be made"
            logger.exception("the last checkpoint could not be made")
        process.tell(e.Salvaged(t=now(), reason=reason))

    async def _save(self, process: Process) -> str:
        """Raises XmigError."""
        if not process.held_snapshot:
            raise Conflict(
                "a replay needs what copies from page-locked memory have brought since the last snapshot, and that is "
                "on the device only", code="no_snapshot", hint="set a policy: xmigctl checkpoint policy set",
            )  # fmt: skip
        row = await self._checkpoints.create(process, stop=False, requestor="xmigd", last=True)
        row = await self._operations.ended(row)
        if row.state != "succeeded":
            problem = row.error or {}
            raise Conflict(problem.get("detail", f"the {row.kind} has {row.state}"), code=problem.get("code"),
                           hint=problem.get("hint", ""))  # fmt: skip
        checkpoint = str((row.result or {})["checkpoint"])
        await self._checkpoints.check(checkpoint)
        return checkpoint

    async def _newest(self, process: Process) -> None:
        """No new one is possible."""
        found = await asyncio.to_thread(self._checkpoints.page, job=process.job.id, limit=1)
        if found:
            self._report(process, found[0].id, new=False, age=time.time() - found[0].created_at)

    def _report(self, process: Process, checkpoint: str, *, new: bool, age: float) -> None:
        """`age`: seconds."""
        data: dict[str, Any] = {
            "checkpoint": checkpoint, "process": process.row.id, "new": new, "age_s": age,
            "hint": f"xmigctl restore {checkpoint[:12]}",
        }  # fmt: skip
        logger.info("a lost process can be restored", process=process.row.id[:12], checkpoint=checkpoint[:12], new=new)
        self._bus.publish("checkpoint.last", "job", process.job.id, process.job.id, data, owner=process.job.uid)
