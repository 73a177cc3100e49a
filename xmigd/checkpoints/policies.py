"""Checkpoints without a request: by the clock, and before a drain, as a job's policy says or the settings.

Invariants:
- By the clock, one is made at a time on the whole node: each of them reads memory and writes to the disk as fast as it
  can. Of one job there are never two at once; one that somebody requested comes first, and counts.
- An older one is removed only when a newer one was read from the disk, all of it, and has its hashes.
- None fails silently: each failure is an event of the job, and the policy shows the last one.
A policy is in the database. When the next checkpoint is due follows from the newest one, so a restart of the daemon
changes nothing about that; failures are counted anew.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy.orm import Session

from xmigd import log
from xmigd.checkpoints import repository
from xmigd.checkpoints.restoring import Restoring
from xmigd.checkpoints.schedule import Failures, Policy, due_at
from xmigd.checkpoints.schemas import CheckpointPolicyInfo, PolicyRequest
from xmigd.checkpoints.service import CREATE, Checkpoints
from xmigd.database.reader import Reader
from xmigd.database.writer import Writer
from xmigd.errors import Conflict, XmigError, as_problem
from xmigd.events.bus import Bus
from xmigd.jobs.service import Jobs
from xmigd.operations.repository import OperationRow
from xmigd.operations.service import Operations
from xmigd.security.audit import XMIGD, Audit
from xmigd.security.callers import Caller
from xmigd.settings import Settings
from xmigd.supervisor.process import Process
from xmigd.supervisor.supervisor import Supervisor
from xmigd.waiting import happens

logger = log.get("checkpoints")

Check = Callable[[int], None]  # of the version, in the transaction that changes it; raises Stale

LOOK_EVERY = 5.0  # seconds, at most, between two looks at what is due
BUSY_AGAIN = 2.0  # seconds after which one is tried again whose job was busy
LONGEST_BUSY = 600.0  # seconds; a job that was busy for longer has missed its checkpoint
AT_WORK = ("running", "suspended")
# Somebody else does something with the job: that passes.
PASSING = frozenset({"operation_under_way", "already_moving", "resumed_meanwhile", "paused", "no_snapshot"})


@dataclass(frozen=True, slots=True)
class _Own:
    """A job's own policy."""

    policy: Policy
    version: int
    updated_at: float
    updated_by: str


