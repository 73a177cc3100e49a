"""The one thread that writes. Each write has a name: xmigd/failpoints.py.

`submit` is for requests: it answers when the change is on the disk, or fails. `record` is for what happened anyway: it
never fails, and what cannot be written now (full disk) waits in order until it can be. Work that is waiting together is
committed together. Who reads waits for what was accepted before (`catch_up`): what somebody has seen happen is there.
"""

from __future__ import annotations

import contextlib
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from xmigd import failpoints, log
from xmigd.errors import Unavailable
from xmigd.failpoints import Write

logger = log.get("database")

Work = Callable[[Session], Any]
BATCH = 128
MAX_BACKLOG = 20_000
RETRY_AFTER = 1.0
READERS_PATIENCE = 5.0  # seconds; as long as SQLite waits for a lock


@dataclass(slots=True)
class _Item:
    name: Write
    work: Work
    future: Future[Any] | None


class Writer:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._backlog: deque[_Item] = deque()
        self._dropped = 0
        self._commits = 0  # so far; one that has been counted can be read
        self._progress = threading.Condition()
        self._accepted = 0
        self._handled = 0  # of these: written, refused, or waiting for a database that takes writes
        self._failure: str | None = None
        self._retry_at = 0.0
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

    def submit(self, name: Write, work: Work) -> Future[Any]:
        """The future fails with Unavailable when the database takes no writes."""
        future: Future[Any] = Future()
        self._accept(_Item(name, work, future))
        return future

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
            batch, stopping = self._next_batch()
            for item in batch:
                if item.future is None:
                    self._backlog.append(item)
            for item in batch:
                if item.future is not None:
                    self._flush()  # what happened before it comes before it
                    self._answer(item)
            if stopping or time.monotonic() >= self._retry_at:
                if self._failure is not None:
                    self._shorten_wal()
                self._flush()
                if self._failure is not None and not self._backlog and not stopping:
                    self._probe()
            self._bound_backlog()
            with self._progress:
                self._handled += len(batch)
                self._progress.notify_all()
        if self._backlog:
            logger.error("records are lost", count=len(self._backlog), why=self._failure)

    def _next_batch(self) -> tuple[list[_Item], bool]:
        batch: list[_Item] = []
        try:
            timeout = None
            if self._backlog or self._failure is not None:
                timeout = max(0.0, self._retry_at - time.monotonic())
            first = self._queue.get(timeout=timeout)
            while True:
                if first is None:
                    return batch, True
                batch.append(first)
                if len(batch) >= BATCH:
                    return batch, False
                first = self._queue.get_nowait()
        except queue.Empty:
            return batch, False

    def _answer(self, item: _Item) -> None:
        assert item.future is not None
        try:
            result = self._commit([item])
        except OperationalError as error:
            self._failed(error)
            item.future.set_exception(_refusal(error))
        except Exception as error:
            item.future.set_exception(error)
        else:
            self._works()
            item.future.set_result(result)

    def _commit(self, items: list[_Item]) -> Any:
        """All of them in one transaction. Returns what the last one did."""
        names = [item.name for item in items]
        result: Any = None
        with Session(self._engine) as session, session.begin():
            for item in items:
                result = item.work(session)
                session.flush()
            failpoints.hit_write("write.begun", *names)
        self._commits += 1
        failpoints.hit_write("write.committed", *names)
        return result

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
            logger.info("the database takes writes again", waiting=len(self._backlog))
            self._failure = None

    def _flush(self) -> None:
        while self._backlog:
            batch = list(self._backlog)[:BATCH]
            try:
                self._commit(batch)
            except OperationalError as error:
                self._failed(error)
                return
            except Exception:
                self._one_by_one(len(batch))
            else:
                for _ in batch:
                    self._backlog.popleft()
            self._works()

    def _one_by_one(self, count: int) -> None:
        """One of these can never be written: write the others, name that one."""
        for _ in range(count):
            try:
                self._commit([self._backlog[0]])
            except OperationalError as error:
                self._failed(error)
                return
            except Exception as error:
                logger.error("a record cannot be written", why=f"{type(error).__name__}: {error}")
            self._backlog.popleft()

    def _failed(self, error: OperationalError) -> None:
        if self._failure is None:
            logger.error("the database cannot be written", why=str(error.orig), waiting=len(self._backlog))
        self._failure = str(error.orig)
        self._retry_at = time.monotonic() + RETRY_AFTER

    def _bound_backlog(self) -> None:
        with contextlib.suppress(IndexError):
            while len(self._backlog) > MAX_BACKLOG:
                self._backlog.popleft()
                self._dropped += 1
                if self._dropped % 1000 == 1:
                    logger.error("records are lost", count=self._dropped, why="too many wait to be written")


def _refusal(error: OperationalError) -> Unavailable:
    """What somebody reads whose change cannot be written."""
    if getattr(error.orig, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL or "full" in str(error.orig):
        return Unavailable(
            "the disk of the database is full: nothing was changed, and what runs goes on", code="disk_full",
            hint="make room on it; then ask again",
        )  # fmt: skip
    return Unavailable(f"the database cannot be written: {error.orig}", hint="look at its disk and its permissions")
