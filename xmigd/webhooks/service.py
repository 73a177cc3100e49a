"""Webhooks, as operators make them, and the deliveries.

Invariants:
  Each webhook gets its events in their order; none is skipped: it is delivered, or a dead letter, before the position
  goes past it. The position is on the disk, so another daemon goes on there: an event may be sent twice, with the same
  id, and never not at all.
  A target waits for itself only: each webhook has tasks of its own, and the requests another thread (sender.py).
  A secret is never shown again.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sqlalchemy.orm import Session

from xmigd import log
from xmigd.database.models import DeadLetter, Webhook
from xmigd.database.reader import Reader
from xmigd.database.writer import Writer
from xmigd.errors import Conflict, Invalid, NotFound, XmigError
from xmigd.events.bus import Bus
from xmigd.failpoints import Write
from xmigd.ids import new_id
from xmigd.settings import Settings
from xmigd.waiting import happens
from xmigd.webhooks import repository
from xmigd.webhooks.schemas import DeadLetterInfo, WebhookChange, WebhookInfo, WebhookRequest
from xmigd.webhooks.sender import Answer, Sender

logger = log.get("webhooks")

MOST = 100
LONGEST_WAIT = 60.0  # seconds before the next attempt
PAGE = 200  # events that are read at once
IDLE = 30.0  # seconds after which a webhook looks by itself whether there are events
DATABASE_WAIT = 1.0  # seconds, when the database takes no writes
NOT_KEPT = ("snapshot", "log")  # events that are samples: they have no id
PREFIX = "whsec_"


@dataclass(slots=True)
class _Hook:
    """A webhook that works."""

    row: Webhook
    news: asyncio.Event = field(default_factory=asyncio.Event)
    queued: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    position: int = 0
    failing_since: float | None = None
    attempts: int = 0
    last_error: str | None = None
    last_delivery_at: float | None = None

    def takes(self, type: str) -> bool:
        return type in self.row.types if self.row.types else type != "audit"


class Webhooks:
    def __init__(
        self, *, writer: Writer, reader: Reader, bus: Bus, settings: Settings, keep: Callable[[], int]
    ) -> None:
        """`keep`: how many events are kept."""
        self._writer = writer
        self._reader = reader
        self._bus = bus
        self._node = settings.node
        self._attempts, self._first_wait = settings.webhook_attempts, settings.webhook_wait
        self._keep = keep
        self._sender = Sender(settings.webhook_timeout)
        self._hooks: dict[str, _Hook] = {}
        self._changing = asyncio.Lock()  # what works is what was written last
        self._listening: asyncio.Task[None] | None = None

    # --- the daemon's start and end -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Go on where the last daemon was."""

        def read() -> Sequence[Webhook]:
            with self._reader.session() as session:
                rows = repository.listed(session)
                session.expunge_all()
                return rows

        for row in await asyncio.to_thread(read):
            self._begin(row)

    async def stop(self) -> None:
        tasks = [task for hook in self._hooks.values() for task in hook.tasks]
        if self._listening is not None:
            tasks.append(self._listening)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._sender.close()

    # --- what is requested --------------------------------------------------------------------------------------------

    async def listed(self) -> list[WebhookInfo]:
        def read() -> tuple[Sequence[Webhook], dict[str, int]]:
            with self._reader.session() as session:
                rows, counts = repository.listed(session), repository.counts(session)
                session.expunge_all()
                return rows, counts

        rows, counts = await asyncio.to_thread(read)
        return [self._info(row, counts.get(row.id, 0)) for row in rows]

    async def find(self, webhook: str) -> WebhookInfo:
        """Raises NotFound."""
        found = [info for info in await self.listed() if info.id == webhook]
        if not found:
            raise NotFound(f"there is no webhook {webhook[:64]!r}", hint="xmigctl webhook list lists them")
        return found[0]

    async def add(self, wanted: WebhookRequest, *, by: str) -> tuple[WebhookInfo, str]:
        """It gets what happens from now on. Returns the secret, too. Raises Conflict: there are too many."""
        _check_types(wanted.types)
        secret = wanted.secret or PREFIX + secrets.token_urlsafe(32)
        row = Webhook(
            id=new_id(), url=wanted.url, secret=secret, types=list(wanted.types), enabled=wanted.enabled,
            created_at=time.time(), created_by=by[:255], version=1, position=self._bus.delivered, delivered=0,
            dropped=0,
        )  # fmt: skip

        def write(session: Session) -> None:
            if len(repository.listed(session)) >= MOST:
                raise Conflict(f"there are {MOST} webhooks", code="too_many_webhooks", hint="remove some")
            session.merge(row)

        async with self._changing:
            await self._write("webhooks.add", write)
            self._begin(row)
        return self._info(row, 0), secret

    async def change(self, webhook: str, change: WebhookChange, *, check: Callable[[int], None]) -> WebhookInfo:
        """`check` refuses a version that is not the one to be changed. Raises NotFound, and what `check` does."""
        _check_types(change.types or [])
        values = {name: value for name, value in change.model_dump(exclude_unset=True).items() if value is not None}

        def write(session: Session) -> Webhook:
            row = session.get(Webhook, webhook)
            if row is None:
                raise NotFound(f"there is no webhook {webhook[:64]!r}", hint="xmigctl webhook list lists them")
            check(row.version)
            for name, value in values.items():
                setattr(row, name, value)
            row.version += 1
            session.flush()
            session.expunge(row)
            return row

        async with self._changing:
            row = await self._write("webhooks.change", write)
            row.position = max(row.position, await self._end(webhook))
            self._begin(row)
        return await self.find(webhook)

    async def remove(self, webhook: str) -> None:
        """With its dead letters. Raises NotFound."""

        def write(session: Session) -> None:
            row = session.get(Webhook, webhook)
            if row is None:
                raise NotFound(f"there is no webhook {webhook[:64]!r}", hint="xmigctl webhook list lists them")
            session.delete(row)

        async with self._changing:
            await self._write("webhooks.remove", write)
            await self._end(webhook)

    async def test(self, webhook: str) -> Answer:
        """Send it an event that nothing has happened for, once. Raises NotFound."""
        await self.find(webhook)
        event = {"id": None, "type": "webhook.test", "subject": {"type": "webhook", "id": webhook}, "job_id": None,
                 "external_id": None, "at": time.time(), "data": {}}  # fmt: skip
        hook = self._hooks.get(webhook)
        if hook is None:
            raise NotFound("the webhook was removed meanwhile")
        return await self._send(hook, event, 1)

    async def letters(self, webhook: str, *, before: int | None, limit: int) -> list[DeadLetterInfo]:
        """The newest first. Raises NotFound."""
        await self.find(webhook)

        def read() -> list[DeadLetterInfo]:
            with self._reader.session() as session:
                rows = repository.letters(session, webhook, before=before, limit=limit)
                return [_letter(row) for row in rows]

        return await asyncio.to_thread(read)

    async def retry(self, webhook: str, numbers: Sequence[int] | None) -> int:
        """Send dead letters again, the oldest first, each once. Returns how many. Raises NotFound."""
        await self.find(webhook)
        found: int = await self._write(
            "webhooks.retry", lambda session: repository.queue(session, webhook, numbers)
        )  # fmt: skip
        if (hook := self._hooks.get(webhook)) is not None:
            hook.queued.set()
        return found

    def _info(self, row: Webhook, letters: int) -> WebhookInfo:
        hook = self._hooks.get(row.id) or _Hook(row)
        position = max(row.position, hook.position)
        return WebhookInfo(
            id=row.id, url=row.url, types=row.types, enabled=row.enabled, created_at=row.created_at,
            created_by=row.created_by, position=position, behind=max(0, self._bus.delivered - position),
            delivered=row.delivered, dead_letters=letters, dropped=row.dropped, version=row.version,
            failing_since=hook.failing_since, attempts=hook.attempts, last_error=hook.last_error,
            last_delivery_at=hook.last_delivery_at,
        )  # fmt: skip

    # --- deliveries ---------------------------------------------------------------------------------------------------

    def _begin(self, row: Webhook) -> None:
        hook = self._hooks[row.id] = _Hook(row, position=row.position)
        if not row.enabled:
            return
        loop = asyncio.get_running_loop()
        hook.queued.set()  # what was queued when the last daemon left
        hook.tasks = [loop.create_task(self._guarded(hook, work)) for work in (self._follow, self._send_again)]
        if self._listening is None:
            self._listening = loop.create_task(self._listen())

    async def _end(self, webhook: str) -> int:
        """Returns its position; 0: it is not there."""
        hook = self._hooks.pop(webhook, None)
        if hook is None:
            return 0
        for task in hook.tasks:
            task.cancel()
        await asyncio.gather(*hook.tasks, return_exceptions=True)
        return hook.position

    async def _guarded(self, hook: _Hook, work: Callable[[_Hook], Awaitable[None]]) -> None:
        """For ever: what fails inside xmigd is tried again."""
        while True:
            try:
                await work(hook)
            except Exception:
                logger.exception("deliveries failed inside xmigd", webhook=hook.row.id)
                await asyncio.sleep(LONGEST_WAIT)

    async def _listen(self) -> None:
        """Wake the webhooks when there is something new; what it is they read in the database."""
        subscription = self._bus.subscribe(lambda event: event.id is not None)
        try:
            while True:
                await subscription.read(IDLE)
                if subscription.ended is not None:
                    self._bus.unsubscribe(subscription)
                    subscription = self._bus.subscribe(lambda event: event.id is not None)
                    await asyncio.sleep(DATABASE_WAIT)
                for hook in self._hooks.values():
                    hook.news.set()
        finally:
            self._bus.unsubscribe(subscription)

    async def _follow(self, hook: _Hook) -> None:
        """Deliver one event after the other."""
        while True:
            hook.news.clear()
            await self._hurry(hook)
            events = await asyncio.to_thread(self._following, hook.position)
            if not events:
                await happens(hook.news, IDLE)
                continue
            if events[0]["id"] > hook.position + 1:  # they were trimmed, before it was their turn
                await self._deliver(hook, _lost(hook.position + 1, events[0]["id"] - 1))
            for event in events:
                if event["id"] <= hook.position:
                    continue  # it went to the dead letters meanwhile
                if hook.takes(event["type"]):
                    await self._deliver(hook, event)
                else:
                    hook.position = event["id"]
            # What nobody wants is read again after a restart: that is cheaper than to write it down each time.
            if hook.position - hook.row.position >= min(PAGE, self._keep() // 4):
                await self._proceed(hook, hook.position)

    def _following(self, position: int) -> list[dict[str, Any]]:
        with self._reader.session() as session:
            return repository.following(session, position, PAGE)

    async def _deliver(self, hook: _Hook, event: Mapping[str, Any]) -> None:
        """Until the target has taken it, or it is a dead letter."""
        attempt = 0
        while True:
            attempt += 1
            answer = await self._send(hook, event, attempt)
            if answer.error is None:
                hook.attempts, hook.failing_since = 0, None
                hook.last_delivery_at = time.time()
                await self._proceed(hook, event["id"], delivered=1)
                return
            hook.attempts, hook.last_error = attempt, answer.error
            if hook.failing_since is None:
                hook.failing_since = time.time()
                logger.warning("a webhook's target does not take an event", webhook=hook.row.id, why=answer.error)
            if attempt >= self._attempts:
                await self._bury(hook, [event], attempt, answer.error)
                return
            await asyncio.sleep(self._wait(attempt))
            await self._hurry(hook)
            if event["id"] <= hook.position:
                return  # it went to the dead letters with others

    def _wait(self, attempt: int) -> float:
        wait: float = min(self._first_wait * 2.0 ** (attempt - 1), LONGEST_WAIT)
        return wait * random.uniform(0.75, 1.0)  # not all targets of one machine at once

    async def _hurry(self, hook: _Hook) -> None:
        """Events are kept in a certain number. What is half as old goes to the dead letters, before it is gone."""
        while (late := self._bus.delivered - max(1, self._keep() // 2) - hook.position) > 0:
            events = (await asyncio.to_thread(self._following, hook.position))[:late]
            if not events:
                return
            if events[0]["id"] > hook.position + 1:
                events.insert(0, _lost(hook.position + 1, events[0]["id"] - 1))
            why = f"too many events waited for the target: {hook.last_error or 'it is too slow'}"
            kept = [event for event in events if hook.takes(event["type"]) or event["type"] == "events.lost"]
            await self._bury(hook, kept, hook.attempts, why, up_to=events[-1]["id"])

    async def _send_again(self, hook: _Hook) -> None:
        """Dead letters that are queued, each once."""

        def read() -> Sequence[DeadLetter]:
            with self._reader.session() as session:
                rows = repository.letters(session, hook.row.id, queued=True, limit=PAGE, rising=True)
                session.expunge_all()
                return rows

        while True:
            await hook.queued.wait()
            hook.queued.clear()
            while letters := await asyncio.to_thread(read):
                for letter in letters:
                    answer = await self._send(hook, letter.event, letter.attempts + 1)
                    await self._write_surely(partial(_sent_again, letter=letter, error=answer.error))

    async def _send(self, hook: _Hook, event: Mapping[str, Any], attempt: int) -> Answer:
        body = json.dumps({**event, "node": self._node, "webhook": hook.row.id}, separators=(",", ":")).encode()
        headers = {
            "Xmig-Event-Id": "" if event["id"] is None else str(event["id"]), "Xmig-Event-Type": event["type"],
            "Xmig-Webhook": hook.row.id, "Xmig-Attempt": str(attempt),
        }  # fmt: skip
        return await self._sender.send(hook.row.url, hook.row.secret, body, headers)

    async def _proceed(self, hook: _Hook, position: int, delivered: int = 0) -> None:
        hook.position = position
        hook.row.position = position
        await self._write_surely(
            lambda session: repository.proceed(session, hook.row.id, position, delivered=delivered)
        )

    async def _bury(
        self, hook: _Hook, events: Sequence[Mapping[str, Any]], attempts: int, why: str, *, up_to: int | None = None
    ) -> None:
        position = events[-1]["id"] if up_to is None else up_to
        logger.error("a webhook has dead letters", webhook=hook.row.id, count=len(events), why=why)

        def write(session: Session) -> None:
            if events:
                repository.bury(session, hook.row.id, events, attempts, why[:500])
            repository.proceed(session, hook.row.id, position)

        await self._write_surely(write)
        hook.position = hook.row.position = position

    async def _write(self, name: Write, work: Callable[[Session], Any]) -> Any:
        """Raises Unavailable."""
        return await self._writer.write(name, work)

    async def _write_surely(self, work: Callable[[Session], Any]) -> None:
        """Nothing goes on before it is on the disk."""
        while True:
            try:
                await self._write("webhooks.progress", work)
            except XmigError as error:
                logger.error("a webhook waits for the database", why=error.message)
                await asyncio.sleep(DATABASE_WAIT)
            else:
                return


def _sent_again(session: Session, *, letter: DeadLetter, error: str | None) -> None:
    repository.sent_again(session, letter, error)


def _check_types(types: Sequence[str]) -> None:
    """Raises Invalid."""
    for type in types:
        if type in NOT_KEPT:
            raise Invalid(f"types: {type} is a sample, which is not kept", hint="listen to it: GET /v1/events")


def _lost(first: int, last: int) -> dict[str, Any]:
    """In the place of events that were not kept until it was their turn."""
    data = {"count": last - first + 1, "why": "they were trimmed", "first": first, "last": last}
    return {
        "id": last, "type": "events.lost", "subject": {"type": "node", "id": ""}, "job_id": None, "external_id": None,
        "at": time.time(), "data": data,
    }  # fmt: skip


def _letter(row: DeadLetter) -> DeadLetterInfo:
    return DeadLetterInfo(
        number=row.number, event_id=row.event_id, type=row.event["type"], event=row.event, attempts=row.attempts,
        error=row.error, queued=row.queued, at=row.at,
    )  # fmt: skip