class CheckpointPolicies:
    """Lives in the event loop's thread."""

    def __init__(
        self, *, checkpoints: Checkpoints, restoring: Restoring, jobs: Jobs, supervisor: Supervisor,
        operations: Operations, writer: Writer, reader: Reader, bus: Bus, audit: Audit, settings: Settings,
    ) -> None:  # fmt: skip
        self._checkpoints = checkpoints
        self._jobs = jobs
        self._node = settings.node
        self._supervisor = supervisor
        self._operations = operations
        self._writer = writer
        self._reader = reader
        self._bus = bus
        self._audit = audit
        self._default = Policy(
            every_minutes=settings.checkpoint_every or None, keep=settings.checkpoint_keep,
            before_drain=settings.checkpoint_before_drain,
        )  # fmt: skip
        with reader.session() as session:
            self._own = {row["job_id"]: _own(row) for row in repository.policies(session)}
        self._failures: dict[str, Failures] = {}
        self._not_before: dict[str, float] = {}  # of jobs that were busy
        self._changed = asyncio.Event()
        restoring.restored.add(self._inherit)

    # --- what is requested --------------------------------------------------------------------------------------------

    async def get(self, caller: Caller, job: str) -> CheckpointPolicyInfo:
        """Raises NotFound."""
        info = await asyncio.to_thread(self._jobs.find, job, caller)
        return await self._shown(info.id)

    async def set(self, caller: Caller, job: str, wanted: PolicyRequest, check: Check) -> CheckpointPolicyInfo:
        """Raises NotFound, Stale."""
        info = await asyncio.to_thread(self._jobs.find, job, caller)
        await self._set(info.id, Policy(**wanted.model_dump()), caller.name, check)
        return await self._shown(info.id)

    async def remove(self, caller: Caller, job: str, check: Check) -> None:
        """From then on the job has what the settings say. Raises NotFound, Stale."""
        info = await asyncio.to_thread(self._jobs.find, job, caller)

        def write(session: Session) -> None:
            row = repository.policy(session, info.id)
            check(0 if row is None else row["version"])
            repository.remove_policy(session, info.id)

        await self._writer.write("checkpoint_policies.remove", write)
        self._own.pop(info.id, None)
        self._is_new(info.id, caller.name)

    async def _set(self, job: str, policy: Policy, by: str, check: Check) -> None:
        def write(session: Session) -> dict[str, Any]:
            row = repository.policy(session, job)
            version = 0 if row is None else row["version"]
            check(version)
            values = {
                "job_id": job, "version": version + 1, "every_minutes": policy.every_minutes, "keep": policy.keep,
                "before_drain": policy.before_drain, "keep_bits": policy.keep_bits, "updated_at": time.time(),
                "updated_by": by[:255],
            }  # fmt: skip
            repository.set_policy(session, values)
            return values

        written = await self._writer.write("checkpoint_policies.set", write)
        self._own[job] = _own(written)
        self._is_new(job, by)

    def _is_new(self, job: str, by: str) -> None:
        self._failures.pop(job, None)
        self._not_before.pop(job, None)
        policy = self._of(job)
        data = {
            "every_minutes": policy.every_minutes, "keep": policy.keep, "before_drain": policy.before_drain,
            "keep_bits": policy.keep_bits, "by": by,
        }  # fmt: skip
        self._bus.publish("checkpoint.policy", "job", job, job, data)
        self._changed.set()

    async def _shown(self, job: str) -> CheckpointPolicyInfo:
        own, policy, failures = self._own.get(job), self._of(job), self._failures.get(job)
        due = None
        if self._processes_of(job):
            due = (await self._due([job])).get(job)
        return CheckpointPolicyInfo(
            job_id=job, source="settings" if own is None else "job", version=0 if own is None else own.version,
            every_minutes=policy.every_minutes, keep=policy.keep, before_drain=policy.before_drain,
            keep_bits=policy.keep_bits, next_at=due,
            failures=0 if failures is None else failures.count,
            last_failure=None if failures is None else failures.why,
            updated_at=None if own is None else own.updated_at, updated_by=None if own is None else own.updated_by,
        )  # fmt: skip

    # --- by the clock -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            self._changed.clear()
            pause = LOOK_EVERY
            try:
                pause = await self._look()
            except Exception:  # the next look may succeed; without this one no checkpoint would be made ever again
                logger.exception("policies of checkpoints failed")
            await happens(self._changed, pause)

    async def _look(self) -> float:
        """Make what is due. Returns the seconds until the next look."""
        live = {process.job.id for process in self._supervisor.processes.values()}
        for known in (self._failures, self._not_before):
            for job in known.keys() - live:
                del known[job]
        now = time.time()  # the clock may have been set back: what is noted for later than it can be is void
        self._failures = {job: failures for job, failures in self._failures.items() if failures.at <= now}
        self._not_before = {job: at for job, at in self._not_before.items() if at <= now + BUSY_AGAIN}
        jobs = [job for job in live if self._of(job).every is not None]
        if not jobs:
            return LOOK_EVERY
        due = await self._due(jobs)
        for job in sorted(jobs, key=lambda job: due[job]):
            if max(due[job], self._not_before.get(job, 0)) <= time.time() and self._processes_of(job):
                await self._make(job, "its policy", due[job])
        now = time.time()
        soon = min(max(at, self._not_before.get(job, 0)) for job, at in (await self._due(jobs)).items())
        return min(max(soon - now, 0.05), LOOK_EVERY)

    async def _due(self, jobs: list[str]) -> dict[str, float]:
        def read() -> tuple[dict[str, float], dict[str, float]]:
            with self._reader.session() as session:
                return repository.newest(session, jobs, time.time()), repository.begun(session, jobs)

        newest, begun = await asyncio.to_thread(read)
        found, now = {}, time.time()
        for job in jobs:
            own = self._own.get(job)
            since = newest.get(job)
            if since is None:
                since = max(begun.get(job, 0.0), 0.0 if own is None else own.updated_at)
            since = since if since <= now else 0.0
            if (at := due_at(self._of(job), since, self._failures.get(job))) is not None:
                found[job] = at
        return found

    # --- before a drain -----------------------------------------------------------------------------------------------

    async def before_drain(self, processes: list[Process]) -> None:
        """Of the jobs whose policies want it. The drain goes on whatever comes of it: a device that fails has to be
        left. So it does not wait for other jobs' checkpoints either; one of the job itself that is being made is the
        one."""
        for job in dict.fromkeys(process.job.id for process in processes):
            if not self._of(job).before_drain:
                continue
            # One whose part is stored waits for other nodes, which may be gone.
            rows = (row for row in self._operations.active() if row.phase != "waiting")
            making = next((row for row in rows if _makes(row, job)), None)
            if making is None or (await self._operations.ended(making)).state != "succeeded":
                await self._make(job, "a drain", None)

    # --- the work -----------------------------------------------------------------------------------------------------

    async def _make(self, job: str, why: str, due: float | None) -> None:
        """`due`: since when, if by the clock. Never raises but when the daemon leaves."""
        try:
            await self._attempt(job, why)
        except XmigError as error:
            now = time.time()
            patience = max(LONGEST_BUSY, self._of(job).every or 0)
            if error.code in PASSING and due is not None and now - due < patience:
                self._not_before[job] = now + BUSY_AGAIN
                return
            self._failed(job, why, error)
        else:
            self._failures.pop(job, None)
            self._not_before.pop(job, None)

    async def _attempt(self, job: str, why: str) -> None:
        """Raises XmigError: none was made, or it is damaged."""
        processes = self._processes_of(job)
        if not processes:
            return
        process = processes[0]
        for row in self._operations.active():
            if (row.subject_type, row.subject_id) in (("job", job), ("process", process.row.id)):
                raise Conflict(f"a {row.kind} of this job is under way", code="operation_under_way", operation=row.id)
        if process.state not in AT_WORK:
            raise Conflict(f"the process is {process.state}", code="operation_under_way")
        action = f"checkpoint job {job}"
        intent = await self._audit.intent(XMIGD, action, detail={"why": why})
        outcome = "interrupted"
        try:
            started = await self._checkpoints.create(
                process, stop=False, requestor=XMIGD.name, by_policy=True, keep_bits=self._of(job).keep_bits
            )
            result = await self._succeeded(started)
            outcome = "done"
        except XmigError as error:
            outcome = error.code
            raise
        finally:
            self._audit.outcome(intent, XMIGD, action, outcome)
        logger.info("a checkpoint was made", job=job[:12], checkpoint=result["checkpoint"][:12], why=why)
        await self._tidy(job)

    async def _tidy(self, job: str) -> None:
        """Remove those that are too many, if a newer one is whole on the disk. Raises XmigError: it is not."""

        def read() -> list[tuple[str, bool]]:
            with self._reader.session() as session:
                return repository.by_policy(session, job)

        made = await asyncio.to_thread(read)
        # The last one may be in host memory only, and would be lost with the machine.
        settled = next((place for place, (_, on_disk) in enumerate(made) if on_disk), len(made))
        old = made[max(self._of(job).keep, settled + 1) :]
        if not old:
            return
        await self._succeeded(await self._checkpoints.verify(XMIGD, made[settled][0], requestor=XMIGD.name))
        for checkpoint, _ in old:
            try:
                await self._checkpoints.remove(XMIGD, checkpoint)
            except XmigError as error:  # somebody restores it, say: the next time, then
                logger.info("an older checkpoint stays", checkpoint=checkpoint[:12], why=error.message)

    async def _succeeded(self, row: OperationRow) -> dict[str, Any]:
        """What came of it. Raises XmigError."""
        row = await self._operations.ended(row)
        if row.active:
            raise asyncio.CancelledError  # the daemon leaves; the next one resolves it
        if row.state == "succeeded":
            return row.result or {}
        problem = row.error or {}
        raise Conflict(
            str(problem.get("detail") or f"the {row.kind} has {row.state}"), code=problem.get("code"),
            hint=str(problem.get("hint") or ""), operation=row.id,
        )  # fmt: skip

    def _failed(self, job: str, why: str, error: XmigError) -> None:
        earlier = self._failures.get(job)
        failures = Failures(count=1 if earlier is None else earlier.count + 1, at=time.time(), why=error.message)
        self._failures[job] = failures
        problem = as_problem(error)
        data = {
            "why": why, "code": error.code, "detail": problem["detail"], "hint": problem.get("hint", ""),
            "failures": failures.count, "operation": problem.get("operation"),
        }  # fmt: skip
        self._bus.publish("checkpoint.failed", "job", job, job, data)
        logger.warning("a checkpoint could not be made", job=job[:12], due=why, failures=failures.count, why=str(error))

    # --- small parts --------------------------------------------------------------------------------------------------

    def _of(self, job: str) -> Policy:
        own = self._own.get(job)
        return self._default if own is None else own.policy

    def _processes_of(self, job: str) -> list[Process]:
        """Of a job of several nodes, where its checkpoints are made."""
        found = [one for one in self._supervisor.processes_of(job) if one.state not in ("ended", "lost")]
        return [one for one in found if one.job.nodes is None or one.job.nodes.split(",")[0] == self._node]

    def _inherit(self, jobs: tuple[str, str]) -> None:
        """A restored job has the policy of the job that its checkpoint was made of."""
        earlier, restored = jobs
        own = self._own.get(earlier)
        if own is not None and earlier != restored:
            task = asyncio.get_running_loop().create_task(
                self._set(restored, own.policy, own.updated_by, lambda _: None)
            )
            task.add_done_callback(_reported)


def _makes(row: OperationRow, job: str) -> bool:
    """Is it a checkpoint of this job that is being made?"""
    return row.kind == CREATE and row.subject_id == job


def _reported(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a restored job has not got its policy", why=str(error))


def _own(row: dict[str, Any]) -> _Own:
    policy = Policy(**{name: row[name] for name in ("every_minutes", "keep", "before_drain", "keep_bits")})
    return _Own(policy, row["version"], row["updated_at"], row["updated_by"])
