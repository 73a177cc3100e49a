"""Packets of connections between nodes are held while their ends are written down or made again, by held.py."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Collection
from pathlib import Path

from xmigd.checkpoints import held
from xmigd.checkpoints.criu import ENVIRONMENT
from xmigd.errors import Unavailable
from xmigd.servers.scopes import SLICE
from xmigd.text import harmless

WITHIN = 60.0  # seconds in which they are held
Ends = tuple[str, str]


class Packets:
    def __init__(self, process: Process | None, count: int) -> None:
        self._process = process
        self._count = count  # of connections

    async def release(self) -> None:
        """What comes from now on arrives. Raises Unavailable: something may have arrived before."""
        if self._process is not None and await self._end() != "until now":
            raise _not_held(self._count, "what held them has ended")

    async def begin(self, request: bytes) -> None:
        """Raises Unavailable."""
        if self._process is None or self._process.stdin is None:
            return
        self._process.stdin.write(request)
        if (answer := await self._line()) != "held":
            raise _not_held(self._count, answer or "it ended")

    async def close(self) -> None:
        """It may be called again."""
        if self._process is not None:
            await self._end()

    async def _end(self) -> str:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        last = await self._line()
        try:
            await asyncio.wait_for(self._process.wait(), WITHIN)
        except TimeoutError:
            self._process.kill()
        return last

    async def _line(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), WITHIN)
        except TimeoutError:
            self._process.kill()
            return f"no answer within {WITHIN:g} s"
        return line.decode(errors="replace").strip()


@contextlib.asynccontextmanager
async def held_packets(
    connections: Collection[Ends], *, confined: bool, forgotten: Collection[Ends] = ()
) -> AsyncIterator[Packets]:
    """`forgotten`: what the kernel still knows of such connections, of programs that have ended. `confined`: this
    daemon is a unit of systemd, which may not do that itself. They are released at the end, or if this daemon ends.
    Raises Unavailable."""
    packets = Packets(await _started(connections, confined) if connections else None, len(connections))
    try:
        request = {"connections": sorted(connections), "forgotten": sorted(forgotten)}
        await packets.begin(json.dumps(request).encode() + b"\n")
        yield packets
    finally:
        await packets.close()


async def _started(connections: Collection[Ends], confined: bool) -> Process:
    """Raises Unavailable."""
    command = [sys.executable, "-I", "-S", str(Path(held.__file__).resolve())]
    if confined:
        command = ["systemd-run", "--quiet", "--collect", "--wait", "--pipe", f"--property=Slice={SLICE}", *command]
    try:
        return await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=ENVIRONMENT, start_new_session=True
        )
    except OSError as error:
        raise _not_held(len(connections), f"{command[0]}: {error.strerror}") from None


def _not_held(count: int, why: str) -> Unavailable:
    return Unavailable(
        f"the packets of {count} connections between nodes are not held: {harmless(why, 200)}",
        code="packets_not_held", hint="root and nf_tables are needed (Linux 5.12 or later)",
    )  # fmt: skip
