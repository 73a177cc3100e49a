"""All operations of this node.

Invariants:
  The intent is on the disk before the work begins, and the outcome before anybody hears of it as an outcome.
  One subject has at most one active operation.
  The Idempotency-Key of the request that began it names it, in the intent's transaction.
  An operation that the daemon left behind is resolved at the next start by its kind's resolver, once.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import structlog
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from xmigd import log
from xmigd.database.writer import Writer
from xmigd.errors import Cancelled, Conflict, NotFound, ProcessLocation, XmigError, as_problem
from xmigd.events.bus import Bus
from xmigd.ids import new_id
from xmigd.operations import repository
from xmigd.operations.operation import Operation
from xmigd.operations.repository import OperationRow, OperationState
from xmigd.waiting import happens

logger = log.get("operations")

# Caller and Idempotency-Key of the request that is being done, if it has one.
requested_with: ContextVar[tuple[str, str] | None] = ContextVar("requested_with", default=None)

Work = Callable[[Operation], Awaitable[dict[str, Any] | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an interrupted operation ended."""

    state: OperationState
    result: dict[str, Any] | None = None
    error: XmigError | None = None


Resolver = Callable[[Operation], Awaitable[Outcome]]


def interrupted(row: OperationRow, process_location: ProcessLocation | None = None) -> Outcome:
    """It did not come to its end and had no effect that stays."""
    error = XmigError(
        "xmigd ended in the middle of it", code="interrupted", hint="ask for it again", phase=row.phase,
        process_location=process_location,
    )  # fmt: skip
    return Outcome(state="failed", error=error)


