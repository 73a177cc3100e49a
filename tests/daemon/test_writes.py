"""Writes that wait at the same time share a transaction: what each of them is promised."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, insert, select, text
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.orm import Session

from tests.harness import ROOT
from xmigd.database import migrate
from xmigd.database.engine import make_engine, prepare_folder
from xmigd.database.models import Job
from xmigd.database.writer import BATCH, Writer
from xmigd.errors import Unavailable
from xmigd.events.bus import Bus
from xmigd.jobs.repository import job_model
from xmigd.recording import retention
from xmigd.records import JobRow
from xmigd.settings import Settings

from .disks import fill, small_disk

PATIENCE = 60
Work = Callable[[Session], Any]


@pytest.fixture
def writer(engine: Engine) -> Iterator[Writer]:
    writer = Writer(engine)
    yield writer
    writer.close()


def adding(name: str) -> Work:
    """Writes the job `name`."""
    row = JobRow(id=name, name=name, command="c", uid=0, device=None, registered=True, token_hash="h")
    return lambda session: session.add(job_model(row))


def written(engine: Engine) -> list[str]:
    """The jobs' names, in the order in which they were written."""
    with Session(engine) as session:
        return list(session.scalars(select(Job.name).order_by(text("rowid"))))


def commits(path: Path) -> int:
    """Transactions in the write-ahead log (sqlite.org/fileformat2.html#walformat)."""
    log = Path(f"{path}-wal").read_bytes()
    page, salts, count = int.from_bytes(log[8:12]), log[16:24], 0
    for at in range(32, len(log), 24 + page):
        _, pages_after_commit, of = struct.unpack_from(">II8s", log, at)
        count += of == salts and pages_after_commit > 0
    return count


@contextlib.contextmanager
def held(writer: Writer, path: Path) -> Iterator[list[int]]:
    """The writer is at work while the block is executed: what is written there waits. The list gets the number of
    transactions that it took."""
    begun, go = threading.Event(), threading.Event()

    def slow(session: Session) -> None:
        begun.set()
        assert go.wait(PATIENCE)

    took: list[int] = []
    last = writer.submit("jobs.add", slow)
    assert begun.wait(PATIENCE)
    before = commits(path)
    try:
        yield took
    finally:
        go.set()
    last.result(PATIENCE)
    writer.catch_up()
    took.append(commits(path) - before)


class TestOneTransaction:
    def test_for_all_that_wait(self, writer: Writer, path: Path, reading: Engine) -> None:
        with ThreadPoolExecutor(16) as threads, held(writer, path) as took:
            futures = list(threads.map(lambda n: writer.submit("jobs.add", adding(f"{n}")), range(100)))
        assert [future.result(PATIENCE) for future in futures] == [None] * 100
        assert sorted(written(reading), key=int) == [f"{n}" for n in range(100)]
        assert took == [1]

    def test_from_many_threads_that_write_all_the_time(self, writer: Writer, path: Path, reading: Engine) -> None:
        seen: list[bool] = []

        def write(thread: int) -> None:
            for number in range(20):
                name = f"{thread}-{number}"
                writer.submit("jobs.add", adding(name)).result(PATIENCE)
                with Session(reading) as session:
                    seen.append(session.get(Job, name) is not None)

        before = commits(path)
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(write, range(8)))
        assert seen == [True] * 160
        assert commits(path) - before < 160

    def test_has_a_bound_and_keeps_the_order(self, writer: Writer, path: Path, reading: Engine) -> None:
        names = [f"{n}" for n in range(2 * BATCH + 1)]
        with held(writer, path) as took:
            for number, name in enumerate(names):
                (writer.record if number % 3 else writer.submit)("jobs.add", adding(name))
        assert written(reading) == names
        assert took == [3]

    def test_ends_before_anybody_is_answered(self, writer: Writer, path: Path) -> None:
        futures: list[Future[Any]] = []

        def look(_: Session) -> int:
            return sum(future.done() for future in futures)

        with held(writer, path):
            futures += [writer.submit("jobs.add", look) for _ in range(BATCH - 1)]
        assert [future.result(PATIENCE) for future in futures] == [0] * len(futures)

    def test_does_not_hold_what_must_be_alone(self, writer: Writer, path: Path, reading: Engine) -> None:
        with held(writer, path) as took:
            writer.submit("jobs.add", adding("before"))
            writer.submit("jobs.add", adding("also before"))
            writer.submit("history.tidy", adding("alone"), alone=True)
            writer.submit("jobs.add", adding("after"))
            writer.submit("jobs.add", adding("also after"))
        assert written(reading) == ["before", "also before", "alone", "after", "also after"]
        assert took == [3]

    def test_does_not_hold_the_removal_of_old_records(self, writer: Writer, path: Path) -> None:
        """It takes triggers away, and writes a file."""
        settings = Settings(database=path, history_records=100)
        alone: list[int] = []

        def step(session: Session) -> int:
            alone.append(commits(path))
            adding("tidied")(session)
            return 0

        def tidy() -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(retention, "steps", lambda *_: {"jobs": step})
                asyncio.run(retention.tidy(writer, settings, 0))

        accepted = writer.version[0]
        with ThreadPoolExecutor(1) as thread, held(writer, path) as took:
            before = commits(path)
            writer.submit("jobs.add", adding("before"))
            tidied = thread.submit(tidy)
            while writer.version[0] < accepted + 3:
                assert not tidied.done()
            writer.submit("jobs.add", adding("after"))
        tidied.result(PATIENCE)
        assert (took, alone) == ([3], [before + 1])


