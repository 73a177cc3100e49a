"""Jobs are preempted within a deadline, and continue later.

Invariants:
  At the deadline a job is suspended, or is a checkpoint, or runs: what was begun and is not done is cancelled, and what
  was done too late is taken back.
  Whatever fails, the job stays where it was, and the answer says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from xmigd import log
from xmigd.checkpoints.restoring import RESTORE, Restoring
from xmigd.checkpoints.service import CREATE, Checkpoints
from xmigd.errors import Cancelled, Conflict, ProcessLocation, XmigError
from xmigd.jobs.service import Jobs
from xmigd.migrations.service import OPERATION, PREEMPTION, Moves
from xmigd.operations.operation import Operation
from xmigd.operations.repository import OperationRow
from xmigd.operations.service import Operations, Outcome, interrupted
from xmigd.process.migration_events import Reason
from xmigd.processes.service import Processes
from xmigd.scheduling.schemas import Prefer
from xmigd.security.callers import Caller
from xmigd.supervisor.process import Process
from xmigd.supervisor.supervisor import Supervisor

logger = log.get("scheduling")

PARTS = (OPERATION["suspend"], CREATE)  # operations that a preemption consists of
Method = Literal["host", "file", "checkpoint"]
METHODS: dict[Prefer, tuple[Method, ...]] = {
    "suspend": ("host",), "checkpoint": ("checkpoint",), "either": ("host", "file", "checkpoint"),
}  # fmt: skip
NAMES: dict[Method, str] = {
    "host": "suspending to host memory", "file": "suspending to files", "checkpoint": "making a checkpoint",
}  # fmt: skip
OVER = ("ended", "stopped", "lost")  # jobs
FOUND_WITHIN = 60.0  # seconds after a start in which a process of the last daemon is found again
LOOKED_AT = 100  # operations of a job that are looked at


@dataclass(slots=True)
class _Try:
    """Of a preemption."""

    method: Method
    code: str
    why: str

    def __str__(self) -> str:
        return f"{NAMES[self.method]}: {self.why} ({self.code})"


class Preemptions:
    def __init__(
        self, *, supervisor: Supervisor, moves: Moves, checkpoints: Checkpoints, restoring: Restoring,
        operations: Operations, jobs: Jobs, processes: Processes,
    ) -> None:  # fmt: skip
        self._supervisor = supervisor
        self._moves = moves
        self._checkpoints = checkpoints
        self._restoring = restoring
        self._operations = operations
        self._jobs = jobs
        self._processes = processes
        self._continuing = asyncio.Lock()  # from the look whether it has continued until its restoration has begun
        operations.register(PREEMPTION, self._resolve)

    # --- what is requested --------------------------------------------------------------------------------------------

    async def preempt(self, caller: Caller, job: str, *, seconds: float, prefer: Prefer) -> OperationRow:
        """Raises NotFound: none of its programs runs. Raises Conflict: it is being preempted already."""
        owner = self._processes.of_job(caller, job)[0].job.uid
        return await self.preempt_job(job, owner, seconds=seconds, prefer=prefer, requestor=caller.name)

    async def preempt_job(
        self, job: str, owner: int, *, seconds: float, prefer: Prefer, requestor: str
    ) -> OperationRow:  # fmt: skip
        """The same for the daemon itself, with the user whose job it is."""
        ends = time.monotonic() + seconds

        async def work(operation: Operation) -> dict[str, Any]:
            return await self._preempt(operation, job, prefer, ends)

        return await self._operations.start(
            PREEMPTION, subject=(PREEMPTION, job), job_id=job, owner=owner, requestor=requestor,
            work=work, request={"prefer": prefer, "deadline": time.time() + seconds},
        )  # fmt: skip

    async def foresee(
        self, job: str, prefer: Prefer, before: Sequence[Process] = ()
    ) -> tuple[Method | None, list[Reason]]:  # fmt: skip
        """How it would be preempted now, and what prevents the ways that are tried before. Changes nothing. `before`:
        processes that would be in host memory by then."""
        reasons: list[Reason] = []
        processes = self._supervisor.processes_of(job)
        for method in METHODS[prefer]:
            try:
                if not processes:
                    raise Conflict("the job has ended meanwhile", code="program_exited")
                if method == "checkpoint":
                    await self._checkpoints.check_creation(processes[0])
                    return method, reasons
                also = before if method == "host" else ()
                against = await self._moves.against_suspension([*processes, *also], method)
                if not against:
                    return method, reasons
                reasons += [Reason(why.code, f"{NAMES[method]}: {why.text}") for why in against]
            except XmigError as error:
                reasons.append(Reason(error.code, f"{NAMES[method]}: {error.message}"))
        return None, reasons

    async def continue_(self, caller: Caller, job: str, devices: Sequence[str]) -> OperationRow:
        """Resume it if it is suspended; restore it, in a job of its own, if it was preempted as a checkpoint. Raises
        NotFound, Conflict: it runs, has continued already, or was not preempted."""
        info = await asyncio.to_thread(self._jobs.find, job, caller)
        processes = self._supervisor.processes_of(job)
        if any(process.state == "suspended" for process in processes):
            # This is for schedulers: the devices that one names are of its allocation now.
            return await self._moves.resume_job(processes, devices, requestor=caller.name, leaves_allocation=True)
        if processes or info.state not in OVER:
            raise Conflict(
                f"job {info.name} is not suspended, and not over",
                code="not_suspended",
                hint="there is nothing to continue",
            )
        checkpoint = await asyncio.to_thread(self._left, job)
        if checkpoint is None:
            raise Conflict(
                f"job {info.name} is over, and was not preempted as a checkpoint", code="not_preempted",
                hint="xmigctl checkpoint list lists its checkpoints; xmigctl restore restores one",
            )  # fmt: skip
        async with self._continuing:
            for row in self._operations.active():
                if (row.kind, row.subject_id) == (RESTORE, checkpoint):
                    raise Conflict(f"job {info.name} is being continued", code="operation_under_way", operation=row.id,
                                   hint=f"wait for it: GET /v1/operations/{row.id}/wait")  # fmt: skip
            again = await asyncio.to_thread(self._restored, checkpoint)
            if again is not None:
                raise Conflict(f"job {info.name} has continued already, as job {again}", code="continued_already",
                               hint=f"xmigctl job show {again[:12]}")  # fmt: skip
            return await self._restoring.restore(caller, checkpoint, devices, requestor=caller.name)

    def may_continue(self, job: str) -> bool:
        """Was it preempted as a checkpoint, and has not gone on since? Reads the database."""
        checkpoint = self._left(job)
        return checkpoint is not None and self._restored(checkpoint) is None

    def _left(self, job: str) -> str | None:
        """The checkpoint that its last preemption left."""
        for row in self._operations.find(job=job, kind=PREEMPTION, state="succeeded", limit=1):
            found: str | None = (row.result or {}).get("checkpoint")
            return found
        return None

    def _restored(self, checkpoint: str) -> str | None:
        """The job that goes on from it."""
        for row in self._operations.find(subject=checkpoint, kind=RESTORE, state="succeeded", limit=1):
            return str((row.result or {}).get("job"))
        return None

    # --- the work -----------------------------------------------------------------------------------------------------

    async def _preempt(self, operation: Operation, job: str, prefer: Prefer, ends: float) -> dict[str, Any]:
        began = time.monotonic()
        tried: list[_Try] = []
        for method in METHODS[prefer]:
            resumed = await self._resumed(job, operation, ends)
            processes = self._supervisor.processes_of(job)
            if not processes:
                raise Conflict("the job has ended meanwhile", code="program_exited")
            operation.check_cancelled(processes[0].moving.place)
            if not resumed:
                break
            result: dict[str, Any] = {"job": job, "how": "suspended", "checkpoint": None, "operation": None}
            if method != "checkpoint" and all(process.state == "suspended" for process in processes):
                self._moves.stays_away(job)
                return result | {"process_location": processes[0].moving.place, "ms": 0.0}
            try:
                part = await self._begin(method, processes, operation.row.requestor)
            except XmigError as error:
                tried.append(_Try(method, error.code, error.message))
                continue
            operation.progress("checkpoint" if method == "checkpoint" else "suspending", operation=part.id)
            part, late = await self._ended(part, operation, ends)
            if part.state == "succeeded":
                if late and method != "checkpoint":
                    tried.append(_Try(method, "deadline_exceeded", "it was done too late, and is taken back"))
                    await self._take_back(job, operation.row.requestor)
                    break
                if method == "checkpoint":
                    result |= {"how": "checkpoint", "checkpoint": (part.result or {}).get("checkpoint")}
                ms = (time.monotonic() - began) * 1e3
                return result | {"operation": part.id, "process_location": method, "ms": ms}
            problem = part.error or {}
            tried.append(_Try(method, str(problem.get("code")), str(problem.get("detail"))))
            if late:
                break
        raise self._refused(operation, job, tried, late=time.monotonic() >= ends)

    async def _resumed(self, job: str, operation: Operation, ends: float) -> bool:
        """What is being resumed counts as suspended until it runs, and would run afterwards: it is waited for. False:
        not until the end."""
        for row in self._operations.active():
            if (row.kind, row.job_id) == (OPERATION["resume"], job):
                ended = asyncio.ensure_future(self._operations.ended(row))
                cancelled = asyncio.ensure_future(operation.cancelled.wait())
                left = max(0.0, ends - time.monotonic())
                try:
                    await asyncio.wait({ended, cancelled}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                    if not ended.done():
                        return False
                finally:
                    cancelled.cancel()
                    ended.cancel()
        return True

    async def _begin(self, method: Method, processes: list[Process], requestor: str) -> OperationRow:
        """Raises XmigError: it is not possible."""
        if method == "checkpoint":
            return await self._checkpoints.create(processes[0], stop=True, requestor=requestor)
        return await self._moves.suspend_job(processes, method, requestor=requestor)

    async def _ended(self, part: OperationRow, operation: Operation, ends: float) -> tuple[OperationRow, bool]:
        """The part once it is over, and whether it was stopped: at the deadline, or because somebody cancelled."""
        ended = asyncio.ensure_future(self._operations.ended(part))
        cancelled = asyncio.ensure_future(operation.cancelled.wait())
        try:
            left = max(0.0, ends - time.monotonic())
            await asyncio.wait({ended, cancelled}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            stopped = not ended.done()
            if stopped:
                with contextlib.suppress(XmigError):  # past the point of no return, or over
                    self._operations.cancel(part.id)
            return await ended, stopped
        finally:
            cancelled.cancel()
            ended.cancel()

    async def _take_back(self, job: str, requestor: str) -> None:
        processes = self._supervisor.processes_of(job)
        try:
            row = await self._operations.ended(await self._moves.resume_job(processes, [], requestor=requestor))
        except XmigError as error:
            logger.error("a job that was suspended too late stays so", job=job[:12], why=error.message)
            return
        if row.state != "succeeded":
            logger.error("a job that was suspended too late stays so", job=job[:12], operation=row.id)

    def _refused(self, operation: Operation, job: str, tried: list[_Try], *, late: bool) -> XmigError:
        """Where the job is now, and why it is not elsewhere."""
        processes = self._supervisor.processes_of(job)
        place: ProcessLocation | None = processes[0].moving.place if processes else None
        if operation.cancelled.is_set():
            return Cancelled("it was cancelled", process_location=place)
        goes_on = "the job is suspended"  # and could not be resumed
        if place in ("source", None):
            goes_on = "the job goes on running" if processes else "the job has ended"
        whys = "; ".join(map(str, tried)) or "there was no time left"
        if late:
            return Conflict(f"the job was not preempted by the deadline, and {goes_on}: {whys}", process_location=place,
                            code="deadline_exceeded", hint="ask again with a longer deadline")  # fmt: skip
        return Conflict(f"the job cannot be preempted, and {goes_on}: {whys}", code="not_preempted",
                        process_location=place, hint="do what the reasons say, or end it: xmigctl stop")  # fmt: skip

    # --- after a restart ----------------------------------------------------------------------------------------------

    async def _resolve(self, operation: Operation) -> Outcome:
        """By what became of its parts, which have resolvers of their own."""
        row, job = operation.row, operation.row.job_id or ""
        found = await asyncio.to_thread(self._operations.find, job=job, limit=LOOKED_AT)
        parts = [each for each in found if each.kind in PARTS and each.created_at >= row.created_at]
        ended = [await self._operations.ended(each) for each in parts[:1]]  # the newest
        await self._found_again()
        processes = self._supervisor.processes_of(job)
        result: dict[str, Any] = {"job": job, "how": "suspended", "checkpoint": None, "ms": None}
        if ended and ended[0].kind == CREATE and not processes:
            checkpoint = ended[0].request.get("checkpoint")
            if await asyncio.to_thread(self._checkpoints.page, checkpoint=checkpoint):
                result |= {"how": "checkpoint", "checkpoint": checkpoint, "operation": ended[0].id}
                return Outcome(state="succeeded", result=result | {"process_location": "checkpoint"})
        suspended = bool(processes) and all(process.state == "suspended" for process in processes)
        if ended and ended[0].kind != CREATE and ended[0].state == "succeeded" and suspended:
            if time.time() <= operation.request.get("deadline", 0.0):
                where = processes[0].moving.place
                return Outcome(state="succeeded", result=result | {"operation": ended[0].id, "process_location": where})
            await self._take_back(job, row.requestor)
        place = self._supervisor.processes_of(job)
        return interrupted(row, place[0].moving.place if place else None)

    async def _found_again(self) -> None:
        """The processes of the last daemon have their servers again, or are given up."""
        deadline = time.monotonic() + FOUND_WITHIN
        while time.monotonic() < deadline and self._supervisor.expected:
            await asyncio.sleep(0.05)
