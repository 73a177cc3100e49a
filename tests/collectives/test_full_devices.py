"""Communicators that were made ahead take device memory, until a program needs it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import harness
from tests.collectives.conftest import PROGRAMS, lines_of
from tests.collectives.test_steps import kill, ranks_of
from xmigd.demo.node import Node, Program
from xmigd.native import SERVER

CROWDED = Path(__file__).parents[2] / "build" / "native" / "tests" / "crowded" / SERVER
RANKS = 2
MIB = 1 << 20
OF_ONE = 64  # MiB that a communicator takes there
GIVEN_UP = "given up for a program's memory"


@pytest.fixture
def crowded(native_dir: Path, tmp_path: Path) -> Iterator[Node]:
    """Its servers are those of the native tests: their communicators take memory of the device, whoever makes them."""
    if not CROWDED.exists():
        pytest.skip(f"{CROWDED} is not there: make native-test builds it")
    native = tmp_path / "native"
    shutil.copytree(native_dir, native)
    shutil.copy(CROWDED, native / SERVER)
    settings = {"devices": "cpu:0,cpu:1", "port": -1, "standby_communicators_mib": 1024}
    with harness.own_node(native, **settings) as node:
        yield node


def begin(node: Node, folder: Path) -> Program:
    command: list[str | Path] = [sys.executable, PROGRAMS / "launch.py", str(RANKS), folder, PROGRAMS / "filling.py"]
    program = node.program(command, name="filling")
    all_are(folder, "began")
    return program


def all_are(folder: Path, name: str) -> None:
    harness.wait_until(lambda: all((folder / f"{name}.{rank}").exists() for rank in range(RANKS)), name)


def made_ahead(node: Node, program: Program) -> list[int]:
    return [one["standby_communicators"] for one in ranks_of(node, program)]


def test_they_are_given_up(crowded: Node, tmp_path: Path) -> None:
    """What they take is reported free, and is the program's when it wants it; all go on after a kill without them."""
    program = begin(crowded, tmp_path)
    harness.wait_until(lambda: made_ahead(crowded, program) == [1, 1], "the standbys have made their communicator")
    assert all(one["communicator_bytes"] == OF_ONE * MIB for one in ranks_of(crowded, program))
    (tmp_path / "request").touch()
    all_are(tmp_path, "refused")
    assert made_ahead(crowded, program) == [1, 1], "it would not have been enough"
    (tmp_path / "fill").touch()
    all_are(tmp_path, "filled")
    assert made_ahead(crowded, program) == [0, 0]
    assert GIVEN_UP in crowded.log.read_text()
    kill(ranks_of(crowded, program)[0]["server_pid"])
    harness.wait_until(lambda: all(one["recoveries"] == 1 for one in ranks_of(crowded, program)), "all have recovered")
    (tmp_path / "end").touch()
    sizes = [int(line.rsplit(maxsplit=1)[1]) for line in lines_of(program, timeout=60)]
    # Of 1 GiB: its own communicator, what is left, and the little that the program and its snapshots have.
    assert all(size > 1024 - OF_ONE - 32 - OF_ONE // 2 for size in sizes), sizes
    assert made_ahead(crowded, program) == [0, 0]
