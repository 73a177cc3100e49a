"""A checkpoint has of the one before what nobody has written since; restored, each is what the program had written."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.criu.stored import Stored, reading
from tests.criu.test_checkpoints import checkpoint, manifest, restored
from tests.criu.test_checkpoints import folder as folder_of
from tests.criu.test_client_dump import criu_or_skip
from tests.migration.moves import ended, info, moved, reaches, resumed, suspended
from xmigd.demo.node import Node, Program

pytestmark = pytest.mark.criu

CHUNK = 2 << 20


@pytest.fixture(scope="module")
def node(native_dir: Path) -> Iterator[Node]:
    with harness.own_node(native_dir, devices="cpu:0,cpu:1", port=-1, criu=criu_or_skip()) as node:
        yield node


def put(path: Path, number: int) -> None:
    path.with_suffix(".new").write_text(str(number))
    path.with_suffix(".new").rename(path)


def written(folder: Path, order: int) -> None:
    put(folder / "order", order)
    harness.wait_until((folder / f"done.{order}").exists, "it is written")


def begun(node: Node, folder: Path) -> Program:
    with (folder / "out").open("w") as out:
        command: list[str | Path] = [sys.executable, Path(__file__).parent / "chunks.py", folder]
        program = node.program(command, stdout=out, stderr=out, start_new_session=True)
    written(folder, 0)
    return program


def recovered(program: Program) -> None:
    before = info(program)
    os.kill(before["server_pid"], signal.SIGKILL)
    harness.wait_until(
        lambda: (now := info(program))["recoveries"] > before["recoveries"] and now["state"] == "running",
        "it is recovered",
    )


def slept(program: Program) -> None:
    suspended(program)
    resumed(program)


def restarted(program: Program) -> None:
    program.node.kill()
    program.node.start()
    harness.found_again(program.node)


class Checkpoints:
    """Of a program of `chunks.py`, each with what that had written then."""

    def __init__(self, program: Program, folder: Path) -> None:
        self._program, self._folder = program, folder
        self._made: list[tuple[int, dict[str, Any]]] = []

    def make(self, order: int, *, stop: bool = False) -> None:
        self.add(order, checkpoint(self._program, stop=stop))

    def add(self, order: int, made: dict[str, Any]) -> None:
        self._made.append((order, made))

    def check(self) -> None:
        """Each, also when those that it was an increment of are removed; the last one restored."""
        node = self._program.node
        read = reading(folder_of(node) / "objects", self._folder / "memory")
        for number, (order, made) in enumerate(self._made):
            (program,) = manifest(node, made).programs
            stored = Stored(program, read)
            for address, size, digest in json.loads((self._folder / f"done.{order}").read_text()):
                found = hashlib.sha256(stored.at(address, size)).hexdigest()
                assert found == digest, f"checkpoint {number} of {order}: {size} bytes at {address:#x}"
            if number < len(self._made) - 1:
                node.client.delete(f"/v1/checkpoints/{made['checkpoint']}")
        restored(node, made)
        put(self._folder / "compare", 1)
        harness.wait_until((self._folder / "compared.1").exists, "it has compared")
        assert (self._folder / "compared.1").read_text() == str(order)
        assert (self._folder / "out").read_text() == ""


def nothing(_: Program) -> None:
    pass


@pytest.mark.parametrize(
    ("memory", "acts"),
    [
        (0, [nothing, nothing, recovered, nothing, recovered, moved, slept, restarted, nothing]),
        (512, [nothing, nothing, recovered, nothing]),
    ],
)
def test_each_is_what_was_written(
    native_dir: Path, tmp_path: Path, memory: int, acts: list[Callable[[Program], object]]
) -> None:
    """Whatever was written, whatever happened to the process in between, and wherever checkpoints are kept."""
    settings = {"checkpoint_memory_mib": memory, "checkpoint_memory_dir": tmp_path / "memory", "criu": criu_or_skip()}
    with harness.own_node(native_dir, devices="cpu:0,cpu:1", port=-1, **settings) as node:
        program = begun(node, tmp_path)
        made = Checkpoints(program, tmp_path)
        for number, act in enumerate(acts):
            written(tmp_path, 100 + number)
            act(program)
            made.make(100 + number, stop=number == len(acts) - 1)
        made.check()


def test_a_server_dies_while_it_is_made(node: Node, tmp_path: Path) -> None:
    """Then there is none, or one that is right; and so is the next one, which is an increment of the last that there
    is, or of nothing."""
    program = begun(node, tmp_path)
    made = Checkpoints(program, tmp_path)
    made.make(0)
    for order, phase in enumerate(("pausing", "dumping", "copying", "storing"), 200):
        written(tmp_path, order)
        before = info(program)
        operation = node.client.post("/v1/checkpoints", {"process": before["id"]})
        reaches(node, operation, phase)
        recovered(program)
        over = ended(node, operation)
        if over["state"] == "succeeded":
            made.add(order, over["result"])
        else:
            assert over["error"]["code"]
        made.make(order)
    written(tmp_path, 300)
    made.make(300, stop=True)
    made.check()


def test_only_what_was_written_is_copied(node: Node, tmp_path: Path) -> None:
    program = begun(node, tmp_path)
    full = checkpoint(program)
    assert full["copied_bytes"] > 8 * CHUNK
    idle = checkpoint(program)
    assert (idle["copied_bytes"], idle["content_bytes"] >= full["copied_bytes"]) == (0, True)
    # What was removed meanwhile is copied, and stored, again.
    for one in (full, idle):
        node.client.delete(f"/v1/checkpoints/{one['checkpoint']}")
    again = checkpoint(program)
    assert again["copied_bytes"] == full["copied_bytes"]
    verified = node.client.post(f"/v1/checkpoints/{again['checkpoint']}:verify", {})
    harness.wait_until(
        lambda: node.client.get(f"/v1/operations/{verified['id']}")["state"] == "succeeded", "it is whole"
    )
    for act in (recovered, restarted, moved, slept):
        act(program)
        assert checkpoint(program)["copied_bytes"] == full["copied_bytes"]  # a new server, or daemon, knows nothing
        if act in (recovered, restarted):  # behind the others, the shadow changes its places for a while
            assert checkpoint(program)["copied_bytes"] == 0
    program.process.kill()
    program.process.wait()