class Operations:
    def __init__(self, writer: Writer, readers: Engine, bus: Bus) -> None:
        self._writer = writer
        self._readers = readers
        self._bus = bus
        self._active: dict[str, Operation] = {}
        self._subjects: dict[tuple[str, str], str] = {}
        self._resolvers: dict[str, Resolver] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self.counts: Counter[tuple[str, str]] = Counter()  # (kind, final state)

    def register(self, kind: str, resolver: Resolver) -> None:
        """Who decides about operations of this kind that an earlier daemon left behind."""
        self._resolvers[kind] = resolver

    # --- what is requested --------------------------------------------------------------------------------------------

    async def start(
        self,
        kind: str,
        *,
        subject: tuple[str, str],
        job_id: str | None = None,
        requestor: str,
        work: Work,
        owner: int | None = None,
        request: dict[str, Any] | None = None,
        id: str | None = None,
        also: Callable[[Session], Any] | None = None,
        cancellable: bool = True,
        why_not: str = "",
    ) -> OperationRow:
        """Write the intent down, begin the work, and answer. Raises Conflict if the subject has an active operation,
        Unavailable if the intent cannot be written. `subject` is (type, id); `owner` the user who sees it besides
        operators; `request` what a resolver needs to know; `also` what belongs to the intent, written in its
        transaction."""
        if self._stopping:
            raise Conflict("xmigd is stopping", hint="ask again when it is back")
        self._check_free(subject)
        row = OperationRow(
            id=id or new_id(), kind=kind, state="pending", phase="pending", subject_type=subject[0],
            subject_id=subject[1], job_id=job_id, owner=owner, requestor=requestor, request=request or {},
            created_at=time.time(), may_cancel=cancellable,
            may_cancel_why="" if cancellable else why_not or "this kind is never cancelled",
        )  # fmt: skip
        operation = Operation(row, self._changed)
        self._take(operation)
        # Shielded: once the intent is on its way to the disk, the work follows, whatever becomes of who requested.
        await asyncio.shield(asyncio.ensure_future(self._begin(operation, work, also)))
        return operation.row

    async def _begin(self, operation: Operation, work: Work, also: Callable[[Session], Any] | None) -> None:
        row, key = operation.row, requested_with.get()

        def write(session: Session) -> None:
            repository.add(session, row)
            if key is not None:
                repository.name_in_key(session, *key, row.id)
            if also is not None:
                also(session)

        try:
            await self._writer.write("operations.begin", write)
        except BaseException:
            self._drop(operation)
            raise
        self._publish("operation.created", operation)
        self._run(self._work(operation, work))

    async def decide(self, operation: Operation, phase: str) -> None:
        """The phase is on the disk when this returns: the resolver of the next daemon finds it. Raises Unavailable."""
        operation.end_trailing()  # it would be written behind this, with the phase before
        decided = replace(operation.row, phase=phase)
        await self._writer.write("operations.decide", lambda s: repository.save(s, decided))
        operation.progress(phase, **(decided.progress or {}))

    def get(self, operation: str) -> OperationRow:
        """Raises NotFound. Reads the database: not for the event loop's thread unless the operation is active."""
        if (found := self._active.get(operation)) is not None:
            return found.row
        with Session(self._readers) as session:
            row = repository.get(session, operation)
        if row is None:
            raise NotFound(f"there is no operation {operation[:40]!r}", hint="xmigctl op list lists them")
        return row

    def find(self, **conditions: Any) -> Sequence[OperationRow]:
        """repository.find, with active operations as they are now."""
        with Session(self._readers) as session:
            rows = repository.find(session, **conditions)
        return [self._active[row.id].row if row.id in self._active else row for row in rows]

    def cancel(self, operation: str) -> OperationRow:
        """Ask an active operation to end. Raises NotFound if it is not active, Conflict past the point of no return."""
        found = self._active.get(operation)
        if found is None:
            raise NotFound(f"there is no active operation {operation[:40]!r}")
        found.cancel()
        logger.info("cancelling", operation=operation, phase=found.row.phase)
        return found.row

    async def wait(self, operation: str, seconds: float) -> OperationRow | None:
        """The operation once it is over, or as it is after `seconds`. None: it is not active."""
        found = self._active.get(operation)
        if found is None:
            return None
        await happens(found.ended, seconds)
        return found.row

    async def ended(self, row: OperationRow) -> OperationRow:
        """The operation once it is over."""
        while row.active:
            seen = await self.wait(row.id, 60)
            row = seen if seen is not None else await asyncio.to_thread(self.get, row.id)
        return row

    async def carried_out(self, starting: Awaitable[OperationRow]) -> dict[str, Any]:
        """What came of it. Raises Conflict: it has not succeeded."""
        row = await self.ended(await starting)
        if row.state != "succeeded":
            problem = row.error or {}
            raise Conflict(
                f"the {row.kind} has {row.state}: {problem.get('detail', 'nobody knows why')}",
                code=problem.get("code"), hint=problem.get("hint", ""),
                process_location=problem.get("process_location"),
            )  # fmt: skip
        return row.result or {}

    def active(self) -> list[OperationRow]:
        return [operation.row for operation in self._active.values()]

    # --- start and end of the daemon --------------------------------------------------------------------------------

    async def resolve_interrupted(self) -> int:
        """Begin to resolve what an earlier daemon left behind; returns how many. Their subjects are taken at once."""

        def read() -> list[OperationRow]:
            with Session(self._readers) as session:
                return repository.active(session)

        rows = await asyncio.to_thread(read)
        for row in rows:
            why = "xmigd was restarted and finds out how it ended"
            operation = Operation(replace(row, may_cancel=False, may_cancel_why=why), self._changed)
            self._take(operation)
            logger.warning("operation interrupted", operation=row.id, kind=row.kind, phase=row.phase)
            self._run(self._resolve(operation))
        return len(rows)

    async def stop(self) -> None:
        """The daemon leaves: work is interrupted where it stands, and the next daemon resolves it."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for operation in self._active.values():
            operation.ended.set()  # whoever waits is informed how it is now

    # --- the work ---------------------------------------------------------------------------------------------------

    def _run(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _work(self, operation: Operation, work: Work) -> None:
        with structlog.contextvars.bound_contextvars(operation=operation.id):
            row = operation.row
            phase = "begun" if row.phase == "pending" else row.phase
            operation.row = replace(row, state="running", phase=phase, started_at=time.time())
            self._save(operation)
            try:
                result = await work(operation)
            except asyncio.CancelledError:
                if self._stopping:
                    raise
                await self._end(operation, "failed", error=XmigError("it was interrupted", code="interrupted"))
            except Cancelled as error:
                await self._end(operation, "cancelled", error=error)
            except Exception as error:
                if not isinstance(error, XmigError):
                    logger.exception("an operation failed inside xmigd", kind=operation.row.kind)
                await self._end(operation, "failed", error=error)
            else:
                await self._end(operation, "succeeded", result=result)

    async def _resolve(self, operation: Operation) -> None:
        with structlog.contextvars.bound_contextvars(operation=operation.id):
            resolver = self._resolvers.get(operation.row.kind)
            try:
                outcome = interrupted(operation.row) if resolver is None else await resolver(operation)
            except Exception as error:
                logger.exception("an interrupted operation could not be resolved", kind=operation.row.kind)
                await self._end(operation, "failed", error=error)
            else:
                await self._end(operation, outcome.state, result=outcome.result, error=outcome.error)

    async def _end(
        self,
        operation: Operation,
        state: OperationState,
        *,
        result: dict[str, Any] | None = None,
        error: Exception | None = None,
    ) -> None:
        row = operation.row
        problem = None if error is None else as_problem(error, phase=row.phase, operation=row.id)
        ended = replace(
            row, state=state, ended_at=time.time(), may_cancel=False, may_cancel_why="it is over",
            result=result, error=problem,
        )  # fmt: skip
        while True:
            try:
                written = self._writer.submit("operations.end", lambda session: repository.save(session, ended))
                await asyncio.wrap_future(written)
                break
            except XmigError as failure:
                # A full disk: the subject stays taken until the outcome is written down.
                logger.error("an operation's outcome cannot be written", why=str(failure), state=state)
                await asyncio.sleep(1)
        operation.settle(ended)
        self.counts[row.kind, state] += 1
        self._drop(operation)
        ms = None if row.started_at is None else round((time.time() - row.started_at) * 1e3, 1)
        why = None if problem is None else problem["detail"]
        logger.info(f"operation {state}", kind=row.kind, subject=row.subject_id[:12], ms=ms, why=why)
        self._publish("operation.ended", operation)

    # --- small parts ------------------------------------------------------------------------------------------------

    def _check_free(self, subject: tuple[str, str]) -> None:
        found = self._subjects.get(subject)
        if found is not None:
            busy = self._active[found].row
            raise Conflict(
                f"a {busy.kind} of this {subject[0]} is under way", code="operation_under_way", operation=busy.id,
                hint=f"wait for it (GET /v1/operations/{busy.id}/wait) or cancel it (DELETE /v1/operations/{busy.id})",
            )  # fmt: skip

    def _take(self, operation: Operation) -> None:
        self._active[operation.id] = operation
        self._subjects[operation.row.subject_type, operation.row.subject_id] = operation.id

    def _drop(self, operation: Operation) -> None:
        self._active.pop(operation.id, None)
        self._subjects.pop((operation.row.subject_type, operation.row.subject_id), None)

    def _changed(self, operation: Operation, new_phase: bool) -> None:
        self._save(operation)
        # Within a phase it is a sample: whoever listens gets it, nobody needs it later.
        self._publish("operation.progress", operation, durable=new_phase)

    def _save(self, operation: Operation) -> None:
        row = operation.row
        self._writer.record("operations.save", lambda session: repository.save(session, row))

    def _publish(self, type: Any, operation: Operation, *, durable: bool = True) -> None:
        row = operation.row
        self._bus.publish(type, "operation", row.id, row.job_id, row.as_dict(), owner=row.owner, durable=durable)
