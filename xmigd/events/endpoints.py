"""Events: a stream for who listens, pages for who asks."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Header, Query, Request
from fastapi.sse import EventSourceResponse
from starlette.responses import Response

from xmigd.api.dependencies import AnyCaller, Limit, provided
from xmigd.api.routing import make_router
from xmigd.connections.peers import Who, user
from xmigd.connections.quotas import Place
from xmigd.events.schemas import EventInfo
from xmigd.events.stream import Events
from xmigd.schemas import EXACT

router = make_router("/v1/events")

STREAM = "text/event-stream"
TheEvents = Annotated[Events, provided(Events)]


@router.get(
    "",
    operation_id="list_events",
    response_model=list[EventInfo],
    responses={
        200: {
            "description": "A page; with `Accept: text/event-stream`, a stream that begins after `Last-Event-ID` or "
            "`after`, or now. It begins with an event `reset` where events that were requested are not kept any more: "
            "read everything again. A listener that is too slow is disconnected; it goes on with `Last-Event-ID`.",
            "content": {STREAM: {"schema": {"type": "string"}}},
        }
    },
)
async def list_events(
    events: TheEvents,
    caller: AnyCaller,
    request: Request,
    after: Annotated[int | None, Query(ge=0, le=EXACT, description="what followed this id, oldest first")] = None,
    before: Annotated[int | None, Query(ge=0, le=EXACT, description="what came before this id")] = None,
    limit: Limit = 100,
    last_event_id: Annotated[str | None, Header(pattern=r"^[0-9]{1,18}$", description="where a stream goes on")] = None,
) -> list[EventInfo] | Response:
    """What happened. With `after` oldest first, otherwise the newest first; or a stream."""
    if STREAM not in request.headers.get("accept", ""):
        found = await asyncio.to_thread(events.page, caller, after, before, limit)
        return [EventInfo.model_validate(event.as_dict()) for event in found]
    events.check_room()
    place: Place | None = getattr(request.state, "place", None)
    if place is not None:
        place.listen(user(caller.uid) if caller.uid is not None else Who(caller.name))
    start = int(last_event_id) if last_event_id is not None else after
    return EventSourceResponse(
        events.listen(caller, start), headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    )
