"""A job that waits for its turn, and is to stay suspended: it does not come, however late somebody requests that."""

from __future__ import annotations

import asyncio
import contextlib
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
from xmigd.scheduling.service import Preemptions
from xmigd.sharing.rotation import Rotation

__all__ = ["engine", "readers", "writer"]

JOB, PROCESS, MIB = "a" * 32, "b" * 32, 1 << 20
WRITTEN = (
    models.Job(id=JOB, name="j", command="c", uid=0, registered=True, created_at=0.0),
    models.Process(
        id=PROCESS, job_id=JOB, pid=5, start_time=7, uid=0, gid=0, command="c", device="cpu:0", state="suspended",
        why="", started_at=0.0,
    ),
)  # fmt: skip


Test = Callable[["Node"], Awaitable[None]]
Run = Callable[[Test], None]


class Node:
    """With one device, and one job, which takes turns."""

    def __init__(self, writer: Writer, readers: Engine, folder: Path) -> None:
        writer.submit("jobs.add", lambda session: session.add_all(map(session.merge, WRITTEN))).result()
        self.operations = Operations(writer, readers, Bus(writer, newest=0))
        job = SimpleNamespace(id=JOB, uid=0, priority="best-effort", memory_quota=MIB, reserved_bytes=None, nodes=None)
        moving = SimpleNamespace(why_not=lambda kind: None, run=self.run, place="host")
        self.process: Any = SimpleNamespace(
            row=SimpleNamespace(id=PROCESS, job=JOB, device="cpu:0"), job=job, state="suspended", location="host",
            machine=SimpleNamespace(where="host", move=None), moving=moving, handles={}, last_snapshot=None,
            lacks_quota=lambda name, bytes: None, host_pool=SimpleNamespace(room=lambda: 1 << 40),
        )  # fmt: skip
        supervisor: Any = SimpleNamespace(
            cordoned=(), processes={PROCESS: self.process}, processes_of=lambda job: [self.process],
            together=lambda process: [process], joins=set(), suspend_together=lambda processes, to: None,
            resume_together=lambda processes, *, joins: False,
        )  # fmt: skip
        self.looks, self.may = asyncio.Event(), asyncio.Event()
        self.moved: list[str] = []
        self.moves = Moves(
            supervisor=supervisor, operations=self.operations, readers=readers, folder=folder,
            places=self,  # type: ignore[arg-type]
        )  # fmt: skip
        self.rotation = Rotation(
            supervisor=supervisor, moves=self.moves, operations=self.operations,
            admission=self, bus=self.operations._bus, slice=1.0,  # type: ignore[arg-type]
        )  # fmt: skip
        nobody: Any = None
        self.preemptions = Preemptions(
            supervisor=supervisor, moves=self.moves, operations=self.operations, checkpoints=nobody, restoring=nobody,
            jobs=nobody, processes=nobody,
        )  # fmt: skip

    async def is_suspended(self) -> None:
        """By request."""
        row = await self.moves.suspend_job([self.process], "host", requestor="user 0")
        assert (await self.operations.ended(row)).state == "succeeded"

    async def is_preempted(self) -> None:
        row = await self.preemptions.preempt_job(JOB, 0, seconds=60.0, prefer="suspend", requestor="user 0")
        assert (await self.operations.ended(row)).state == "succeeded"

    # Moving
    async def run(self, record: Any, changed: Callable[..., None], *, ranks: bool) -> Any:
        """Suspends it at once, and takes a while to say so."""
        self.moved.append(record.kind)
        self.process.state = "suspended"
        self.looks.set()
        await self.may.wait()
        record.state, record.location = "done", "host"
        return record

    # Places
    async def known(self) -> list[Place]:
        self.looks.set()
        await self.may.wait()
        return [Place(id="cpu:0", free_bytes=MIB, total_bytes=MIB)]

    # Admission
    async def room(self) -> dict[str, int]:
        return {"cpu:0": MIB}

    def coming(self, job: str, device: str, bytes: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@pytest.fixture
def run(writer: Writer, readers: Engine, tmp_path: Path) -> Run:
    return partial(run_with, partial(Node, writer, readers, tmp_path))


WAYS = {"suspended": Node.is_suspended, "preempted": Node.is_preempted}


@pytest.mark.parametrize("by", WAYS)
def test_its_turn_has_come(run: Run, by: str) -> None:
    """It was looked at already whether it may come."""

    async def test(node: Node) -> None:
        node.rotation._waits_since[JOB] = 0.0
        turn = asyncio.ensure_future(node.rotation._turn())
        await node.looks.wait()
        await WAYS[by](node)
        node.may.set()
        with pytest.raises(Conflict, match="stay suspended"):
            await turn
        await node.rotation._turn()
        assert (node.moved, node.rotation.waits(JOB)) == ([], None)

    run(test)


def test_it_is_being_suspended_for_another_one(run: Run) -> None:
    """It is suspended, and that is not written down yet."""

    async def test(node: Node) -> None:
        node.process.state = "running"
        swap = asyncio.ensure_future(node.rotation._swap("suspend", JOB, "cpu:0"))
        await node.looks.wait()
        node.process.state = "running"
        assert node.rotation.waits(JOB) is None  # it still runs
        node.process.state = "suspended"
        assert node.rotation.waits(JOB) is not None
        await node.is_preempted()
        node.may.set()
        await swap
        assert node.rotation.waits(JOB) is None
        await node.rotation._turn()
        assert node.moved == ["suspend"]

    run(test)


def test_nobody_wants_anything_else(run: Run) -> None:
    """The same without a request: it waits, and comes."""

    async def test(node: Node) -> None:
        node.process.state = "running"
        node.may.set()
        await node.rotation._swap("suspend", JOB, "cpu:0")
        assert node.rotation.waits(JOB) is not None
        await node.rotation._turn()
        assert (node.moved, node.rotation.waits(JOB)) == (["suspend", "resume"], None)

    run(test)
