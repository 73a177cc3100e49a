"""torchrun's job moves to another node in the middle, with its agent, its store, two ranks and their connections."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.frameworks.test_movable import PROGRAMS, REACHED, STEPS, sums
from tests.harness import wait_until
from tests.migration.moves import succeeded
from tests.namespaces import needs_networks
from tests.transfers.nodes import TransferNode, pair

pytestmark = [pytest.mark.criu, needs_networks, pytest.mark.timeout(600)]


# As with the sysctl kernel.io_uring_disabled=2, which would be the whole machine's.
WITHOUT_IO_URING = """import os, sys; from xmigd.cli.apart import _close_io_uring
_close_io_uring(); os.execv(sys.argv[1], sys.argv[1:])"""


@pytest.fixture(scope="module")
def nodes(native_dir: Path) -> Iterator[list[TransferNode]]:
    with pair(native_dir) as both:
        yield both


def test_torchrun(nodes: list[TransferNode], frameworks: Path, tmp_path: Path) -> None:
    one, two = nodes
    (tmp_path / "home").mkdir()
    launcher: list[str | Path] = [
        sys.executable,
        "-c",
        WITHOUT_IO_URING,
        frameworks,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    one.begin(
        [*launcher, PROGRAMS / "elastic.py", tmp_path, str(STEPS)], tmp_path / "torchrun.out",
        HOME=str(tmp_path / "home"), OMP_NUM_THREADS="1", PATH=f"{frameworks.parent}:/usr/bin:/bin",
    )  # fmt: skip
    files = [tmp_path / f"rank{rank}" for rank in range(2)]
    errors = tmp_path / "torchrun.err"
    for file in files:
        wait_until(lambda file=file: file.exists() and len(file.read_text().splitlines()) == REACHED,  # type: ignore[misc]
                   "it waits", timeout=300)  # fmt: skip
    # 1.5 GB of three programs, by two daemons on one machine.
    done = succeeded(one, one.move(one.lives()[0]["job_id"], "two/cpu:0,cpu:1"), timeout=300)
    assert len(done["result"]["processes"]) == 3
    assert not one.lives()
    there = sorted(two.lives(), key=lambda each: each["pid"])
    assert [each["device"] for each in there] == ["cpu:0", "cpu:1", "cpu:0"]  # of torchrun itself, and the ranks
    assert [len(file.read_text().splitlines()) for file in files] == [REACHED] * 2
    (tmp_path / "go").touch()
    wait_until(lambda: not two.lives(), "the job is over", timeout=300)
    assert [file.read_text().splitlines() for file in files] == [sums()] * 2, errors.read_text()
