"""What every request passes before its handler sees it, and every answer on its way out.

In this order: a request id, who calls, how often they may, how long the body is, whether it was done before, and, for
what changes something, the audit's intent. What is refused here has changed nothing.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xmigd import log
from xmigd.api import problems
from xmigd.api.context import Node
from xmigd.api.idempotency import HEADERS, Claim, Idempotency, Stored
from xmigd.api.limits import RateLimit
from xmigd.errors import Forbidden, TooLarge, Unauthorized, XmigError
from xmigd.operations.service import asked_with
from xmigd.security.callers import Caller, local_caller

logger = log.get("api")

READING = frozenset({"GET", "HEAD", "OPTIONS"})
ASKING = frozenset({"/v1/migration-plans"})  # a POST because the question has a body: it changes nothing
OPEN_PATHS = frozenset({"/healthz", "/readyz"})
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
MAX_BODY = 64 << 10  # bytes
AUDITED_BODY = 4 << 10  # bytes of a body that the audit keeps
STRANGERS_RATE = 5.0  # requests a second without a valid token, for each address; four times that at once
PORT = re.compile(r":[0-9]*$")
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class WrongHost(XmigError):
    """A web page in a browser of this machine has resolved its own name to the daemon."""

    status = 421
    code = "wrong_host"


class Gate:
    def __init__(self, app: ASGIApp, node: Node) -> None:
        self._app = app
        self._node = node
        self._rates = RateLimit(node.settings.request_rate, 2 * node.settings.request_rate)
        self._strangers = RateLimit(STRANGERS_RATE, 4 * STRANGERS_RATE)
        self._idempotency = Idempotency(node.writer, lambda operation: node.operations.get(operation))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid4().hex
        state: dict[str, Any] = scope.setdefault("state", {})
        state["request_id"] = request_id
        began = time.perf_counter()
        status = 500

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        with structlog.contextvars.bound_contextvars(request=request_id):
            try:
                caller = self._caller(scope, headers)
                state["caller"] = caller
                if scope["method"] in READING:
                    await self._app(scope, receive, sending)
                elif scope["method"] == "POST" and scope["path"] in ASKING:
                    await self._app(scope, _once(await _read_body(receive, headers)), sending)
                else:
                    await self._change(scope, receive, sending, caller, headers)
            except XmigError as error:
                state["code"] = error.code
                await problems.answer(error)(scope, receive, sending)
            except Exception:
                logger.exception("a request failed inside xmigd")  # it has been answered: problems.on_error
            finally:
                seconds = time.perf_counter() - began
                self._node.requests.count(scope, status, seconds)
                logger.debug(
                    "request", method=scope["method"], path=scope["path"], status=status, ms=round(seconds * 1e3, 1),
                    caller=state["caller"].name if "caller" in state else None, code=state.get("code"),
                )  # fmt: skip

    # --- who calls --------------------------------------------------------------------------------------------------

    def _caller(self, scope: Scope, headers: Headers) -> Caller:
        """Raises Unauthorized, TooManyRequests, WrongHost."""
        peer = scope["state"].get("peer")
        authorization = headers.get("authorization")
        address = (scope.get("client") or ("",))[0] or "somebody"
        if authorization is not None:
            # A token comes before what the kernel says: a front that serves others forwards theirs.
            kind, _, secret = authorization.partition(" ")
            try:
                if kind.lower() != "bearer":
                    raise Unauthorized("only bearer tokens are known", hint="Authorization: Bearer xmig_...")
                caller = self._node.tokens.caller(secret.strip(), "network" if peer is None else "unix")
            except Unauthorized:
                self._strangers.take(address if peer is None else f"user {peer[0].uid}")
                raise
        elif peer is not None:
            caller = local_caller(peer[0], peer[1], self._node.operators)
        else:
            _check_host(scope, headers)
            if scope["path"] not in OPEN_PATHS and not self._node.settings.open_reading:
                self._strangers.take(address)
                raise Unauthorized(
                    "over TCP one needs a token", code="token_required",
                    hint="send Authorization: Bearer ...; on the daemon's machine: xmigctl token create",
                )  # fmt: skip
            caller = Caller(f"somebody at {address}", "read", None, None, "network")
        self._rates.take(caller.name)
        return caller

    # --- what changes something -------------------------------------------------------------------------------------

    async def _change(self, scope: Scope, receive: Receive, send: Send, caller: Caller, headers: Headers) -> None:
        if caller.scope == "read":
            raise Forbidden(
                "this caller may only read", code="read_only",
                hint="use the local socket api.sock, or a token of scope operate",
            )  # fmt: skip
        body = await _read_body(receive, headers)
        action = f"{scope['method']} {scope['path']}"
        claim: Claim | None = None
        key = headers.get("idempotency-key") if scope["method"] == "POST" else None
        if key is not None:
            found = await self._idempotency.claim(caller.name, key, scope["method"], scope["path"], body)
            if isinstance(found, Stored):
                await _send_stored(found, send)
                return
            claim = found
            asked_with.set((caller.name, key))
        state = scope["state"]
        intent: int | None = None
        status = 500
        try:
            intent = await self._node.audit.intent(
                caller, action, request_id=state["request_id"], detail=_audited(scope, body)
            )
            status = await self._answer(scope, body, send, claim)
        finally:
            if intent is not None:
                outcome = "done" if status < 400 else state.get("code") or str(status)
                self._node.audit.outcome(intent, caller, action, outcome, status=status, request_id=state["request_id"])
            if claim is not None and not claim.answered:
                await self._idempotency.give_up(claim)

    async def _answer(self, scope: Scope, body: bytes, send: Send, claim: Claim | None) -> int:
        status = 500
        held: list[Message] = []

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            if claim is None:
                await send(message)
                return
            held.append(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                await self._idempotency.answered(claim, _stored(held), secret=bool(scope["state"].get("secret")))
                for each in held:
                    await send(each)

        try:
            await self._app(scope, _once(body), sending)
        except Exception:
            if not held:
                raise
            logger.exception("a request failed inside xmigd")
        return status


def _check_host(scope: Scope, headers: Headers) -> None:
    """On this machine's loopback, where browsers of this machine are. Elsewhere the daemon has names of its own, and
    without a token there is only its health."""
    name = PORT.sub("", headers.get("host", ""))
    bound = (scope.get("server") or ("",))[0]
    local = bound == "::1" or bound.startswith("127.")
    if local and name not in LOCAL_NAMES and name != bound:
        raise WrongHost(f"this is not {name[:64]!r}")


async def _read_body(receive: Receive, headers: Headers) -> bytes:
    """Raises TooLarge."""
    length = headers.get("content-length", "0")
    if length.isdecimal() and int(length) > MAX_BODY:
        raise TooLarge(f"the body has {length} bytes; {MAX_BODY} are enough for every request")
    parts: list[bytes] = []
    total = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            break
        parts.append(message.get("body", b""))
        total += len(parts[-1])
        if total > MAX_BODY:
            raise TooLarge(f"the body has more than {MAX_BODY} bytes, which are enough for every request")
        if not message.get("more_body"):
            break
    return b"".join(parts)


def _once(body: bytes) -> Callable[[], Awaitable[Message]]:
    sent = False

    async def receive() -> Message:
        nonlocal sent
        if sent:
            return {"type": "http.disconnect"}
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


def _audited(scope: Scope, body: bytes) -> dict[str, Any]:
    detail: dict[str, Any] = {}
    if scope.get("query_string"):
        detail["query"] = scope["query_string"].decode("latin-1")
    if body:
        detail["body"] = body[:AUDITED_BODY].decode("utf-8", "replace")
    return detail


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
