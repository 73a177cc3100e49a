"""PyTorch's process group of NCCL, unmodified, on null devices: `torchrun` under xMIG."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import forked
from xmigd.demo.node import Node

pytestmark = pytest.mark.timeout(600)
PROGRAM = Path(__file__).parent / "ranks.py"


@pytest.fixture
def two(native_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("n")
    with forked.Node(folder, native_dir=native_dir, devices="null:0,null:1", port=-1) as node:
        yield node


@pytest.mark.parametrize("how", ["lazy", "eager"])
def test_torchrun(two: Node, frameworks: Path, how: str) -> None:
    program = two.program(
        [frameworks, "-m", "torch.distributed.run", "--nproc-per-node", "2", PROGRAM, how], stderr=subprocess.STDOUT,
        environment={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    out, _ = program.process.communicate(timeout=500)
    assert program.process.returncode == 0, out[-5000:] + "\n".join(map(str, program.lines()))
    assert sorted(line for line in out.splitlines() if line.startswith("done")) == ["done 0", "done 1"]
