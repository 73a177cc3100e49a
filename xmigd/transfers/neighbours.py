"""What only devices of one node have, in host memory of the next one (docs/decisions/0081): between daemons.

Whose job has ranks on a node may ask what these have, by hash. The node before it in the job's order may have chunks
kept there, as far as there is room.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
from array import array
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from xmigd.errors import Forbidden, ProtocolError, Unavailable
from xmigd.ipc import messages as m
from xmigd.ipc.fds import Fd
from xmigd.memory.retained import Owner, Retained
from xmigd.supervisor.unique import MOST_CHUNKS, after
from xmigd.transfers.calls import Calls
from xmigd.transfers.door import Quick
from xmigd.transfers.wire import Closing, Payload

PATIENCE = 10.0  # seconds, for an answer of the loop
AT_ONCE = 2  # that content is sent: recoveries and launches need threads and connections, too
DEADLINE = 60.0  # seconds, for one of them
HASH = 8  # bytes

HasRanks = Callable[[str], bool]  # of jobs with these nodes
Held = Callable[[str, int], Coroutine[Any, Any, frozenset[int]]]
T = TypeVar("T")


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    nodes: Annotated[str, Field(max_length=4096)]


class HeldRequest(_Request):
    """Hashes follow. Answered with a byte for each: 1, if a rank has it at this round."""

    op: Literal["held"] = "held"
    round: m.RoundNumber


class RetainRequest(_Request):
    """Hashes follow: of this process these are to be kept, and no others. A byte for each: 1, if it is to be sent."""

    op: Literal["retain"] = "retain"
    process: m.JobId


class ContentRequest(_Request):
    """Content follows, of each of these."""

    op: Literal["content"] = "content"
    process: m.JobId
    hashes: Annotated[tuple[m.Hash, ...], Field(min_length=1, max_length=m.CHUNKS_AT_ONCE)]


_adapter: TypeAdapter[HeldRequest | RetainRequest | ContentRequest] = TypeAdapter(
    Annotated[HeldRequest | RetainRequest | ContentRequest, Field(discriminator="op")]
)  # fmt: skip


class NeighbourExchange:
    """Both halves, of one node."""

    def __init__(
        self,
        node: str,
        calls: Calls,
        retained: Retained,
        *,
        has_ranks: HasRanks,
        held: Held,
        shares_job: Callable[[str], bool],
    ) -> None:
        """`shares_job`: has a job ranks here and on this peer?"""
        self._node = node
        self._calls = calls
        self._retained = retained
        self._has_ranks = has_ranks
        self._held = held
        self._shares_job = shares_job
        self._loop = asyncio.get_running_loop()
        self._asking = ThreadPoolExecutor(1, "neighbours")  # which does not wait for content
        self._sending = ThreadPoolExecutor(AT_ONCE, "neighbours")

    # --- this node asks ----------------------------------------------------------------------------------------------

    async def held(self, node: str, nodes: str, round: int, hashes: Sequence[int]) -> bytes:
        """Raises Unavailable, ProtocolError, Conflict."""
        return await self._bits(self._asking, node, HeldRequest(nodes=nodes, round=round), hashes)

    async def retain(self, node: str, nodes: str, process: str, hashes: Sequence[int]) -> bytes:
        """Raises Unavailable: not now; ProtocolError, Conflict."""
        return await self._bits(self._sending, node, RetainRequest(nodes=nodes, process=process), hashes)

    async def send_content(self, node: str, nodes: str, process: str, hashes: Sequence[int], memory: Fd) -> None:
        """Raises as `retain`."""
        request = ContentRequest(nodes=nodes, process=process, hashes=tuple(hashes))
        content = await asyncio.to_thread(os.pread, memory.fileno(), len(hashes) * m.CHUNK, 0)
        await self._exchange(self._sending, node, request, content)

    async def _bits(self, threads: ThreadPoolExecutor, node: str, request: _Request, hashes: Sequence[int]) -> bytes:
        payload = await asyncio.to_thread(lambda: array("Q", hashes).tobytes())
        bits = await self._exchange(threads, node, request, payload)
        if len(bits) != len(hashes) or not set(bits) <= {0, 1}:
            raise ProtocolError(f"{node} answers what was not requested")
        return bytes(bits)

    async def _exchange(self, threads: ThreadPoolExecutor, node: str, request: _Request, payload: bytes) -> Payload:
        closing = Closing()
        try:
            body = request.model_dump(mode="json")
            async with asyncio.timeout(DEADLINE):
                _, more = await self._loop.run_in_executor(threads, self._calls.exchange, node, body, closing, payload)
            return more
        except TimeoutError:
            raise Unavailable(f"{node} takes longer than {DEADLINE:.0f} s") from None
        finally:
            closing.close()  # a thread that nobody waits for any more ends

    # --- another one does --------------------------------------------------------------------------------------------

    def longest(self, others: Callable[[str], int]) -> Callable[[str], int]:
        """Bytes behind a request of a peer."""

        def longest(peer: str) -> int:
            if not self._shares_job(peer):
                return others(peer)
            return max(others(peer), MOST_CHUNKS * HASH, m.CHUNKS_AT_ONCE * m.CHUNK if self._retained.bound else 0)

        return longest

    def or_else(self, others: Quick) -> Quick:
        """What peers request, in the thread of the connection: this, or what `others` handle."""

        def handle(peer: str, request: dict[str, Any], payload: Payload) -> tuple[dict[str, Any], bytes] | None:
            if request.get("op") not in ("held", "retain", "content"):
                return others(peer, request, payload)
            try:
                wanted = _adapter.validate_json(json.dumps(request))
            except ValidationError as error:
                raise ProtocolError(f"a request that is none: {error.errors(include_url=False)[0]['msg']}") from None
            return {}, self._answer(peer, wanted, payload)

        return handle

    def _answer(self, peer: str, wanted: HeldRequest | RetainRequest | ContentRequest, payload: Payload) -> bytes:
        match wanted:
            case HeldRequest(nodes=nodes, round=round):
                self._check(peer, nodes)
                hashes, held = _hashes(payload), self._in_loop(self._held(nodes, round))
                return bytes(one in held for one in hashes)
            case RetainRequest(nodes=nodes, process=process):
                if not payload:  # it has ended: also after all ranks here have
                    return self._retained.retain(Owner(peer, nodes, process), ())
                self._check(peer, nodes, next_only=True)
                lacking = self._retained.retain(Owner(peer, nodes, process), _hashes(payload))
                if not self._in_loop(self._async_has_ranks(nodes)):  # the last one has ended meanwhile
                    self.forget(nodes)  # or nobody would
                    raise Unavailable("no rank of that job is here any more")
                return lacking
            case ContentRequest(nodes=nodes, process=process, hashes=hashes):
                if len(payload) != len(hashes) * m.CHUNK:
                    raise ProtocolError("content of another length than its chunks have")
                self._retained.put(Owner(peer, nodes, process), hashes, bytes(payload))
                return b""

    def left(self, nodes: str) -> None:
        """No job with these nodes has ranks here any more."""
        self._loop.run_in_executor(None, self.forget, nodes)

    def forget(self, nodes: str) -> None:
        """The same. Blocks."""
        self._retained.forget(lambda owner: owner.nodes == nodes)

    def _check(self, peer: str, nodes: str, *, next_only: bool = False) -> None:
        """Raises Forbidden, Unavailable."""
        names = nodes.split(",")
        if peer not in names or self._node not in names or (next_only and after(peer, nodes)[0] != self._node):
            raise Forbidden(f"{peer} has no rank of that job, or this node is not the next one")
        if not self._in_loop(self._async_has_ranks(nodes)):
            raise Unavailable("no rank of that job is here now")

    async def _async_has_ranks(self, nodes: str) -> bool:
        return self._has_ranks(nodes)

    def _in_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Raises Unavailable, XmigError."""
        doing = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return doing.result(PATIENCE)
        except (TimeoutError, concurrent.futures.CancelledError):
            doing.cancel()
            raise Unavailable("the daemon has not answered") from None


def _hashes(payload: Payload) -> Sequence[int]:
    if not payload or len(payload) % HASH or len(payload) > MOST_CHUNKS * HASH:
        raise ProtocolError("hashes of another length, or too many")
    found = array("Q")
    found.frombytes(payload)
    return found
