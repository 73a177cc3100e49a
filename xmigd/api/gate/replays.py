"""A request with an Idempotency-Key that was done before is not done again, and gets the first answer."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xmigd.api.gate.idempotency import HEADERS, Idempotency, Stored
from xmigd.api.gate.kinds import changes
from xmigd.operations.service import requested_with


class Replays:
    def __init__(self, app: ASGIApp, idempotency: Idempotency) -> None:
        self._app = app
        self._idempotency = idempotency

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = Headers(scope=scope).get("idempotency-key") if scope["type"] == "http" else None
        if key is None or scope["method"] != "POST" or not changes(scope):
            await self._app(scope, receive, send)
            return
        state = scope["state"]
        caller = state["caller"].name
        claim = await self._idempotency.claim(caller, key, scope["method"], scope["path"], state["body"])
        if isinstance(claim, Stored):
            await _send_stored(claim, send)
            return
        requested_with.set((caller, key))
        held: list[Message] = []

        async def sending(message: Message) -> None:
            held.append(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                await self._idempotency.answered(claim, _stored(held), secret=bool(state.get("secret")))
                for each in held:
                    await send(each)

        try:
            await self._app(scope, receive, sending)
        finally:
            if not claim.answered:
                await self._idempotency.give_up(claim)


def _stored(messages: list[Message]) -> Stored:
    headers = Headers(raw=messages[0]["headers"])
    kept = {name: headers[name] for name in HEADERS if name in headers}
    body = b"".join(message.get("body", b"") for message in messages[1:])
    return Stored(messages[0]["status"], kept, body)


async def _send_stored(stored: Stored, send: Send) -> None:
    headers = stored.headers | {"content-length": str(len(stored.body)), "idempotency-replayed": "true"}
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": stored.status, "headers": raw})
    await send({"type": "http.response.body", "body": stored.body})
