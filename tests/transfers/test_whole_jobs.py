"""Jobs of several processes move between two nodes as a whole: ranks that share communicators, and a program with a
child. Each step of each rank is compared with a model of all of them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.collectives.conftest import PROGRAMS, enough
from tests.harness import wait_until
from tests.migration.moves import succeeded
from tests.namespaces import needs_networks
from tests.transfers.nodes import TransferNode, pair

pytestmark = [pytest.mark.criu, needs_networks]

RANKS = 2


@pytest.fixture(scope="module")
def nodes(native_dir: Path) -> Iterator[list[TransferNode]]:
    with pair(native_dir) as both:
        yield both


@contextlib.contextmanager
def ranks(nodes: list[TransferNode], folder: Path) -> Iterator[str]:
    """A job of two ranks on the first node, its id there. In the end each rank has seen nothing but what it should."""
    command: list[str | Path] = [sys.executable, PROGRAMS / "launch.py", str(RANKS), folder, PROGRAMS / "steps.py", "0"]
    program = nodes[0].begin(command, folder / "steps.launched")
    wait_until(lambda: all((folder / f"began.{rank}").exists() for rank in range(RANKS)), "all have begun")
    yield program.job
    enough(folder)
    wait_until(lambda: not any(node.lives() for node in nodes), "the job has ended")
    lines = [(folder / f"out.{rank}").read_text().splitlines()[-1:] for rank in range(RANKS)]
    assert lines == [["done"]] * RANKS, (folder / "steps.launched").read_text()


def test_ranks_there_and_back(nodes: list[TransferNode], tmp_path: Path) -> None:
    one, two = nodes
    with ranks(nodes, tmp_path) as job:
        plan = one.ctl("migrate", job, "--to", "two", "--plan")
        assert [line.split()[-1] for line in plan.splitlines()[-RANKS:]] == ["two/cpu:0", "two/cpu:1"]
        printed = one.ctl("migrate", job, "--to", "two/cpu:1,cpu:0")
        assert "2 processes are on two/cpu:1,cpu:0" in printed
        there = two.lives()
        assert not one.lives()
        assert [each["device"] for each in sorted(there, key=lambda each: each["pid"])] == ["cpu:1", "cpu:0"]
        assert {each["state"] for each in there} == {"running"}
        back = succeeded(two, two.move(there[0]["job_id"], "one"))
        assert not two.lives()
        assert {each["device"] for each in one.lives()} == {"cpu:0", "cpu:1"}
        assert back["result"]["target"] == "one/cpu:0,cpu:1"
