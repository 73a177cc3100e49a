"""Bodies have a limit; what is read here comes to the handler as one piece."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xmigd.api.gate.kinds import reads
from xmigd.errors import NotHttp, TooLarge

MAX_BODY = 64 << 10  # bytes


class Bodies:
    """`state["body"]`: of a request that does not only read."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not reads(scope):
            body = scope["state"]["body"] = await _read(receive, Headers(scope=scope))
            receive = _once(body)
        await self._app(scope, receive, send)


async def _read(receive: Receive, headers: Headers) -> bytes:
    """Raises TooLarge, NotHttp."""
    length = headers.get("content-length", "0")
    if length.isdecimal() and int(length) > MAX_BODY:
        raise TooLarge(f"the body has {length} bytes; {MAX_BODY} are enough for every request")
    parts: list[bytes] = []
    total = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise NotHttp("the connection ended before the body did")  # what is not whole is not done
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
