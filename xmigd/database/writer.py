"""The one thread that writes.

`submit` is for requests: it answers when the change is on the disk, or fails. `record` is for what happened anyway: it
never fails, and what cannot be written now (full disk) waits in order until it can be. Work that is waiting together is
committed together.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from xmigd import log
from xmigd.errors import Unavailable

logger = log.get("database")

Work = Callable[[Session], Any]
BATCH = 128
MAX_BACKLOG = 20_000
RETRY_AFTER = 1.0


@dataclass(slots=True)
class _Item:
    work: Work
    future: Future[Any] | None


class Writer:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._backlog: deque[_Item] = deque()
        self._dropped = 0
        self._failure: str | None = None
        self._retry_at = 0.0
        self._thread = threading.Thread(target=self._run, name="database-writer", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str | None:
        """Why nothing can be written at present."""
        return self._failure

    def record(self, work: Work) -> None:
        self._queue.put(_Item(work, None))

    def submit(self, work: Work) -> Future[Any]:
        """The future fails with Unavailable when the database takes no writes."""
        future: Future[Any] = Future()
        self._queue.put(_Item(work, future))
        return future

    def close(self) -> None:
        """Write what is waiting, then stop."""
        self._queue.put(None)
        self._thread.join(timeout=10)
        self._engine.dispose()

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
                self._flush()
            self._bound_backlog()
        if self._backlog:
            logger.error("records are lost", count=len(self._backlog), why=self._failure)

    def _next_batch(self) -> tuple[list[_Item], bool]:
        batch: list[_Item] = []
        try:
            timeout = max(0.0, self._retry_at - time.monotonic()) if self._backlog else None
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
            with Session(self._engine) as session, session.begin():
                result = item.work(session)
        except OperationalError as error:
            self._failed(error)
            item.future.set_exception(
                Unavailable(f"the database cannot be written: {error.orig}", hint="make room on its disk")
            )
        except Exception as error:
            item.future.set_exception(error)
        else:
            item.future.set_result(result)

    def _flush(self) -> None:
        while self._backlog:
            batch = list(self._backlog)[:BATCH]
            try:
                with Session(self._engine) as session, session.begin():
                    for item in batch:
                        item.work(session)
                        session.flush()
            except OperationalError as error:
                self._failed(error)
                return
            except Exception:
                self._one_by_one(len(batch))
            else:
                for _ in batch:
                    self._backlog.popleft()
            if self._failure is not None:
                logger.info("the database takes writes again", waiting=len(self._backlog))
                self._failure = None

    def _one_by_one(self, count: int) -> None:
        """One of these can never be written: write the others, name that one."""
        for _ in range(count):
            try:
                with Session(self._engine) as session, session.begin():
                    self._backlog[0].work(session)
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