def violate(session: Session) -> None:
    session.add(job_model(JobRow(id="y", name="y", command="c", uid=0, device=None, registered=True, token_hash="h")))
    session.execute(insert(Job).values(id="0"))


def raise_error(session: Session) -> None:
    adding("z")(session)
    session.flush()
    raise ZeroDivisionError


def misspell(session: Session) -> None:
    adding("z")(session)
    session.flush()
    session.execute(text("insert into jbos (id) values ('z')"))


class TestAWriteThatFails:
    @pytest.mark.parametrize(
        ("bad", "error"),
        [
            (violate, IntegrityError), (adding("0"), IntegrityError), (raise_error, ZeroDivisionError),
            (misspell, OperationalError),
        ],
    )  # fmt: skip
    def test_fails_alone(self, writer: Writer, path: Path, reading: Engine, bad: Work, error: type[Exception]) -> None:
        with held(writer, path) as took:
            futures = [writer.submit("jobs.add", bad if n == 5 else adding(f"{n}")) for n in range(10)]
            writer.record("jobs.made", bad)
            writer.record("jobs.made", adding("10"))
        assert [n for n, future in enumerate(futures) if future.exception(PATIENCE) is not None] == [5]
        with pytest.raises(error):
            futures[5].result()
        assert written(reading) == ["0", "1", "2", "3", "4", "6", "7", "8", "9", "10"]
        assert took == [1]
        assert writer.failure is None

    def test_that_ends_the_transaction_fails_all_and_leaves_nothing(
        self, writer: Writer, path: Path, reading: Engine
    ) -> None:
        """SQLite itself does that after some errors. What came after it would not be in a transaction."""
        writer.submit("jobs.add", adding("there")).result(PATIENCE)

        def end(session: Session) -> None:
            session.execute(text("insert or rollback into jobs select * from jobs"))

        with held(writer, path) as took:
            futures = [writer.submit("jobs.add", end if n == 2 else adding(f"{n}")) for n in range(5)]
        for future in futures:
            with pytest.raises(Unavailable, match="UNIQUE constraint"):
                future.result(PATIENCE)
        assert written(reading) == ["there"]
        assert took == [0]  # and `held` wrote nothing
        writer.submit("jobs.add", adding("later")).result(PATIENCE)
        assert written(reading) == ["there", "later"]


class TestACommitThatFails:
    def test_fails_all_and_leaves_nothing(self, writer: Writer, engine: Engine, path: Path, reading: Engine) -> None:
        """SQLite asks before it prepares a COMMIT."""
        with engine.connect() as connection:  # the only one
            driver = connection.connection.driver_connection
        assert driver is not None
        requested: list[str] = []

        def deny(action: int, operation: str | None, *_: Any) -> int:
            if action == sqlite3.SQLITE_TRANSACTION and operation == "COMMIT":
                requested.append(operation)
                return sqlite3.SQLITE_DENY
            return sqlite3.SQLITE_OK

        attempts: list[int] = []
        with held(writer, path) as took:
            futures = [writer.submit("jobs.add", lambda _: driver.set_authorizer(deny))]
            futures += [writer.submit("jobs.add", adding(f"{n}")) for n in range(20)]
            for future in futures:
                future.add_done_callback(lambda _: attempts.append(len(requested)))
            writer.record("jobs.made", adding("recorded"))
        for future in futures:
            with pytest.raises(Unavailable, match="cannot be written: not authorized"):
                future.result(PATIENCE)
        assert attempts == [1] * 21
        assert took == [0]
        assert written(reading) == []
        assert writer.failure == "not authorized"
        driver.set_authorizer(None)
        writer.submit("jobs.add", adding("later")).result(PATIENCE)
        assert written(reading) == ["recorded", "later"]
        assert writer.failure is None

    def test_on_a_full_disk(self, tmp_path: Path) -> None:
        with small_disk(tmp_path / "small", "4m") as folder:
            path = folder / "xmig.db"
            prepare_folder(path)
            engine, reading = make_engine(path, writer=True), make_engine(path)
            migrate.upgrade(path, engine)
            writer = Writer(engine)
            writer.submit("jobs.add", adding("before")).result(PATIENCE)
            fill(folder / "filler")
            with held(writer, path):
                futures = [writer.submit("jobs.add", adding(f"{n}")) for n in range(20)]
                writer.record("jobs.made", adding("recorded"))
            for future in futures:
                with pytest.raises(Unavailable) as refused:
                    future.result(PATIENCE)
                assert refused.value.code == "disk_full"
            assert written(reading) == ["before"]
            (folder / "filler").unlink()
            writer.submit("jobs.add", adding("later")).result(PATIENCE)
            assert written(reading) == ["before", "recorded", "later"]
            writer.close()
            reading.dispose()


