"""A suspension or resumption that another node has begun, and one that is requested on this node at the same moment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Engine

from tests.api.conftest import engine, readers, writer
from tests.operating import run_with
from xmigd.database import models
from xmigd.database.writer import Writer
from xmigd.errors import Conflict
from xmigd.events.bus import Bus
from xmigd.migrations.plan import Place
from xmigd.migrations.service import Moves
from xmigd.operations.service import Operations
from xmigd.supervisor.joining import Join

__all__ = ["engine", "readers", "writer"]

JOB, ONE, OTHER, MIB = "a" * 32, "b" * 32, "c" * 32, 1 << 20


class Node:
    """That does not lead, with two ranks, which are suspended."""

    def __init__(self, writer: Writer, readers: Engine, folder: Path) -> None:
        rows: list[Any] = [
            models.Process(
                id=name, job_id=JOB, pid=5, start_time=7, uid=0, gid=0, command="c", device="cpu:0", state="suspended",
                why="", started_at=0.0,
            ) for name in (ONE, OTHER)
        ]  # fmt: skip
        job = models.Job(id=JOB, name="j", command="c", uid=0, registered=True, created_at=0.0)
        writer.submit("jobs.add", lambda session: session.add_all([job, *rows])).result()
        self.operations = Operations(writer, readers, Bus(writer, newest=0))
        self.refused: list[str] = []
        self.cancelled: list[str] = []
        self.requests: list[str] = []  # who has looked at the places
        self.may, self.over = asyncio.Event(), asyncio.Event()
        self.begun: list[str] = []
        self.processes = [self.process(name) for name in (ONE, OTHER)]
        supervisor: Any = SimpleNamespace(
            together=lambda process: [process], resume_together=lambda processes, joins: True, joins=set(),
            scopes=SimpleNamespace(cannot_join=lambda what, process, why: self.refused.append(process.row.id)),
        )  # fmt: skip
        self.moves = Moves(
            supervisor=supervisor, operations=self.operations, readers=readers, folder=folder,
            places=self,  # type: ignore[arg-type]
        )  # fmt: skip

    def process(self, name: str) -> Any:
        machine = SimpleNamespace(where="host", move=None)

        async def run(record: Any, changed: Callable[..., None], *, ranks: bool) -> Any:
            self.begun.append(name)
            machine.move = SimpleNamespace(record=record, may_cancel=None)
            await self.over.wait()
            machine.move, record.state = None, "done"
            return record

        moving = SimpleNamespace(run=run, why_not=lambda kind: None, place="host", cancel=self.cancelled.append)
        job = SimpleNamespace(id=JOB, uid=0, memory_quota=MIB, reserved_bytes=None)
        return SimpleNamespace(
            row=SimpleNamespace(id=name, job=JOB, device="cpu:0"), job=job, state="suspended", location="host",
            machine=machine, moving=moving, handles={}, last_snapshot=None, lacks_quota=lambda name, bytes: None,
        )  # fmt: skip

    def join(self, *processes: Any) -> None:
        self.moves._join(Join("resume", "host", processes, "a"))

    async def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            await asyncio.sleep(0.001)

    async def known(self) -> list[Place]:
        """Of places."""
        self.requests.append("")
        await self.may.wait()
        return [Place(id="cpu:0", free_bytes=4 * MIB, total_bytes=4 * MIB)]


Test = Callable[[Node], Awaitable[None]]
Run = Callable[[Test], None]


@pytest.fixture
def run(writer: Writer, readers: Engine, tmp_path: Path) -> Run:
    return partial(run_with, partial(Node, writer, readers, tmp_path))


@pytest.mark.parametrize("first", ["request", "join"])
def test_both_at_once(run: Run, first: str) -> None:
    """One is begun, and does what the other would."""

    async def test(node: Node) -> None:
        if first == "join":
            node.join(*node.processes)
            await node.until(lambda: len(node.requests) == 1)
        request = asyncio.ensure_future(node.moves.resume(node.processes, [], requestor="user 0"))
        await node.until(lambda: len(node.requests) == 1 + (first == "join"))
        if first == "request":
            node.join(*node.processes)
            await node.until(lambda: len(node.requests) == 2)
        node.may.set()
        if first == "request":
            await request
        else:
            with pytest.raises(Conflict, match="is under way"):
                await request
        await node.until(lambda: len(node.begun) == 2)
        await asyncio.sleep(0.01)
        assert (sorted(node.begun), node.refused, node.cancelled) == ([ONE, OTHER], [], [])
        node.over.set()
        await node.until(lambda: not node.moves._under_way and not node.moves._joining)
        assert (len(node.begun), node.refused) == (2, [])

    run(test)


def test_the_same_once_more_while_it_waits(run: Run) -> None:
    async def test(node: Node) -> None:
        for _ in range(5):
            node.join(*node.processes)
        assert len(node.moves._joining) == 1
        node.join(node.processes[0])
        assert len(node.moves._joining) == 2
        node.may.set()
        await node.until(lambda: len(node.begun) == 2)
        node.over.set()
        await node.until(lambda: not node.moves._under_way and not node.moves._joining)
        assert node.refused == []

    run(test)
