"""One request for many jobs: an operation with an outcome for each of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from xmigd.checkpoints.restoring import RESTORE
from xmigd.errors import Cancelled, Invalid, NotFound, XmigError
from xmigd.ids import new_id
from xmigd.jobs.repository import Conditions
from xmigd.jobs.service import Jobs
from xmigd.migrations.service import OPERATION, PREEMPTION, Moves
from xmigd.operations.operation import Operation
from xmigd.operations.repository import OperationRow
from xmigd.operations.service import Operations, Outcome
from xmigd.processes.service import Processes
from xmigd.scheduling.schemas import MOST_JOBS, Action, BulkRequest
from xmigd.scheduling.service import OVER, Preemptions
from xmigd.security.callers import Caller

BULK = "bulk"  # operation
AT_ONCE = 4  # jobs
# Operations of one job that an action starts.
KINDS: dict[Action, tuple[str, ...]] = {
    "suspend": (OPERATION["suspend"],), "resume": (OPERATION["resume"],), "preempt": (PREEMPTION,),
    "continue": (OPERATION["resume"], RESTORE), "migrate": (OPERATION["move"],), "end": (),
}  # fmt: skip

Found = dict[str, Any]  # of one job: job, state, operation, code, why
Begin = Callable[[str], Awaitable[list[OperationRow]]]


class Bulk:
    def __init__(
        self, *, jobs: Jobs, moves: Moves, processes: Processes, preemptions: Preemptions, operations: Operations
    ) -> None:
        self._jobs = jobs
        self._moves = moves
        self._processes = processes
        self._preemptions = preemptions
        self._operations = operations
        operations.register(BULK, self._resolve)

    async def start(self, caller: Caller, request: BulkRequest) -> OperationRow:
        """Raises NotFound, Invalid: no job is meant, or too many are."""
        jobs = list(dict.fromkeys(request.jobs)) or await asyncio.to_thread(self._selected, caller, request)
        id = new_id()

        async def work(operation: Operation) -> dict[str, Any]:
            return await self._work(operation, caller, request, jobs)

        return await self._operations.start(
            BULK, subject=(BULK, id), owner=caller.owner, requestor=caller.name, work=work, id=id,
            request={"action": request.action, "jobs": jobs},
        )  # fmt: skip

    def _selected(self, caller: Caller, request: BulkRequest) -> list[str]:
        labels = tuple(
            (key, value if given else None) for key, given, value in (each.partition("=") for each in request.labels)
        )
        rows, more = self._jobs.page(Conditions(owner=caller.owner, labels=labels), limit=MOST_JOBS)
        found = [row["id"] for row in rows if row["state"] not in OVER]
        if request.action == "continue":
            over = [row["id"] for row in rows if row["state"] in OVER]
            found += [job for job in over if self._preemptions.may_continue(job)]
        if more is not None:
            raise Invalid(f"labels: more than {MOST_JOBS} jobs have them", hint="choose fewer at once")
        if not found:
            raise NotFound("no job with these labels is there for that", hint="xmigctl job list --label KEY=VALUE")
        return found

    # --- the work -----------------------------------------------------------------------------------------------------

    async def _work(
        self, operation: Operation, caller: Caller, request: BulkRequest, jobs: list[str]
    ) -> dict[str, Any]:  # fmt: skip
        outcomes: dict[str, Found] = {}
        places = asyncio.Semaphore(AT_ONCE)
        begin = self._beginner(caller, request)

        async def one(job: str) -> None:
            async with places:
                if operation.cancelled.is_set():
                    outcomes[job] = _found(job, "cancelled", code="cancelled", why="it was cancelled before its turn")
                else:
                    outcomes[job] = await self._one(operation, job, begin)
            operation.progress("working", done=len(outcomes), total=len(jobs), outcomes=list(outcomes.values()))

        operation.progress("working", done=0, total=len(jobs), outcomes=[])
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(one(job))
        result = _result(request.action, [outcomes[job] for job in jobs])
        if operation.cancelled.is_set() and result["failed"]:
            operation.progress("cancelled", **result)
            raise Cancelled(f"it was cancelled; {result['succeeded']} of {len(jobs)} jobs were done before")
        return result

    def _beginner(self, caller: Caller, request: BulkRequest) -> Begin:
        """How the action begins for one job. Raises XmigError there."""
        requestor = caller.name

        async def begin(job: str) -> list[OperationRow]:
            match request.action:
                case "suspend":
                    processes = self._processes.of_job(caller, job)
                    return [await self._moves.suspend_job(processes, request.to, requestor=requestor)]
                case "resume":
                    processes = self._processes.of_job(caller, job)
                    return [await self._moves.resume_job(processes, request.devices, requestor=requestor)]
                case "preempt":
                    seconds, prefer = request.deadline_seconds, request.prefer
                    return [await self._preemptions.preempt(caller, job, seconds=seconds, prefer=prefer)]
                case "continue":
                    return [await self._preemptions.continue_(caller, job, request.devices)]
                case "migrate":
                    assert request.target is not None
                    return [
                        await self._moves.move(
                            process, request.target, engine="proxy", max_downtime_ms=None, requestor=requestor
                        )
                        for process in self._processes.of_job(caller, job)
                    ]
                case "end":
                    await self._jobs.stop(job, caller)
                    return []

        return begin

    async def _one(self, operation: Operation, job: str, begin: Begin) -> Found:
        try:
            rows = await begin(job)
        except XmigError as error:
            return _found(job, "failed", code=error.code, why=error.message)
        ended = [await self._ended(operation, row) for row in rows]
        return _of_rows(job, ended)

    async def _ended(self, operation: Operation, row: OperationRow) -> OperationRow:
        ended = asyncio.ensure_future(self._operations.ended(row))
        cancelled = asyncio.ensure_future(operation.cancelled.wait())
        try:
            await asyncio.wait({ended, cancelled}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                with contextlib.suppress(XmigError):  # past the point of no return
                    self._operations.cancel(row.id)
            return await ended
        finally:
            cancelled.cancel()
            ended.cancel()

    # --- after a restart ----------------------------------------------------------------------------------------------

    async def _resolve(self, operation: Operation) -> Outcome:
        """What was known of each job, or what became of the operation that was begun for it; others had no turn."""
        row, jobs = operation.row, operation.request.get("jobs", [])
        kinds = KINDS.get(operation.request.get("action", "end"), ())
        known: dict[str, Found] = {each["job"]: each for each in (row.progress or {}).get("outcomes", [])}
        for job in (job for job in jobs if job not in known):
            found = await asyncio.to_thread(self._operations.find, job=job, limit=100)
            begun = [each for each in found if each.kind in kinds and each.created_at >= row.created_at]
            if begun:
                known[job] = _of_rows(job, [await self._operations.ended(each) for each in begun])
            else:
                why = "xmigd ended before it was known whether this was done"
                known[job] = _found(job, "failed", code="interrupted", why=why)
        return Outcome(state="succeeded", result=_result(operation.request.get("action"), [known[job] for job in jobs]))


def _found(
    job: str, state: str, *, operation: str | None = None, code: str | None = None, why: str | None = None,
    result: dict[str, Any] | None = None,
) -> Found:  # fmt: skip
    return {"job": job, "state": state, "operation": operation, "code": code, "why": why, "result": result}


def _of_rows(job: str, rows: list[OperationRow]) -> Found:
    """The first that has not succeeded says why."""
    if not rows:
        return _found(job, "succeeded")
    row = next((each for each in rows if each.state != "succeeded"), rows[0])
    error = row.error or {}
    return _found(job, row.state, operation=row.id, code=error.get("code"), why=error.get("detail"), result=row.result)


def _result(action: str | None, outcomes: list[Found]) -> dict[str, Any]:
    succeeded = sum(each["state"] == "succeeded" for each in outcomes)
    return {"action": action, "succeeded": succeeded, "failed": len(outcomes) - succeeded, "outcomes": outcomes}
