"""The one thread that writes. Each write has a name: xmigd/failpoints.py.

`submit` is for requests: it answers when the change is on the disk, or fails. `record` is for what happened anyway: it
never fails, and what cannot be written now (full disk) waits in order until it can be. Who reads waits for what was
accepted before (`catch_up`): what somebody has seen happen is there.

Writes that wait at the same time share one transaction, in the order in which they were accepted, each in a savepoint
of its own (docs/decisions/0040). Invariants:
  Nobody is answered before the commit of the transaction that has its write.
  A write that fails by itself leaves nothing behind, and no other write notices.
  An error of the database is nobody's own: the transaction is rolled back, every request that waits is refused, and
  records wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from xmigd import failpoints, log
from xmigd.database.engine import in_transaction
from xmigd.errors import Unavailable
from xmigd.failpoints import Write

logger = log.get("database")

T = TypeVar("T")
Work = Callable[[Session], Any]
BATCH = 128  # writes of one transaction: the first of them is not acknowledged before the last is executed
MAX_BACKLOG = 20_000
RETRY_AFTER = 1.0
READERS_PATIENCE = 5.0  # seconds; as long as SQLite waits for a lock


@dataclass(slots=True)
class _Item:
    name: Write
    work: Work
    future: Future[Any] | None
    alone: bool = False


@dataclass(slots=True)
class _Outcome:
    """Of a write whose transaction is committed."""

    result: Any = None
    error: Exception | None = None  # it failed by itself


@dataclass(slots=True)
class _Awaited:
    """By a coroutine."""

    loop: asyncio.AbstractEventLoop
    waiting: asyncio.Future[Any]
    done: Future[Any]


class Writer:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._waiting: deque[_Item] = deque()  # taken from the queue; records only, while the database takes no writes
        self._taken = 0
        self._dropped = 0
        self._commits = 0  # so far; one that has been counted can be read
        self._progress = threading.Condition()
        self._accepted = 0
        self._handled = 0  # of these: written, refused, or waiting for a database that takes writes
        self._failure: str | None = None
        self._retry_at = 0.0  # not before then, for the sake of records alone
        self._done: deque[_Awaited] = deque()  # writes that are over, and of which their loops do not know yet
        self._thread = threading.Thread(target=self._run, name="database-writer", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str | None:
        """Why nothing can be written at present."""
        return self._failure

    @property
    def version(self) -> tuple[int, int]:
        """It differs when a reader that catches up may find something else than before."""
        return self._accepted, self._commits

    def catch_up(self) -> None:
        """Wait until everything that was accepted before is written, as far as it can be at present. Not for ever: who
        reads is answered also by a database that somebody has locked."""
        with self._progress:
            wanted = self._accepted
            self._progress.wait_for(lambda: self._handled >= wanted, READERS_PATIENCE)

    def record(self, name: Write, work: Work) -> None:
        self._accept(_Item(name, work, None))

    def submit(self, name: Write, work: Work, *, alone: bool = False) -> Future[Any]:
        """The future fails with Unavailable when the database takes no writes. `alone`: in a transaction that has no
        other write. Cancelling the future prevents a write that has not been taken up."""
        future: Future[Any] = Future()
        self._accept(_Item(name, work, future, alone))
        return future

    async def write(self, name: Write, work: Callable[[Session], T], *, alone: bool = False) -> T:
        """As `submit`. A loop is woken once for all writes of a transaction: to be woken for each takes it, and this
        thread, longer than many a write."""
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[T] = loop.create_future()
        future = self.submit(name, work, alone=alone)
        future.add_done_callback(lambda done: self._done.append(_Awaited(loop, waiting, done)))
        try:
            return await waiting
        except asyncio.CancelledError:
            future.cancel()
            raise

    def close(self) -> None:
        """Write what is waiting, then stop."""
        self._queue.put(None)
        self._thread.join(timeout=10)
        self._engine.dispose()

    def _accept(self, item: _Item) -> None:
        with self._progress:
            self._accepted += 1
            self._queue.put(item)

    def _run(self) -> None:
        stopping = False
        while not stopping:
            stopping = self._take()
            due = stopping or time.monotonic() >= self._retry_at
            if due and self._failure is not None:
                self._shorten_wal()
            if due or any(item.future is not None for item in self._waiting):
                self._write_waiting()
            if self._failure is not None and not self._waiting and time.monotonic() >= self._retry_at:
                self._probe()
            self._wake()
            self._bound_backlog()
            self._count()
        if self._waiting:
            logger.error("records are lost", count=len(self._waiting), why=self._failure)

    def _take(self) -> bool:
        """Take what has been accepted; wait when there is nothing to do. True: stop after it."""
        timeout = None if self._failure is None else max(0.0, self._retry_at - time.monotonic())
        with contextlib.suppress(queue.Empty):
            for _ in range(BATCH):
                item = self._queue.get(timeout=timeout)
                if item is None:
                    return True
                self._taken += 1
                if item.future is None or item.future.set_running_or_notify_cancel():
                    self._waiting.append(item)
                timeout = 0.0
        return False

    def _write_waiting(self) -> None:
        while self._waiting:
            batch = self._next_batch()
            try:
                outcomes = self._commit(batch)
            except Exception as error:
                self._failed(error)
                self._refuse(batch, error)
                return
            self._works()
            self._count()  # before the answers: who gets one may read at once
            for item, outcome in zip(batch, outcomes, strict=True):
                _answer(item, outcome)
            self._wake()

    def _wake(self) -> None:
        """Whoever awaits what is done."""
        by_loop: dict[asyncio.AbstractEventLoop, list[_Awaited]] = {}
        while self._done:
            awaited = self._done.popleft()
            by_loop.setdefault(awaited.loop, []).append(awaited)
        for loop, done in by_loop.items():
            with contextlib.suppress(RuntimeError):  # it is closed: nobody awaits anything there
                loop.call_soon_threadsafe(_settle, done)

    def _next_batch(self) -> list[_Item]:
        batch = [self._waiting.popleft()]
        while self._waiting and len(batch) < BATCH and not (batch[0].alone or self._waiting[0].alone):
            batch.append(self._waiting.popleft())
        return batch

    def _commit(self, batch: list[_Item]) -> list[_Outcome]:
        """All of them in one transaction. Raises what made that impossible: then nothing of them is written."""
        names = [item.name for item in batch]
        with self._engine.begin() as connection:
            outcomes = [_execute(connection, item) for item in batch]
            failpoints.hit_write("write.begun", *names)
        self._commits += 1
        failpoints.hit_write("write.committed", *names)
        return outcomes

    def _refuse(self, batch: list[_Item], error: Exception) -> None:
        """Requests are refused; records stay, in order."""
        waiting = [*batch, *self._waiting]
        self._waiting = deque(item for item in waiting if item.future is None)
        for item in waiting:
            if item.future is not None:
                item.future.set_exception(_refusal(error))

    def _count(self) -> None:
        with self._progress:
            self._handled = self._taken if self._failure is not None else self._taken - len(self._waiting)
            self._progress.notify_all()

    def _shorten_wal(self) -> None:
        """What is in the write-ahead log goes into the database, and the log gives its room back: on a full disk
        it may be all there is."""
        with contextlib.suppress(OperationalError), self._engine.connect() as connection:
            driver = connection.connection.driver_connection
            assert driver is not None
            with contextlib.suppress(sqlite3.OperationalError):
                driver.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _probe(self) -> None:
        """Nothing waits to be written, so nothing else would find out that there is room again."""
        try:
            with Session(self._engine) as session, session.begin():
                session.execute(text("PRAGMA user_version = 0"))  # writes a page
        except OperationalError as error:
            self._failed(error)
        else:
            self._works()

    def _works(self) -> None:
        if self._failure is not None:
            logger.info("the database takes writes again", waiting=len(self._waiting))
            self._failure, self._retry_at = None, 0.0

    def _failed(self, error: Exception) -> None:
        why = str(_cause(error))
        if self._failure is None:
            logger.error("the database cannot be written", why=why, waiting=len(self._waiting))
        self._failure = why
        self._retry_at = time.monotonic() + RETRY_AFTER

    def _bound_backlog(self) -> None:
        with contextlib.suppress(IndexError):
            while len(self._waiting) > MAX_BACKLOG:
                self._waiting.popleft()
                self._dropped += 1
                if self._dropped % 1000 == 1:
                    logger.error("records are lost", count=self._dropped, why="too many wait to be written")


def _execute(connection: Connection, item: _Item) -> _Outcome:
    """In a savepoint: what fails by itself is taken back. Raises an error of the database."""
    try:
        with Session(connection, join_transaction_mode="create_savepoint") as session, session.begin():
            return _Outcome(item.work(session))
    except Exception as error:
        if _is_of_the_database(error) or not in_transaction(connection):
            raise
        return _Outcome(error=error)


def _is_of_the_database(error: Exception) -> bool:
    """A full disk, a lock, an I/O error; not a statement that SQLite refuses."""
    why = _cause(error)
    code: int = getattr(why, "sqlite_errorcode", 0)
    return isinstance(why, sqlite3.OperationalError) and code & 0xFF != sqlite3.SQLITE_ERROR


def _cause(error: Exception) -> BaseException:
    """What SQLite reported, without what SQLAlchemy adds."""
    return getattr(error, "orig", None) or error


def _answer(item: _Item, outcome: _Outcome) -> None:
    if item.future is None:
        if (error := outcome.error) is not None:
            logger.error("a record cannot be written", why=f"{type(error).__name__}: {error}")
    elif outcome.error is None:
        item.future.set_result(outcome.result)
    else:
        item.future.set_exception(outcome.error)


def _settle(done: list[_Awaited]) -> None:
    """In their loop."""
    for each in done:
        if each.waiting.done():  # given up
            continue
        if each.done.cancelled():
            each.waiting.cancel()
        elif (error := each.done.exception()) is not None:
            each.waiting.set_exception(error)
        else:
            each.waiting.set_result(each.done.result())


def _refusal(error: Exception) -> Unavailable:
    """What somebody reads whose change cannot be written."""
    why = _cause(error)
    if getattr(why, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL or "full" in str(why):
        return Unavailable(
            "the disk of the database is full: nothing was changed, and what runs goes on", code="disk_full",
            hint="make room on it; then ask again",
        )  # fmt: skip
    return Unavailable(f"the database cannot be written: {why}", hint="look at its disk and its permissions")
