"""What changes something is in the audit: before it is done, and how it went."""

from __future__ import annotations

import json
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xmigd.api.gate.kinds import changes
from xmigd.security.audit import Audit

AUDITED_BODY = 4 << 10  # bytes of a body that the audit keeps
WITH_SECRETS = "/v1/webhooks"  # paths of requests whose bodies may have one


class Auditing:
    def __init__(self, app: ASGIApp, audit: Audit) -> None:
        self._app = app
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not changes(scope):
            await self._app(scope, receive, send)
            return
        state = scope["state"]
        caller, request_id, action = state["caller"], state["request_id"], f"{scope['method']} {scope['path']}"
        intent = await self._audit.intent(caller, action, request_id=request_id, detail=_detail(scope))
        answered = 500  # as far as it has come
        status = 500

        async def sending(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                answered = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, sending)
            status = answered
        finally:
            outcome = "done" if status < 400 else state.get("code") or str(status)
            self._audit.outcome(intent, caller, action, outcome, status=status, request_id=request_id)


def _detail(scope: Scope) -> dict[str, Any]:
    detail: dict[str, Any] = {}
    if scope.get("query_string"):
        detail["query"] = scope["query_string"].decode("latin-1")
    if body := scope["state"]["body"]:
        if scope["path"].startswith(WITH_SECRETS):
            body = _without_secret(body)
        detail["body"] = body[:AUDITED_BODY].decode("utf-8", "replace")
    return detail


def _without_secret(body: bytes) -> bytes:
    """What is no JSON object is refused anyway, and may have one anywhere."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        return b"(not a JSON object)"
    return json.dumps(found | {"secret": "(not shown)"} if "secret" in found else found).encode()
