"""Events as callers get them: pages, and a stream that begins in the past and goes on as things happen."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence

from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event

from xmigd.database import models
from xmigd.database.reader import Reader
from xmigd.errors import Unavailable
from xmigd.events import repository
from xmigd.events.bus import Bus, Event
from xmigd.security.callers import Caller
from xmigd.security.tokens import Tokens

MAX_LISTENERS = 512
REPLAY_PAGE = 500
KEEPALIVE = 15.0  # seconds


class Events:
    def __init__(self, reader: Reader, bus: Bus, tokens: Tokens) -> None:
        self._reader = reader
        self._bus = bus
        self._tokens = tokens

    def page(self, caller: Caller, after: int | None, before: int | None, limit: int) -> list[Event]:
        with self._reader.session() as session:
            rows = repository.page(session, after=after, before=before, owner=caller.owner, limit=limit)
        return [_event(row) for row in rows]

    def check_room(self) -> None:
        """For one who listens. Raises Unavailable."""
        if self._bus.listeners >= MAX_LISTENERS:
            raise Unavailable("too many listen already", code="too_many_listeners", hint="ask for pages (?after=)")

    async def listen(self, caller: Caller, after: int | None) -> AsyncIterator[bytes]:
        """First what is in the database up to where the subscription begins, then the subscription."""
        subscription = self._bus.subscribe(lambda event: sees(caller, event))
        try:
            yield format_sse_event(retry=2000, comment=f"events after {subscription.mark if after is None else after}")
            if after is not None and after != subscription.mark:
                reset = await asyncio.to_thread(self._why_reset, after, subscription.mark)
                if reset is not None:
                    yield reset
                else:
                    async for chunk in self._replay(caller, after, subscription.mark):
                        yield chunk
            while True:
                events = await subscription.read(KEEPALIVE)
                if not self._tokens.is_valid(caller):
                    yield format_sse_event(comment="goodbye: the token is not valid any more")
                    return
                if events:
                    yield b"".join(event.wire for event in events)
                elif subscription.ended is not None:
                    yield format_sse_event(comment=f"goodbye: {subscription.ended}")
                    return
                else:
                    yield KEEPALIVE_COMMENT
        finally:
            self._bus.unsubscribe(subscription)

    def _why_reset(self, after: int, mark: int) -> bytes | None:
        with self._reader.session() as session:
            oldest = repository.oldest(session)
        first = mark + 1 if oldest is None else oldest
        if first - 1 <= after <= mark:
            return None
        why = "trimmed" if after < first else "unknown"
        data = json.dumps({"why": why, "after": after, "oldest": oldest, "newest": mark}, separators=(",", ":"))
        return format_sse_event(event="reset", data_str=data, id=str(mark))

    async def _replay(self, caller: Caller, after: int, mark: int) -> AsyncIterator[bytes]:
        def read(last: int) -> Sequence[models.Event]:
            with self._reader.session() as session:
                return repository.page(session, after=last, up_to=mark, owner=caller.owner, limit=REPLAY_PAGE)

        while rows := await asyncio.to_thread(read, after):
            yield b"".join(_event(row).wire for row in rows)
            after = rows[-1].id


def _event(row: models.Event) -> Event:
    return Event(
        id=row.id, type=row.type, subject_type=row.subject_type, subject_id=row.subject_id, job_id=row.job_id,
        owner=row.owner, at=row.at, data=row.data,
    )  # fmt: skip


def sees(caller: Caller, event: Event) -> bool:
    """Operators everything; others what concerns their jobs, and the node where it concerns everybody."""
    return caller.owner is None or (event.owner in (None, caller.owner) and event.type != "audit")
