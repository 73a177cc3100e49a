"""Checkpoints of jobs on several nodes whose programs have connections between the nodes: nothing of what they send is
lost, and nothing comes twice."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.criu.test_nodes import restore
from tests.harness import wait_until
from tests.migration.moves import succeeded
from tests.namespaces import needs_networks
from tests.transfers.nodes import TransferNode, pair, wait_for_lines

pytestmark = [pytest.mark.criu, needs_networks]

PROGRAM = Path(__file__).with_name("connected.py")
PORT = 29_400


@pytest.fixture(scope="module")
def nodes(native_dir: Path) -> Iterator[list[TransferNode]]:
    with pair(native_dir) as both:
        yield both


class Pair:
    """A job with a program on each of two nodes. In the end each has all that the other one has sent."""

    def __init__(self, nodes: list[TransferNode], folder: Path) -> None:
        self.nodes = nodes
        self.outputs = [folder / "one", folder / "two"]
        request = {"name": "connected", "nodes": ["one", "two"]}
        for node, output, other in zip(nodes, self.outputs, ("-", nodes[0].network.address), strict=True):
            if other != "-":
                wait_until(lambda: listens(nodes[0]), "the other one listens")
            node.begin([sys.executable, PROGRAM, output, other, str(PORT)], output.with_suffix(".out"), request=request)
        self.goes_on()

    def goes_on(self) -> None:
        for output in self.outputs:
            wait_for_lines(output, len(output.read_text().splitlines()) + 20 if output.exists() else 20)

    def create(self, *, stop: bool = False) -> dict[str, Any]:
        job = self.nodes[0].lives()[0]["job_id"]
        operation: dict[str, Any] = self.nodes[0].client.post("/v1/checkpoints", {"job": job, "stop": stop})
        return operation

    def stopped(self) -> str:
        checkpoint = succeeded(self.nodes[0], self.create(stop=True))["result"]["checkpoint"]
        self.until_ended()
        return str(checkpoint)

    def until_ended(self) -> None:
        wait_until(lambda: not any(node.lives() for node in self.nodes), "it has ended", 60)

    def check(self) -> None:
        self.goes_on()
        (self.outputs[0].parent / "go").touch()
        self.until_ended()
        one, two = (output.read_text().splitlines()[-1].split() for output in self.outputs)
        assert (one[::2], two[::2]) == (["sent", "came"],) * 2, self.errors()
        assert (one[1], two[1]) == (two[3], one[3]), (one, two)

    def errors(self) -> list[str]:
        return [output.with_suffix(".err").read_text() for output in self.outputs]


def listens(node: TransferNode) -> bool:
    return f":{PORT} " in inside(node, "ss", "-ltnH")


def inside(node: TransferNode, *command: str) -> str:
    """What a command prints in the node's network."""
    return subprocess.run([*node.network.command, *command], capture_output=True, text=True, check=True).stdout


@pytest.fixture
def job(nodes: list[TransferNode], tmp_path: Path) -> Iterator[Pair]:
    made = Pair(nodes, tmp_path)
    yield made
    for node in nodes:
        for each in {one["job_id"] for one in node.lives()}:
            node.client.delete(f"/v1/jobs/{each}")
    made.until_ended()


def test_nothing_is_lost(job: Pair) -> None:
    """It goes on beside a checkpoint, and from one, several times: also from one that it has gone on from."""
    one = job.nodes[0]
    succeeded(one, job.create())
    job.goes_on()
    for _ in range(2):
        checkpoint = job.stopped()
        succeeded(one, restore(one, checkpoint))
        job.goes_on()
    job.check()
