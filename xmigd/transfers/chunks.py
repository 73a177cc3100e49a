"""Chunks of device memory between nodes, for a rank that has lost them with its device (docs/decisions/0079).

Whose job has ranks on a node lets that node's daemon have what they contain, by its hash, and no other. One request
brings at most 32 MiB; a node receives at most two at once, and gives at most two.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import threading
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from xmigd.errors import Forbidden, NotFound, ProtocolError, Unavailable
from xmigd.ipc import messages as m
from xmigd.ipc.fds import write_all
from xmigd.memory.retained import Owner, Retained
from xmigd.supervisor.far_chunks import PATIENCE, TURN, FarRank, Found, room_for
from xmigd.supervisor.process import Process
from xmigd.transfers.calls import Calls
from xmigd.transfers.door import Quick
from xmigd.transfers.wire import Closing, Payload

AT_ONCE = 2  # requests of this node, and of others at it

FindProcess = Callable[[str], Process | None]


class Wanted(BaseModel):
    """A request."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    op: Literal["chunks"] = "chunks"
    nodes: Annotated[str, Field(max_length=4096)]
    process: m.JobId
    chunks: m.Chunks
    retained: bool = False  # what this node keeps of the peer's own process (docs/decisions/0081)


class Answer(BaseModel):
    """Content follows: of each chunk that was found, in order."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    examined: m.Number
    found: Annotated[tuple[m.Number, ...], Field(max_length=m.CHUNKS_AT_ONCE)]


class ChunkExchange:
    """Both halves, of one node."""

    def __init__(self, calls: Calls, find: FindProcess, settled: Callable[[], bool], retained: Retained) -> None:
        """`settled`: does `find` know of all processes that there are? `retained`: of other nodes' processes."""
        self._retained = retained
        self._calls = calls
        self._find = find
        self._settled = settled
        self._loop = asyncio.get_running_loop()
        self._receiving = asyncio.Semaphore(AT_ONCE)
        self._giving = threading.BoundedSemaphore(AT_ONCE)

    # --- this node wants some ----------------------------------------------------------------------------------------

    async def fetch(self, rank: FarRank, nodes: str, chunks: Sequence[m.ChunkHash]) -> Found:
        """Raises Unavailable: not now; ProtocolError, NotFound, Conflict: never."""
        wanted = Wanted(nodes=nodes, process=rank.process, chunks=tuple(chunks), retained=rank.retained)
        closing = Closing()
        async with self._receiving:
            try:
                return await asyncio.to_thread(self._receive, rank.node, wanted, closing)
            finally:
                closing.close()  # a thread that nobody waits for any more ends

    def _receive(self, peer: str, wanted: Wanted, closing: Closing) -> Found:
        # `retained` only where it is true: daemons of earlier versions do not know it.
        request = wanted.model_dump(mode="json", exclude_defaults=True) | {"op": wanted.op}
        body, content = self._calls.exchange(peer, request, closing)
        try:
            answer = Answer.model_validate_json(_json(body))
        except ValidationError:
            raise ProtocolError(f"{peer} answers what is no answer") from None
        memory = room_for(wanted.chunks)
        found = Found(answer.examined, answer.found, memory)
        if not found.fits(wanted.chunks) or len(content) != len(found.found) * m.CHUNK:
            raise ProtocolError(f"{peer} answers what was not requested")
        try:
            write_all(memory.fileno(), content, 0)
        except OSError as error:
            raise Unavailable(f"host memory has no room: {error.strerror}", hint="make room") from None
        return found

    # --- another one does --------------------------------------------------------------------------------------------

    def or_else(self, others: Quick) -> Quick:
        """What peers request, in the thread of the connection: chunks, or what `others` handle."""

        def handle(peer: str, request: dict[str, Any], payload: Payload) -> tuple[dict[str, Any], bytes] | None:
            if request.get("op") != "chunks":
                return others(peer, request, payload)
            try:
                wanted = Wanted.model_validate_json(_json(request))
            except ValidationError as error:
                raise ProtocolError(f"a request that is none: {error.errors(include_url=False)[0]['msg']}") from None
            if not self._giving.acquire(timeout=TURN):
                raise Unavailable("other nodes are given chunks")
            try:
                return self._give(peer, wanted)
            finally:
                self._giving.release()

        return handle

    def _give(self, peer: str, wanted: Wanted) -> tuple[dict[str, Any], bytes]:
        if wanted.retained:
            examined, places, content = self._retained.find(Owner(peer, wanted.nodes, wanted.process), wanted.chunks)
            return Answer(examined=examined, found=places).model_dump(mode="json"), content
        reading = asyncio.run_coroutine_threadsafe(self._read(peer, wanted), self._loop)
        try:
            found = reading.result(TURN + PATIENCE)
        except (TimeoutError, concurrent.futures.CancelledError):
            reading.cancel()
            raise Unavailable("the rank's server has not answered") from None
        content = os.pread(found.memory.fileno(), len(found.found) * m.CHUNK, 0)
        return Answer(examined=found.examined, found=found.found).model_dump(mode="json"), content

    async def _read(self, peer: str, wanted: Wanted) -> Found:
        process = self._find(wanted.process)
        if process is None:
            if not self._settled():
                raise Unavailable("no such rank is here now")  # its server may still announce itself
            raise NotFound("no such rank is here")
        nodes = process.job.nodes or ""
        if nodes != wanted.nodes or peer not in nodes.split(","):
            raise Forbidden(f"{peer} has no rank of that job")
        return await process.read_chunks(wanted.chunks)


def _json(body: dict[str, Any]) -> bytes:
    """As it came: what JSON cannot distinguish, a strict model of Python's values would."""
    return json.dumps(body).encode()
