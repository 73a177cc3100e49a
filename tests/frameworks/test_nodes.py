"""`torchrun --nnodes 2`: its agents, its store, its ranks and their connections between the nodes are written down on
both, and go on."""

from __future__ import annotations

import subprocess
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
from xmigd.demo.node import Program

pytestmark = [pytest.mark.criu, needs_networks, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def nodes(native_dir: Path) -> Iterator[list[TransferNode]]:
    with pair(native_dir) as both:
        yield both


def begin(nodes: Sequence[TransferNode], python: Path, folder: Path) -> list[Program]:
    """A job of one rank on each node."""
    request = {"name": "trains", "nodes": [one.name for one in nodes]}
    environment = {"HOME": str(folder), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    environment["PATH"] = f"{python.parent}:/usr/bin:/bin"
    launcher: list[str | Path] = [sys.executable, "-c", WITHOUT_IO_URING, python, "-m", "torch.distributed.run"]
    launcher += ["--nnodes", "2", "--nproc-per-node", "1"]
    launcher += ["--master-addr", nodes[0].network.address, "--master-port", "29501"]
    return [
        node.begin(
            [*launcher, "--node-rank", str(number), PROGRAMS / "nodes.py", folder, str(STEPS)],
            folder / f"torchrun{number}.out", request=request, **environment,
        )
        for number, node in enumerate(nodes)
    ]  # fmt: skip


def lines(folder: Path) -> list[list[str]]:
    files = [folder / f"rank{rank}" for rank in range(2)]
    return [file.read_text().splitlines() if file.exists() else [] for file in files]


def reaches(folder: Path, count: int) -> bool:
    return [len(each) for each in lines(folder)] == [count] * 2


def test_torchrun(nodes: list[TransferNode], frameworks: Path, tmp_path: Path) -> None:
    """The losses of both ranks, and the weights after each step, are to the last bit those that one process computes
    without xMIG and torchrun."""
    one, two = nodes
    (tmp_path / "alone").mkdir()
    programs = begin(nodes, frameworks, tmp_path)
    subprocess.run([frameworks, PROGRAMS / "nodes.py", tmp_path / "alone", str(STEPS)], check=True, timeout=300)
    wait_until(lambda: reaches(tmp_path, REACHED), "they wait", timeout=300)
    succeeded(one, one.client.post("/v1/checkpoints", {"job": programs[0].job}))
    operation = one.client.post("/v1/checkpoints", {"job": programs[0].job, "stop": True})
    checkpoint = succeeded(one, operation)["result"]["checkpoint"]
    wait_until(lambda: not (one.lives() + two.lives()), "it has ended", timeout=60)
    succeeded(one, restore(one, checkpoint))
    assert reaches(tmp_path, REACHED)
    (tmp_path / "go").touch()
    wait_until(lambda: not (one.lives() + two.lives()), "the job is over", timeout=300)
    errors = [(tmp_path / f"torchrun{number}.err").read_text() for number in range(2)]
    assert lines(tmp_path) == lines(tmp_path / "alone"), errors
    # "Error waiting on exit barrier" is what torchrun prints if the agent with the store ends first.
    assert "ChildFailedError" not in "".join(errors)
