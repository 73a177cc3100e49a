"""What the sockets serve: from the first moment on the daemon's health, and everything else once there is somebody who
does it. Until then requests wait: a restart of the daemon is no error to whoever asks."""

from __future__ import annotations

import asyncio
from uuid import uuid4

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from xmigd.connections.answers import problem
from xmigd.errors import NotReady


class Front:
    def __init__(self) -> None:
        self._waits_for = "xmigd is starting"
        self._app: ASGIApp | None = None
        self._there = asyncio.Event()

    def wait_for(self, what: str) -> None:
        """What whoever asks receives meanwhile."""
        self._waits_for = what

    def open(self, app: ASGIApp) -> None:
        self._app = app
        self._there.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None and scope["type"] == "http" and scope["path"] in ("/healthz", "/readyz"):
            answer = JSONResponse({"status": "ok"})
            if scope["path"] == "/readyz":
                answer = problem(NotReady(self._waits_for, hint="ask again", retry_after=1))
            answer.headers["X-Request-Id"] = uuid4().hex
            await answer(scope, receive, send)
            return
        await self._there.wait()
        assert self._app is not None
        await self._app(scope, receive, send)
