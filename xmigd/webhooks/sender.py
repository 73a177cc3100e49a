"""HTTP requests to targets that nobody here can trust to answer.

They have a thread and an event loop of their own: neither a target that hangs nor a name server that does takes
anything from the daemon's. What a target answers beside its status is not read.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx

RESOLVERS = 128  # threads that may wait for a name server


@dataclass(frozen=True, slots=True)
class Answer:
    """Of a target. It has taken what was sent if `error` is None."""

    status: int | None  # None: it has not answered
    error: str | None
    ms: float


def signature(secret: str, timestamp: str, body: bytes) -> str:
    """What the header Xmig-Signature says: HMAC-SHA256 over the timestamp, a point, and the body."""
    signed = hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256)
    return f"v1={signed.hexdigest()}"


class Sender:
    def __init__(self, timeout: float) -> None:
        """`timeout`: seconds from the name's resolution to the answer's status."""
        self._timeout = timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: httpx.AsyncClient | None = None

    async def send(self, url: str, secret: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Never raises an error of the target's."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._run, args=(self._loop,), name="webhooks", daemon=True).start()
        timestamp = str(int(time.time()))
        signed = {
            "Content-Type": "application/json", "User-Agent": "xmigd", "Xmig-Timestamp": timestamp,
            "Xmig-Signature": signature(secret, timestamp, body),
        }  # fmt: skip
        sending = asyncio.run_coroutine_threadsafe(self._post(url, body, {**headers, **signed}), self._loop)
        return await asyncio.wrap_future(sending)

    def close(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        loop.set_default_executor(ThreadPoolExecutor(RESOLVERS, "webhooks"))
        loop.run_forever()

    async def _post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        if self._client is None:
            import httpx  # here, for what it takes is for this thread to wait

            self._client = httpx.AsyncClient(
                timeout=self._timeout, follow_redirects=False, trust_env=False,
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=16),
            )  # fmt: skip
        began = time.monotonic()
        status, error = None, None
        try:
            async with (
                asyncio.timeout(self._timeout),
                self._client.stream("POST", url, content=body, headers=dict(headers)) as answer,
            ):
                status = answer.status_code
                if not 200 <= status < 300:
                    error = f"it answered {status}"
        except TimeoutError:
            error = f"it did not answer within {self._timeout:g} s"
        except Exception as failure:  # whatever it is, it is this target's
            error = f"{type(failure).__name__}: {failure}"[:500]
        return Answer(status, error, (time.monotonic() - began) * 1e3)
