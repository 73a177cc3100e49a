"""The bus: what is published is written down, gets its place in the sequence, and then reaches the listeners.

Invariants:
  A listener never sees an event that a crash could take back: delivery follows the commit.
  Ids are given in the order of publication, without gaps, and never twice.
  A listener gets everything from its subscription on, or its subscription ends; nothing is skipped.
Transient events (progress between two phases, snapshots) have no id and are not kept: who missed one has missed a
sample.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from fastapi.sse import format_sse_event
from sqlalchemy.orm import Session

from xmigd import log
from xmigd.database.writer import Writer
from xmigd.errors import Unavailable
from xmigd.events import repository
from xmigd.waiting import happens

logger = log.get("events")

EventType = Literal[
    "process.state", "process.location", "fault", "fault.acknowledged", "recovery", "snapshot", "operation.created",
    "operation.progress", "operation.ended", "device.changed", "device.health", "breaker.changed", "policy.changed",
    "job.changed", "job.created", "job.ended", "job.exited", "job.rotated", "consolidation.undone",
    "checkpoint.failed",
    "checkpoint.policy", "checkpoint.mirrored", "checkpoint.mirror_failed", "transfer.changed", "checkpoint.on_disk",
    "checkpoint.disk_failed", "checkpoint.last", "checkpoint.lost", "process.unprotected", "log", "audit",
    "events.lost",
]  # fmt: skip

BETWEEN_DELIVERIES = 0.05  # seconds: what happens closer together travels together
RETRY_AFTER = 1.0  # seconds, when the database takes no writes
MAX_WAITING = 20_000  # events that wait for the database
QUEUE = 2_000  # events that a listener may be behind
TRIM_EVERY = 256
ROOT = 0  # owns what belongs to nobody that is known


@dataclass(frozen=True, kw_only=True)
class Event:
    id: int | None  # None: transient
    type: str
    subject_type: str
    subject_id: str
    job_id: str | None
    owner: int | None
    at: float
    data: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id, "type": self.type, "subject": {"type": self.subject_type, "id": self.subject_id},
            "job_id": self.job_id, "at": self.at, "data": self.data,
        }  # fmt: skip

    @cached_property
    def wire(self) -> bytes:
        """As text/event-stream has it; made once for all listeners."""
        return format_sse_event(
            data_str=json.dumps(self.as_dict(), separators=(",", ":")), event=self.type,
            id=None if self.id is None else str(self.id),
        )  # fmt: skip


@dataclass(slots=True)
class _Published:
    durable: bool
    row: dict[str, Any]


class Subscription:
    """What one listener has not read yet."""

    def __init__(self, sees: Callable[[Event], bool], mark: int, queue: int = QUEUE) -> None:
        self.mark = mark  # the newest id that had been delivered when it began; older ones are in the database
        self.ended: str | None = None  # why nothing more will come
        self._sees = sees
        self._queue = queue
        self._events: deque[Event] = deque()
        self._changed = asyncio.Event()

    def offer(self, events: list[Event]) -> None:
        self._events.extend(event for event in events if self._sees(event))
        if len(self._events) > self._queue:
            self._events.clear()
            self.ended = "too slow"
        if self._events or self.ended:
            self._changed.set()

    def end(self, why: str) -> None:
        self.ended = self.ended or why
        self._changed.set()

    async def read(self, patience: float) -> list[Event]:
        """What has come since; empty after `patience` seconds, or at the end."""
        if not self._events and self.ended is None and not await happens(self._changed, patience):
            return []
        self._changed.clear()
        found = list(self._events)
        self._events.clear()
        return found


class Bus:
    """Lives in the event loop's thread."""

    def __init__(self, writer: Writer, *, newest: int, keep: int = 20_000) -> None:
        self._keep = keep
        self.delivered = newest
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._pending: list[_Published] = []
        self._writing = False
        self._timer: asyncio.TimerHandle | None = None
        self._next_flush = 0.0
        self._failing = False
        self._trimmed_at = newest
        self._owners: dict[str, int] = {}
        self._subscriptions: set[Subscription] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.counts: dict[str, int] = {}

    @property
    def listeners(self) -> int:
        return len(self._subscriptions)

    def keep(self, count: int) -> None:
        """So many events from now on; older ones are trimmed."""
        self._keep = count

    def publish(
        self,
        type: EventType,
        subject_type: str,
        subject_id: str,
        job_id: str | None = None,
        data: dict[str, Any] | None = None,
        *,
        owner: int | None = None,
        durable: bool = True,
    ) -> None:
        """Cheap, never fails. `owner`: who sees it besides operators; a job's event is its owner's anyway, one without
        owner and job is everybody's."""
        self.counts[type] = self.counts.get(type, 0) + 1
        self._pending.append(
            _Published(
                durable,
                {
                    "type": type, "subject_type": subject_type, "subject_id": subject_id, "job_id": job_id,
                    "owner": owner, "at": time.time(), "data": data or {},
                },
            )
        )  # fmt: skip
        if len(self._pending) > MAX_WAITING:
            self._lose(MAX_WAITING // 2, "the database takes no writes")
        self._idle.clear()
        self._arm()

    def subscribe(self, sees: Callable[[Event], bool]) -> Subscription:
        subscription = Subscription(sees, self.delivered)
        self._subscriptions.add(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        self._subscriptions.discard(subscription)

    async def flushed(self) -> None:
        """Everything that was published is on the disk."""
        await self._idle.wait()

    async def close(self, patience: float = 2.0) -> None:
        """Write what is left and end every subscription."""
        self._next_flush = 0.0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._arm()
        if not await happens(self._idle, patience):
            logger.error("events are lost", count=len(self._pending), why="the database takes no writes")
        self._end_all("xmigd is stopping")

    def _lose(self, count: int, why: str) -> None:
        """Give up the oldest that wait. Who listens is informed, now and in a replay."""
        logger.error("events are lost", count=count, why=why)
        row = {
            "type": "events.lost", "subject_type": "node", "subject_id": "", "job_id": None, "owner": None,
            "at": time.time(), "data": {"count": count, "why": why},
        }  # fmt: skip
        self._pending[:count] = [_Published(True, row)]

    def _end_all(self, why: str) -> None:
        for subscription in self._subscriptions:
            subscription.end(why)

    def _arm(self) -> None:
        if self._pending and not self._writing and self._timer is None:
            self._timer = self._loop.call_later(max(0.0, self._next_flush - self._loop.time()), self._flush)

    def _flush(self) -> None:
        self._timer = None
        batch, self._pending = self._pending, []
        self._writing = True
        first = self.delivered + 1
        written = self._writer.submit("events.add", lambda session: self._write(session, batch, first))
        future = asyncio.wrap_future(written)
        future.add_done_callback(lambda done: self._written(done, batch))

    def _write(self, session: Session, batch: list[_Published], first: int) -> dict[str, int]:
        """In the writer's thread. Returns the owners of the jobs that were not known."""
        unknown = {p.row["job_id"] for p in batch if p.row["owner"] is None and p.row["job_id"] is not None}
        found = repository.owners(session, [job for job in unknown if job not in self._owners])
        for published in batch:
            job = published.row["job_id"]
            if published.row["owner"] is None and job is not None:
                published.row["owner"] = self._owners.get(job, found.get(job, ROOT))
        durable = [published.row for published in batch if published.durable]
        if durable:
            repository.insert_all(session, durable, first)
            newest = first + len(durable) - 1
            if newest - self._trimmed_at >= TRIM_EVERY:
                repository.trim(session, newest - self._keep)
                self._trimmed_at = newest
        return found

    def _written(self, done: asyncio.Future[dict[str, int]], batch: list[_Published]) -> None:
        self._writing = False
        error = None if done.cancelled() else done.exception()
        if done.cancelled() or isinstance(error, Unavailable):
            if not self._failing:
                logger.error("events wait", why=str(error))
            self._failing = True
            self._pending = [published for published in batch if published.durable] + self._pending
            self._next_flush = self._loop.time() + RETRY_AFTER
        elif error is not None:  # one of them can never be written
            self._pending = batch + self._pending
            self._lose(len(batch), f"{type(error).__name__}: {error}")
        else:
            self._failing = False
            if len(self._owners) > 10_000:
                self._owners.clear()
            self._owners.update(done.result())
            self._next_flush = self._loop.time() + BETWEEN_DELIVERIES
            self._deliver(batch)
        if self._pending:
            self._arm()
        else:
            self._idle.set()

    def _deliver(self, batch: list[_Published]) -> None:
        ids = itertools.count(self.delivered + 1)
        events = [Event(id=next(ids) if each.durable else None, **each.row) for each in batch]
        self.delivered += sum(each.durable for each in batch)
        for subscription in self._subscriptions:
            subscription.offer(events)
