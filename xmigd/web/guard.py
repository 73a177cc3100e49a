"""What holds for every answer: the headers that keep a browser from being used against its user, and our name."""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Everything is a file of ours: no script and no style stands in a page, so none that got into one runs.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
HSTS = "max-age=31536000"


class Guard:
    """``names``: what we may be called; empty: anything. A page elsewhere that gave its own name our address is not
    answered."""

    def __init__(self, app: ASGIApp, names: frozenset[str], *, tls: bool) -> None:
        self._app = app
        self._names = names
        self._tls = tls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
                if self._tls:
                    headers["strict-transport-security"] = HSTS
            await send(message)

        name = _without_port(Headers(scope=scope).get("host", "")).lower()
        if self._names and name not in self._names:
            answer = PlainTextResponse(f"this is not {name!r}; add the name to XMIG_WEB_NAMES if it should be", 421)
            await answer(scope, receive, send_guarded)
            return
        await self._app(scope, receive, send_guarded)


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() else host
