"""Events: a stream for who listens, pages for who asks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from starlette.responses import Response

from xmigd.api.context import AnyCaller, Limit, Node, TheNode
from xmigd.api.schemas import EXACT, EventInfo
from xmigd.connections.peers import Who, user
from xmigd.connections.quotas import Place
from xmigd.database import models
from xmigd.errors import Unavailable
from xmigd.events import repository
from xmigd.events.bus import Event
from xmigd.security.callers import Caller

router = APIRouter(prefix="/v1/events")

STREAM = "text/event-stream"
MAX_LISTENERS = 512
REPLAY_PAGE = 500
KEEPALIVE = 15.0  # seconds


@router.get(
    "",
    operation_id="list_events",
    response_model=list[EventInfo],
    responses={
        200: {
            "description": "A page; with `Accept: text/event-stream`, a stream that begins after `Last-Event-ID` or "
            "`after`, or now. It begins with an event `reset` where events that were asked for are not kept any more: "
            "read everything again. A listener that is too slow is disconnected; it goes on with `Last-Event-ID`.",
            "content": {STREAM: {"schema": {"type": "string"}}},
        }
    },
)
async def list_events(
    node: TheNode,
    caller: AnyCaller,
    request: Request,
    after: Annotated[int | None, Query(ge=0, le=EXACT, description="what followed this id, oldest first")] = None,
    before: Annotated[int | None, Query(ge=0, le=EXACT, description="what came before this id")] = None,
    limit: Limit = 100,
    last_event_id: Annotated[str | None, Header(pattern=r"^[0-9]{1,18}$", description="where a stream goes on")] = None,
) -> list[EventInfo] | Response:
    """What happened. With `after` oldest first, otherwise the newest first; or a stream."""
    if STREAM not in request.headers.get("accept", ""):
        return await asyncio.to_thread(_page, node, caller, after, before, limit)
    if node.bus.listeners >= MAX_LISTENERS:
        raise Unavailable("too many listen already", code="too_many_listeners", hint="ask for pages (?after=)")
    place: Place | None = getattr(request.state, "place", None)
    if place is not None:
        place.listen(user(caller.uid) if caller.uid is not None else Who(caller.name))
    start = int(last_event_id) if last_event_id is not None else after
    return EventSourceResponse(
        _stream(node, caller, start), headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    )


def _page(node: Node, caller: Caller, after: int | None, before: int | None, limit: int) -> list[EventInfo]:
    with node.read() as session:
        rows = repository.page(session, after=after, before=before, owner=caller.owner, limit=limit)
    return [EventInfo.model_validate(_event(row).as_dict()) for row in rows]


def _event(row: models.Event) -> Event:
    return Event(
        id=row.id, type=row.type, subject_type=row.subject_type, subject_id=row.subject_id, job_id=row.job_id,
        owner=row.owner, at=row.at, data=row.data,
    )  # fmt: skip


def sees(caller: Caller, event: Event) -> bool:
    """Operators everything; others what concerns their jobs, and the node where it concerns everybody."""
    return caller.owner is None or (event.owner in (None, caller.owner) and event.type != "audit")


async def _stream(node: Node, caller: Caller, after: int | None) -> AsyncIterator[bytes]:
    """First what is in the database up to where the subscription begins, then the subscription."""
    subscription = node.bus.subscribe(lambda event: sees(caller, event))
    try:
        yield format_sse_event(retry=2000, comment=f"events after {subscription.mark if after is None else after}")
        if after is not None and after != subscription.mark:
            reset = await asyncio.to_thread(_why_reset, node, after, subscription.mark)
            if reset is not None:
                yield reset
            else:
                async for chunk in _replay(node, caller, after, subscription.mark):
                    yield chunk
        while True:
            events = await subscription.read(KEEPALIVE)
            if not node.tokens.is_valid(caller):
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
        node.bus.unsubscribe(subscription)


def _why_reset(node: Node, after: int, mark: int) -> bytes | None:
    with node.read() as session:
        oldest = repository.oldest(session)
    first = mark + 1 if oldest is None else oldest
    if first - 1 <= after <= mark:
        return None
    why = "trimmed" if after < first else "unknown"
    data = json.dumps({"why": why, "after": after, "oldest": oldest, "newest": mark}, separators=(",", ":"))
    return format_sse_event(event="reset", data_str=data, id=str(mark))


async def _replay(node: Node, caller: Caller, after: int, mark: int) -> AsyncIterator[bytes]:
    def read(last: int) -> Sequence[models.Event]:
        with node.read() as session:
            return repository.page(session, after=last, up_to=mark, owner=caller.owner, limit=REPLAY_PAGE)

    while rows := await asyncio.to_thread(read, after):
        yield b"".join(_event(row).wire for row in rows)
        after = rows[-1].id
