"""Every request gets an id, is answered also where it is refused or fails, is counted and logged."""

from __future__ import annotations

import re
import secrets
import time
from typing import Any

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xmigd import log
from xmigd.connections.answers import problem
from xmigd.errors import XmigError
from xmigd.metrics.requests import Requests

logger = log.get("api")

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Reporting:
    def __init__(self, app: ASGIApp, requests: Requests) -> None:
        self._app = app
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
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

        structlog.contextvars.bind_contextvars(request=request_id)  # for this task, which ends with the request
        try:
            await self._app(scope, receive, sending)
        except XmigError as error:
            state["code"] = error.code
            await problem(error)(scope, receive, sending)
        except Exception:
            logger.exception("a request failed inside xmigd")  # it has been answered: problems.on_error
        finally:
            seconds = time.perf_counter() - began
            self._requests.count(scope, status, seconds)
            if log.debugs():
                logger.debug(
                    "request", method=scope["method"], path=scope["path"], status=status, ms=round(seconds * 1e3, 1),
                    caller=state["caller"].name if "caller" in state else None, code=state.get("code"),
                )  # fmt: skip
