"""One stream of events per page: xmigd's, thinned out to "something of yours has changed".

The page then fetches itself again and takes over what differs. A stream from here stays open while xmigd is gone: the
page is informed, and what happened meanwhile is requested with the last event's id.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from xmigd.waiting import happens
from xmigd.web.upstream import Api, ApiError

PAUSE = 0.2  # seconds between two changes that a page is informed of
HEARTBEAT = 15.0
LONGEST_WAIT = 4.0


@dataclass(frozen=True, slots=True)
class Interest:
    """What a page shows: these types of events (their first word), of this job. Empty: all."""

    topics: frozenset[str] = frozenset()
    job: str = ""
    every: float = 0.0  # seconds after which it wants to look again in any case: measurements have no events

    def wants(self, kind: str, data: str) -> bool:
        if kind == "reset":
            return True
        if self.topics and kind.partition(".")[0] not in self.topics:
            return False
        if not self.job:
            return True
        with contextlib.suppress(ValueError):
            body = json.loads(data)
            return not isinstance(body, dict) or body.get("job_id") in (None, self.job)
        return True


@dataclass(slots=True)
class Relay:
    api: Api
    interest: Interest
    last_id: str
    stopping: asyncio.Event
    _link: tuple[str, str] = ("", "")  # the connection to xmigd, as the page shows it: what, and since when
    _changed: bool = False
    _woken: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> AsyncIterator[str]:
        """What the browser gets."""
        tasks = [asyncio.ensure_future(self._listen()), asyncio.ensure_future(self._end())]
        looked = time.monotonic()
        reported = self._link
        try:
            yield "retry: 1000\n\n"
            while not self.stopping.is_set():
                await happens(self._woken, min(HEARTBEAT, self.interest.every or HEARTBEAT))
                self._woken.clear()
                if reported != self._link:
                    reported = self._link
                    yield self._message(*reported)
                due = self.interest.every and time.monotonic() - looked >= self.interest.every
                if self._changed or due:
                    self._changed = False
                    looked = time.monotonic()
                    yield self._message("change", "")
                    await asyncio.sleep(PAUSE)
                else:
                    yield ": still here\n\n"
        finally:
            for task in tasks:
                task.cancel()

    async def _end(self) -> None:
        await self.stopping.wait()
        self._woken.set()

    def _message(self, kind: str, data: str) -> str:
        number = f"id: {self.last_id}\n" if self.last_id else ""
        return f"{number}event: {kind}\ndata: {data}\n\n"

    def _tell(self, kind: str, data: str = "") -> None:
        self._link = (kind, data)
        self._woken.set()

    def _touch(self) -> None:
        self._changed = True
        self._woken.set()

    async def _listen(self) -> None:
        wait = 0.1
        down = False
        while True:
            try:
                headers = {"accept": "text/event-stream"} | ({"last-event-id": self.last_id} if self.last_id else {})
                async with self.api.stream("/v1/events", headers=headers) as answer:
                    self._tell("up")  # also at first: a page that lost the front does not know of xmigd
                    # What happened between the page's making and this moment.
                    self._touch()
                    down, wait = False, 0.1
                    await self._follow(answer.aiter_lines())
            except ApiError as error:
                if error.status == 401:
                    self._tell("denied", error.code)
                    return
            if not down:
                down = True
                self._tell("down", str(int(time.time())))
            await asyncio.sleep(wait)
            wait = min(wait * 2, LONGEST_WAIT)

    async def _follow(self, lines: AsyncIterator[str]) -> None:
        kind, data = "message", ""
        async for line in lines:
            if not line:
                if self.interest.wants(kind, data) and (data or kind != "message"):
                    self._touch()
                kind, data = "message", ""
                continue
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "event":
                kind = value
            elif name == "data":
                data += value
            elif name == "id" and value.isprintable():
                self.last_id = value
