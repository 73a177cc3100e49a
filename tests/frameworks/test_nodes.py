"""`torchrun --nnodes 2`: its agents, its store, its ranks and their connections between the nodes are written down on
both, and go on."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.criu.test_nodes import restore
from tests.frameworks.test_movable import PROGRAMS, REACHED, STEPS
from tests.frameworks.test_transfers import WITHOUT_IO_URING
from tests.harness import wait_until
from tests.migration.moves import succeeded
from tests.namespaces import needs_networks
from tests.transfers.nodes import TransferNode, pair

pytestmark = [pytest.mark.criu, needs_networks, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def nodes(native_dir: Path) -> Iterator[list[TransferNode]]:
    with pair(native_dir) as both:
        yield both


class Job:
    """Of one rank on each node."""

    def __init__(self, nodes: Sequence[TransferNode], python: Path, folder: Path, port: int) -> None:
        (folder / "home").mkdir(parents=True)
        self.folder = folder
        self.files = [folder / f"rank{rank}" for rank in range(len(nodes))]
        self.programs = []
        request = {"name": folder.name, "nodes": [one.name for one in nodes]}
        environment = {"HOME": str(folder / "home"), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        environment["PATH"] = f"{python.parent}:/usr/bin:/bin"
        for number, node in enumerate(nodes):
            command: list[str | Path] = [sys.executable, "-c", WITHOUT_IO_URING, python, "-m", "torch.distributed.run"]
            command += ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(number)]
            command += ["--master-addr", nodes[0].network.address, "--master-port", str(port)]
            command += [PROGRAMS / "nodes.py", folder, str(STEPS)]
            self.programs.append(node.begin(command, folder / f"torchrun.{number}", request=request, **environment))

    def lines(self) -> list[list[str]]:
        return [file.read_text().splitlines() if file.exists() else [] for file in self.files]

    def reaches(self, count: int) -> None:
        wait_until(lambda: [len(each) for each in self.lines()] == [count] * 2, f"{self.errors()}", timeout=300)

    def go(self) -> None:
        (self.folder / "go").touch()

    def errors(self) -> str:
        return "".join(file.read_text() for file in self.folder.glob("torchrun.*.err"))


def test_torchrun(nodes: list[TransferNode], frameworks: Path, tmp_path: Path) -> None:
    """The losses of both ranks, and the weights after each step, are those of a job beside it that nothing happens to,
    to the last bit."""
    one, two = nodes
    job, undisturbed = (
        Job(nodes, frameworks, tmp_path / name, 29_501 + place) for place, name in enumerate(("disturbed", "beside"))
    )
    for each in (job, undisturbed):
        each.reaches(REACHED)
    operation = one.client.post("/v1/checkpoints", {"job": job.programs[0].job, "stop": True})
    checkpoint = succeeded(one, operation)["result"]["checkpoint"]
    for program in job.programs:
        program.process.wait(60)
    undisturbed.go()
    succeeded(one, restore(one, checkpoint))
    assert [len(each) for each in job.lines()] == [REACHED] * 2
    job.go()
    wait_until(lambda: not (one.lives() + two.lives()), "the jobs are over", timeout=300)
    assert [len(each) for each in job.lines()] == [STEPS] * 2, job.errors()
    assert "Error" not in job.errors()
    assert job.lines() == undisturbed.lines()
