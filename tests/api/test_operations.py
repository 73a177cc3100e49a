"""Operations: intents before actions, progress, cancelling, what a restart does with them."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from xmigd.database.writer import Writer
from xmigd.errors import Cancelled, Conflict, Forbidden, NotFound, Unavailable
from xmigd.events.bus import Bus, Event
from xmigd.operations import repository
from xmigd.operations.operation import Operation
from xmigd.operations.repository import OperationRow
from xmigd.operations.service import Operations, Outcome

Test = Callable[[Operations, Bus], Coroutine[Any, Any, None]]
Run = Callable[[Test], None]
PROCESS = ("process", "p")


@pytest.fixture
def run(writer: Writer, readers: Engine) -> Run:
    def run(test: Test) -> None:
        async def main() -> None:
            bus = Bus(writer, newest=0)
            await asyncio.wait_for(test(Operations(writer, readers, bus), bus), 60)
            await bus.close()

        asyncio.run(main())

    return run


def stored(readers: Engine, operation: str) -> OperationRow:
    with Session(readers) as session:
        found = repository.get(session, operation)
    assert found is not None
    return found


async def ended(operations: Operations, row: OperationRow) -> OperationRow:
    await operations.wait(row.id, 30)
    return await asyncio.to_thread(operations.get, row.id)


def test_the_intent_is_on_the_disk_before_the_work(run: Run, readers: Engine) -> None:
    async def test(operations: Operations, bus: Bus) -> None:
        async def work(operation: Operation) -> dict[str, Any]:
            row = stored(readers, operation.id)
            assert (row.active, row.request) == (True, {"to": "cpu:1"})
            assert not row.ended_at
            return {"answer": 1}

        row = await operations.start(
            "migration", subject=PROCESS, job_id="j", requestor="user 0", work=work, request={"to": "cpu:1"}
        )
        assert row.active
        assert (await ended(operations, row)).result == {"answer": 1}
        assert stored(readers, row.id).state == "succeeded"

    run(test)


def test_one_at_a_time_per_subject(run: Run) -> None:
    async def test(operations: Operations, bus: Bus) -> None:
        go = asyncio.Event()

        async def work(operation: Operation) -> None:
            await go.wait()

        row = await operations.start("migration", subject=PROCESS, requestor="a", work=work)
        with pytest.raises(Conflict) as conflict:
            await operations.start("suspension", subject=PROCESS, requestor="a", work=work)
        assert conflict.value.code == "operation_under_way"
        assert conflict.value.operation == row.id
        other = await operations.start("migration", subject=("process", "q"), requestor="a", work=work)
        assert [each.id for each in operations.find(state="running")] in ([other.id, row.id], [row.id], [])
        go.set()
        await ended(operations, row)
        await ended(operations, await operations.start("suspension", subject=PROCESS, requestor="a", work=work))

    run(test)


def test_what_cannot_be_written_down_is_not_begun(run: Run, engine: Engine) -> None:
    def fails(*_: object) -> None:
        raise OperationalError("insert", {}, sqlite3.OperationalError("database or disk is full"))

    async def test(operations: Operations, bus: Bus) -> None:
        begun = []

        async def work(operation: Operation) -> None:
            begun.append(operation.id)

        before, repository.add = repository.add, fails  # type: ignore[assignment]
        try:
            with pytest.raises(Unavailable, match="disk of the database is full"):
                await operations.start("migration", subject=PROCESS, requestor="a", work=work)
        finally:
            repository.add = before
        assert (begun, operations.active()) == ([], [])
        await ended(operations, await operations.start("migration", subject=PROCESS, requestor="a", work=work))
        assert len(begun) == 1

    run(test)


def test_errors_and_defects(run: Run, readers: Engine) -> None:
    async def test(operations: Operations, bus: Bus) -> None:
        async def refused(operation: Operation) -> None:
            operation.progress("copying", copied_bytes=5)
            raise Forbidden("no", hint="ask", process_location="source")

        async def broken(operation: Operation) -> None:
            raise ZeroDivisionError

        row = await ended(operations, await operations.start("migration", subject=PROCESS, requestor="a", work=refused))
        assert (row.state, row.phase, row.progress) == ("failed", "copying", {"copied_bytes": 5})
        assert row.error == {
            "type": "about:blank", "title": "Forbidden", "status": 403, "code": "forbidden", "detail": "no",
            "hint": "ask", "phase": "copying", "operation": row.id, "process_location": "source",
        }  # fmt: skip
        row = await ended(operations, await operations.start("migration", subject=PROCESS, requestor="a", work=broken))
        assert row.error is not None
        assert (row.error["code"], row.error["status"]) == ("internal", 500)
        assert operations.counts == {("migration", "failed"): 2}

    run(test)


def test_cancelling(run: Run) -> None:
    async def test(operations: Operations, bus: Bus) -> None:
        committed = asyncio.Event()
        go = asyncio.Event()

        async def patient(operation: Operation) -> None:
            await operation.cancelled.wait()
            raise Cancelled("as requested", process_location="source")

        async def commits(operation: Operation) -> None:
            operation.point_of_no_return("the target has the process")
            committed.set()
            await go.wait()

        async def late(operation: Operation) -> None:
            await operation.cancelled.wait()
            operation.point_of_no_return("never reached")

        row = await operations.start("migration", subject=PROCESS, requestor="a", work=patient)
        operations.cancel(row.id)
        operations.cancel(row.id)
        row = await ended(operations, row)
        assert (row.state, row.error and row.error["process_location"]) == ("cancelled", "source")
        with pytest.raises(NotFound):
            operations.cancel(row.id)
        row = await operations.start("migration", subject=PROCESS, requestor="a", work=commits)
        await committed.wait()
        with pytest.raises(Conflict, match="the target has the process") as conflict:
            operations.cancel(row.id)
        assert conflict.value.code == "too_late_to_cancel"
        go.set()
        assert (await ended(operations, row)).state == "succeeded"
        row = await operations.start("migration", subject=PROCESS, requestor="a", work=late)
        operations.cancel(row.id)
        assert (await ended(operations, row)).state == "cancelled"
        row = await operations.start("stop", subject=PROCESS, requestor="a", work=patient, cancellable=False)
        with pytest.raises(Conflict):
            operations.cancel(row.id)
        await operations.stop()

    run(test)


def test_progress_is_published_and_saved_seldom(run: Run, readers: Engine) -> None:
    async def test(operations: Operations, bus: Bus) -> None:
        seen: list[Event] = []
        subscription = bus.subscribe(lambda event: True)

        async def work(operation: Operation) -> None:
            for number in range(1000):
                operation.progress("copying", copied_bytes=number)
            operation.progress("switching")

        row = await ended(operations, await operations.start("migration", subject=PROCESS, requestor="a", work=work))
        while not seen or seen[-1].type != "operation.ended":
            seen += await subscription.read(30)
        durable = [(event.type, event.data["phase"]) for event in seen if event.id is not None]
        assert durable == [
            ("operation.created", "pending"), ("operation.progress", "copying"), ("operation.progress", "switching"),
            ("operation.ended", "switching"),
        ]  # fmt: skip
        assert len(seen) < 20
        assert row.progress is None

    run(test)


def test_interrupted_operations_are_resolved_once(run: Run, readers: Engine) -> None:
    async def test(operations: Operations, bus: Bus) -> None:
        async def for_ever(operation: Operation) -> None:
            operation.progress("copying", copied_bytes=7)
            await asyncio.Event().wait()

        rows = [
            await operations.start(kind, subject=("process", kind), requestor="a", work=for_ever, request={"n": 1})
            for kind in ("migration", "suspension", "drain")
        ]
        waiting = asyncio.ensure_future(operations.wait(rows[0].id, 100))
        while any(stored(readers, row.id).phase != "copying" for row in rows):
            await asyncio.sleep(0.01)
        await operations.stop()
        assert (await waiting) is not None
        assert [stored(readers, row.id).state for row in rows] == ["running"] * 3
        with pytest.raises(Conflict):
            await operations.start("migration", subject=("process", "x"), requestor="a", work=for_ever)

        later = Operations(operations._writer, readers, bus)
        resolved = []

        async def moved(operation: Operation) -> Outcome:
            resolved.append((operation.id, operation.request, operation.row.progress))
            with pytest.raises(Conflict):
                await later.start("migration", subject=("process", "migration"), requestor="a", work=for_ever)
            return Outcome(state="succeeded", result={"on": "target"})

        async def broken(operation: Operation) -> Outcome:
            raise ZeroDivisionError

        later.register("migration", moved)
        later.register("drain", broken)
        assert await later.resolve_interrupted() == 3
        states = [await ended(later, row) for row in rows]
        assert [row.state for row in states] == ["succeeded", "failed", "failed"]
        assert [row.error and row.error["code"] for row in states] == [None, "interrupted", "internal"]
        assert resolved == [(rows[0].id, {"n": 1}, {"copied_bytes": 7})]
        assert await Operations(operations._writer, readers, bus).resolve_interrupted() == 0

    run(test)


def test_lists(run: Run) -> None:
    async def test(operations: Operations, bus: Bus) -> None:
        async def work(operation: Operation) -> None:
            return None

        rows = []
        for kind, owner in (("migration", 1), ("migration", 2), ("stop", 1), ("stop", 2)):
            row = await operations.start(
                kind, subject=("process", str(owner)), job_id=f"j{owner}", requestor="a", work=work, owner=owner
            )
            rows.append(await ended(operations, row))
        ids = [row.id for row in reversed(rows)]
        assert [row.id for row in operations.find()] == ids
        assert [row.id for row in operations.find(before=ids[1], limit=1)] == [ids[2]]
        assert [row.id for row in operations.find(kind="stop")] == ids[:2]
        assert [row.id for row in operations.find(owner=1)] == [ids[1], ids[3]]
        assert [row.id for row in operations.find(job="j2", state="succeeded")] == [ids[0], ids[2]]
        assert [row.id for row in operations.find(subject="1")] == [ids[1], ids[3]]
        assert operations.find(before="nothing") == []
        with pytest.raises(NotFound):
            operations.get("nothing")

    run(test)