class TestWhoGivesUp:
    def test_prevents_a_write_that_waits_and_hurts_no_other(self, writer: Writer, path: Path, reading: Engine) -> None:
        begun, go = threading.Event(), threading.Event()

        def slow(session: Session) -> None:
            begun.set()
            assert go.wait(PATIENCE)
            adding("at work")(session)

        async def all_of_them() -> list[Any]:
            async def write(work: Work) -> None:
                await asyncio.wrap_future(writer.submit("jobs.add", work))

            tasks = [asyncio.create_task(write(slow))]
            await asyncio.to_thread(begun.wait, PATIENCE)
            tasks += [asyncio.create_task(write(adding(f"{n}"))) for n in range(5)]
            await asyncio.sleep(0)
            for task in (tasks[0], tasks[1], tasks[4]):
                task.cancel()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(write(adding("too late")), 0.01)
            go.set()
            return await asyncio.gather(*tasks, return_exceptions=True)

        found = asyncio.run(all_of_them())
        assert [type(each) for each in found] == [
            asyncio.CancelledError, asyncio.CancelledError, type(None), type(None), asyncio.CancelledError, type(None)
        ]  # fmt: skip
        writer.submit("jobs.add", adding("later")).result(PATIENCE)
        assert written(reading) == ["at work", "1", "2", "4", "later"]

    def test_is_reported_so(self, writer: Writer, path: Path) -> None:
        with held(writer, path):
            future = writer.submit("jobs.add", adding("never"))
            assert future.cancel()
        with pytest.raises(CancelledError):
            future.result(PATIENCE)


def test_events_follow_their_commit_in_order(writer: Writer, path: Path, reading: Engine) -> None:
    names = [f"{n}" for n in range(50)]

    async def publish_all() -> list[str]:
        bus = Bus(writer, newest=0)
        subscription = bus.subscribe(lambda event: True)
        too_early: list[str] = []

        async def make(name: str) -> None:
            await asyncio.wrap_future(writer.submit("jobs.add", adding(name)))
            with Session(reading) as session:
                if session.get(Job, name) is None:
                    too_early.append(name)
            bus.publish("job.created", "job", name, name)

        with held(writer, path):
            tasks = [asyncio.create_task(make(name)) for name in names]
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        await bus.flushed()
        assert too_early == []
        return [event.subject_id for event in await subscription.read(PATIENCE)]

    assert asyncio.run(publish_all()) == names


WRITES = """
import os, sys, threading
from pathlib import Path
from tests.daemon.test_writes import adding
from xmigd.database.engine import make_engine
from xmigd.database.writer import Writer

writer = Writer(make_engine(Path(sys.argv[1]), writer=True))

def write(thread: int) -> None:
    for number in range(100_000):
        writer.submit("jobs.add", adding(f"{thread}-{number}")).result()
        os.write(1, f"{thread}-{number} ".encode())

for thread in range(16):
    threading.Thread(target=write, args=(thread,)).start()
"""


@pytest.mark.parametrize("acknowledged", [1, 100, 333])
def test_what_was_acknowledged_outlives_a_kill(path: Path, engine: Engine, reading: Engine, acknowledged: int) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITES, path], cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        reported = b""
        while reported.count(b" ") < acknowledged:
            piece = os.read(process.stdout.fileno(), 1 << 16)
            assert piece
            reported += piece
        process.send_signal(signal.SIGKILL)
        reported += process.stdout.read()
    names = reported.decode().split()
    assert len(names) >= acknowledged
    assert set(names) - set(written(reading)) == set()
