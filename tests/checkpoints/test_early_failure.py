"""CRIU fails while memory is still being read: that is known at once, and what is left is not read."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.checkpoints.samples import manifest_of, stored
from xmigd.checkpoints import live, opened, restoring
from xmigd.checkpoints.content import THREADS, Chunks
from xmigd.checkpoints.manifest import Content
from xmigd.checkpoints.restoring import Restoring
from xmigd.errors import Conflict
from xmigd.ipc import messages as m

PIECES = 8 * THREADS


class Slow(Chunks):
    """Each piece takes until it is known that no more are wanted."""

    begun = 0
    enough: threading.Event | None = None

    def _restored(self, *arguments: Any) -> Any:
        self.begun += 1
        assert self.enough is not None
        assert self.enough.wait(60), "what is left is read although CRIU has failed"
        return super()._restored(*arguments)


def message(id: int) -> str:
    fields = {"op": "add", "id": id, "kind": "shadow", "ordinal": 0, "address": 0, "bytes": 4, "name": ""}
    return m.pack("memory", **fields).decode()


def test_the_rest_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = Slow(tmp_path / "objects")
    with chunks.writing() as writing:
        contents = [stored(writing, number.to_bytes(4, "little")) for number in range(1, PIECES + 1)]
    manifest = manifest_of(contents, Content(bytes=0, chunks=()))
    (program,) = manifest.programs
    memory = [each.model_copy(update={"message": message(each.id)}) for each in program.memory]
    manifest = manifest.model_copy(update={"programs": (program.model_copy(update={"memory": tuple(memory)}),)})
    before = live.restore_memory

    def seen(chunks: Slow, *arguments: Any) -> Any:
        (chunks.enough,) = (each for each in arguments if isinstance(each, threading.Event))
        return before(chunks, *arguments)

    monkeypatch.setattr(live, "restore_memory", seen)
    monkeypatch.setattr(restoring, "leave_parent", lambda folder, pid: None)
    monkeypatch.setattr(opened, "check_names", lambda folder: set())

    async def main() -> None:
        async def fails(*_: object, **__: object) -> int:
            async with asyncio.timeout(60):
                while not chunks.begun:
                    await asyncio.sleep(0.001)
            raise Conflict("it cannot", code="criu_failed")

        working = SimpleNamespace(images=lambda operation, place: contextlib.nullcontext(tmp_path))
        criu = SimpleNamespace(restore=fails)
        nobody: Any = None
        checkpoints: Any = SimpleNamespace(working=working, criu=criu, chunks=chunks)
        operation: Any = SimpleNamespace(
            row=SimpleNamespace(owner=0), progress=lambda *_, **__: None, reporter=lambda: lambda done: None,
            point_of_no_return=lambda why: None,
        )  # fmt: skip
        operations: Any = SimpleNamespace(register=lambda kind, resolver: None)
        restores = Restoring(
            checkpoints=checkpoints, supervisor=nobody, moves=nobody, operations=operations, reader=nobody,
            devices=["cpu:0"], places=nobody, bus=nobody,
        )  # fmt: skip
        with pytest.raises(Conflict, match="it cannot"):
            await restores.make_again(operation, manifest, ["cpu:0"], "user 0")

    asyncio.run(main())
    assert 0 < chunks.begun <= 2 * THREADS
