"""torchrun's job moves to another node in the middle, with its agent, its store, two ranks and their connections."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.frameworks.test_movable import PROGRAMS, REACHED, STEPS, sums
from tests.harness import wait_until
from tests.migration.moves import succeeded
from tests.namespaces import needs_networks
from tests.transfers.nodes import TransferNode, pair
from xmigd.demo.node import Program

pytestmark = [pytest.mark.criu, needs_networks, pytest.mark.timeout(600)]

TORCHRUN: list[str | Path] = ["-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2"]
# As with the sysctl kernel.io_uring_disabled=2, which would be the whole machine's.
WITHOUT_IO_URING = """import os, sys; from xmigd.cli.apart import _close_io_uring
_close_io_uring(); os.execv(sys.argv[1], sys.argv[1:])"""


@pytest.fixture(scope="module")
def nodes(native_dir: Path) -> Iterator[list[TransferNode]]:
    with pair(native_dir) as both:
        yield both


def test_torchrun(nodes: list[TransferNode], frameworks: Path, tmp_path: Path) -> None:
    launcher: list[str | Path] = [sys.executable, "-c", WITHOUT_IO_URING, frameworks, *TORCHRUN, "--standalone"]
    moves(nodes, tmp_path, nodes[0].begin, launcher, frameworks)


def test_torchrun_that_is_movable(nodes: list[TransferNode], frameworks: Path, tmp_path: Path) -> None:
    """Its store listens at an address of the first node, which the second one does not have."""
    address = nodes[0].network.address
    at_address = ["--rdzv-endpoint", f"{address}:29500", "--rdzv-conf", "is_host=true", "--local-addr", address]
    launcher: list[str | Path] = [frameworks, *TORCHRUN, "--rdzv-backend", "c10d", *at_address]
    moves(nodes, tmp_path, nodes[0].begin_movable, launcher, frameworks)


def moves(
    nodes: list[TransferNode], folder: Path, begin: Callable[..., Program], launcher: list[str | Path],
    frameworks: Path,
) -> None:  # fmt: skip
    """In the middle. Then it goes on, and ends with the sums of one that nobody disturbs."""
    one, two = nodes
    (folder / "home").mkdir()
    begin(
        [*launcher, PROGRAMS / "elastic.py", folder, str(STEPS)], folder / "torchrun.out", HOME=str(folder / "home"),
        OMP_NUM_THREADS="1", PATH=f"{frameworks.parent}:/usr/bin:/bin",
    )  # fmt: skip
    files = [folder / f"rank{rank}" for rank in range(2)]
    for file in files:
        wait_until(lambda file=file: file.exists() and len(file.read_text().splitlines()) == REACHED,  # type: ignore[misc]
                   "it waits", timeout=300)  # fmt: skip
    # 1.5 GB of three programs, by two daemons on one machine.
    done = succeeded(one, one.move(one.lives()[0]["job_id"], "two/cpu:0,cpu:1"), timeout=300)
    assert len(done["result"]["processes"]) == 3
    assert not one.lives()
    devices = {each["id"]: each["device"] for each in two.lives()}
    # Of torchrun itself, and the ranks.
    assert [devices[each] for each in two.transfers()[0]["processes"]] == ["cpu:0", "cpu:1", "cpu:0"]
    assert [len(file.read_text().splitlines()) for file in files] == [REACHED] * 2
    (folder / "go").touch()
    wait_until(lambda: not two.lives(), "the job is over", timeout=300)
    printed = "".join(file.read_text() for file in folder.glob("torchrun.*"))
    assert [file.read_text().splitlines() for file in files] == [sums()] * 2, printed
