"""A job of ranks that moves between two nodes as a whole. Each step of each rank is compared with a model of all of
them, and is done once."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.collectives.conftest import PROGRAMS, enough
from tests.harness import wait_until
from tests.transfers.nodes import TransferNode, wait_for_lines
from tests.transfers.storm import Storm

RANKS = 2


class Job(Storm):
    """Of ranks, that runs on one of both nodes."""

    def __init__(self, nodes: list[TransferNode], folder: Path, ranks: int = RANKS) -> None:
        super().__init__(nodes, random.Random(0), programs=ranks)
        self.folder = folder

    @property
    def source(self) -> TransferNode:
        return self.nodes[self.where()]

    @property
    def target(self) -> TransferNode:
        return self.nodes[1 - self.where()]

    def id(self) -> str:
        return str(self.source.lives()[0]["job_id"])

    def move(self, **fields: Any) -> dict[str, Any]:
        return self.source.move(self.id(), self.target.name, **fields)

    def goes_on(self) -> None:
        """On one node, all of it."""
        self.settle()
        for rank in range(self.programs):
            file = self.folder / f"steps.{rank}"
            wait_for_lines(file, len(file.read_text().splitlines()) + 10)


def launched(nodes: list[TransferNode], folder: Path, ranks: int = RANKS) -> Job:
    """It begins on the first node, and is on its way."""
    launch: list[str | Path] = [sys.executable, PROGRAMS / "launch.py", str(ranks), folder, PROGRAMS / "steps.py"]
    nodes[0].begin([*launch, "0"], folder / "steps.launched", LOGGED="1")
    wait_until(lambda: all((folder / f"began.{rank}").exists() for rank in range(ranks)), "all have begun")
    return Job(nodes, folder, ranks)


@contextlib.contextmanager
def job_of_ranks(nodes: list[TransferNode], folder: Path) -> Iterator[Job]:
    """In the end each rank has done each step once, and seen nothing but what it should."""
    job = launched(nodes, folder)
    yield job
    enough(folder)
    wait_until(lambda: not any(node.lives() for node in nodes), "the job has ended")
    lines = [(folder / f"out.{rank}").read_text().splitlines()[-1:] for rank in range(RANKS)]
    assert lines == [["done"]] * RANKS, (folder / "steps.launched").read_text()
    for rank in range(RANKS):
        steps = [int(line) for line in (folder / f"steps.{rank}").read_text().splitlines()]
        assert steps == list(range(len(steps)))


def killed(node: TransferNode, pid: int) -> None:
    """As the node numbers it."""
    assert node.entering(["kill", "-KILL", str(pid)], os.environ).wait() == 0
