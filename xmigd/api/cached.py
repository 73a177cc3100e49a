"""Answers that are requested again and again, made once per state of the database.

Everything that changes the database goes through one writer, which counts what it is given and its commits: an answer
made since they changed is still right. An answer is never older than the request for it: who comes after a change does
not get, nor wait for, one that was begun before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.responses import Response

from xmigd.database.writer import Writer

KEPT = 64
T = TypeVar("T")
Made = tuple[bytes, dict[str, str]]  # JSON, and headers


@dataclass(frozen=True, slots=True)
class _Answer:
    version: tuple[int, int]  # the writer's, before it was begun
    made: asyncio.Future[Any]


class Cached:
    """Lives in the event loop's thread."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._answers: dict[object, _Answer] = {}

    async def found(self, key: object, make: Callable[[], T]) -> T:
        """What `make` gives for `key`; nobody changes it. It is called in a thread, and only reads the database."""
        found = self._answers.pop(key, None)
        if found is None or found.version != self._writer.version:
            version = self._writer.version
            found = _Answer(version, asyncio.ensure_future(asyncio.to_thread(make)))
        self._answers[key] = found  # the most recent one is the last
        if len(self._answers) > KEPT:
            del self._answers[next(iter(self._answers))]
        try:
            made: T = await asyncio.shield(found.made)
        except BaseException:
            if found.made.done() and self._answers.get(key) is found:
                del self._answers[key]
            raise
        return made

    async def json(self, key: object, make: Callable[[], Made]) -> Response:
        body, headers = await self.found(key, make)
        return Response(body, headers=headers, media_type="application/json")
