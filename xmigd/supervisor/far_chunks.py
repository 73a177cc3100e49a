"""Device memory that a rank has lost with its device, from ranks of other nodes (docs/decisions/0079).

One request brings a few chunks: so what is under way is bounded, and who dies in the middle costs one request. Nobody
here looks at content: the server that wants it hashes it where it has arrived.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from xmigd import log
from xmigd.errors import Conflict, Unavailable, XmigError
from xmigd.ipc import messages as m
from xmigd.ipc.fds import Fd, sealed_memory
from xmigd.servers.server import Server
from xmigd.supervisor.state import ProcessState

AGAIN = 0.1  # seconds, until a request that was not answered is repeated
# Seconds until it is a request's turn, and that a server may take to read a few chunks. Who requests them waits for
# longer than both.
TURN, PATIENCE = 3.0, 10.0

logger = log.get("replicas")


@dataclass(frozen=True, slots=True)
class FarRank:
    """Of another node. `retained`: of this one, but what that node keeps of it (docs/decisions/0081)."""

    node: str
    process: str
    retained: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """Of the first `examined` of the chunks that were requested, the content of these, in order, in `memory`."""

    examined: int
    found: tuple[int, ...]
    memory: Fd

    def fits(self, chunks: Sequence[m.ChunkHash]) -> bool:
        """Is it an answer to this request?"""
        ordered = all(one < other for one, other in itertools.pairwise(self.found))
        inside = not self.found or (self.found[0] >= 0 and self.found[-1] < self.examined)
        return 0 < self.examined <= len(chunks) and len(self.found) <= m.CHUNKS_AT_ONCE and ordered and inside


# From a rank of another node, whose job has these nodes. Raises Unavailable: not now; XmigError.
Fetch = Callable[[FarRank, str, Sequence[m.ChunkHash]], Awaitable[Found]]


def room_for(chunks: Sequence[m.ChunkHash]) -> Fd:
    """Raises Unavailable."""
    try:
        return sealed_memory("xmig-chunks", min(len(chunks), m.CHUNKS_AT_ONCE) * m.CHUNK)
    except OSError as error:
        raise Unavailable(f"host memory for chunks cannot be made: {error.strerror}", hint="make room") from None


class FarChunks:
    """Of one process: what it wants of others, and what others want of it."""

    def __init__(self, process: ProcessState, fetch: Fetch) -> None:
        self._process = process
        self._fetch = fetch
        self._named: tuple[int, Sequence[FarRank]] = (-1, ())  # a server, and the ranks that it may request content of
        self._bringing: asyncio.Task[None] | None = None
        self._reading = asyncio.Lock()
        self._read: tuple[int, int, asyncio.Future[m.ChunksRead]] | None = None  # its number, and the server
        self._number = time.time_ns()  # no earlier daemon has used one that comes

    # --- its server has lost some ------------------------------------------------------------------------------------

    def named(self, server: int, ranks: Sequence[FarRank]) -> None:
        self._named = server, ranks

    def wanted(self, server: Server, message: m.ChunksWanted) -> None:
        number, ranks = self._named
        if number != server.number or message.rank >= len(ranks) or self._bringing is not None:
            server.refuse("it wants chunks of a rank that was not named to it, or several at once")
            return
        self._bringing = asyncio.get_running_loop().create_task(
            self._bring(server, ranks[message.rank], message.chunks)
        )

    async def _bring(self, server: Server, rank: FarRank, chunks: Sequence[m.ChunkHash]) -> None:
        """As a recovery waits for a node that is not in reach, this does. What ends it is the server's end."""
        noted = False
        try:
            while True:
                try:
                    found = await self._fetch(rank, self._process.job.nodes or "", chunks)
                    break
                except Unavailable as error:
                    if not noted:
                        self._note("replicas of another node are waited for", rank, error)
                    noted = True
                    await asyncio.sleep(AGAIN)
        except Exception as error:
            failed = error if isinstance(error, XmigError) else Unavailable(f"{type(error).__name__}: {error}")
            self._note("a rank of another node gives no replicas", rank, failed)
            self._bringing = None
            server.send(m.pack("chunks_brought", examined=0, found=[], why=failed.message[:1000]))
            return
        self._bringing = None
        about = {"examined": found.examined, "found": found.found, "why": ""}
        server.send(m.pack("chunks_brought", **about), (found.memory,) if found.found else ())

    def _note(self, what: str, rank: FarRank, error: XmigError) -> None:
        about = {"process": self._process.row.id[:12], "peer": rank.node, "of": rank.process[:12]}
        logger.warning(what, **about, why=error.message)

    # --- another's has -----------------------------------------------------------------------------------------------

    async def read(self, chunks: Sequence[m.ChunkHash], standing: Callable[[], Server]) -> Found:
        """What its last snapshot has of these. `standing`: the server that has it, once it is this request's turn.
        Raises Unavailable: not now; Conflict: never."""
        try:
            async with asyncio.timeout(TURN):
                await self._reading.acquire()
        except TimeoutError:
            raise Unavailable("the rank's server reads for others") from None
        try:
            server = standing()
            memory = room_for(chunks)
            self._number += 1
            answer: asyncio.Future[m.ChunksRead] = asyncio.get_running_loop().create_future()
            self._read = self._number, server.number, answer
            server.send(m.pack("read_chunks", number=self._number, chunks=chunks), (memory,))
            try:
                async with asyncio.timeout(PATIENCE):
                    message = await answer
            except TimeoutError:
                raise Unavailable(f"the rank's server has read nothing for {PATIENCE:.0f} s") from None
            finally:
                self._read = None
        finally:
            self._reading.release()
        if message.why:
            raise Unavailable(f"the rank's server cannot read its memory: {message.why}")
        found = Found(message.examined, message.found, memory)
        if not found.fits(chunks):
            raise Conflict("the rank's server answers what was not requested")
        return found

    def was_read(self, server: Server, message: m.ChunksRead) -> None:
        """An answer that nobody waits for any more is left out."""
        if self._read is not None and self._read[:2] == (message.number, server.number) and not self._read[2].done():
            self._read[2].set_result(message)

    # --- either ------------------------------------------------------------------------------------------------------

    def server_lost(self, number: int) -> None:
        if self._bringing is not None and self._named[0] == number:
            self._bringing.cancel()
            self._bringing = None
        if self._read is not None and self._read[1] == number and not self._read[2].done():
            self._read[2].set_exception(Unavailable("the rank's server was lost"))

    def close(self) -> None:
        """Nobody waits for anything any more."""
        self.server_lost(self._named[0])
        if self._read is not None:
            self.server_lost(self._read[1])
