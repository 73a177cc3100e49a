"""On null devices: PyTorch's process group of NCCL, unmodified, `torchrun` under xMIG; and what CuPy and JAX do with
NCCL in one process with two devices."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import forked
from tests.gpu.cases import PROGRAMS
from xmigd.demo.node import Node

pytestmark = pytest.mark.timeout(600)
WITHOUT_FILE = PROGRAMS.parent / "without_device_file.py"
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


@pytest.mark.parametrize(
    "words",
    [["cupy_devices.py", "--steps", "20"], ["jax_devices.py", "--steps", "1", "--width", "64", "--batch", "4"]],
    ids=["cupy", "jax"],
)
def test_two_devices_in_one_process(two: Node, frameworks: Path, words: list[str]) -> None:
    """Sums, gathers, and what one device sends to the other."""
    name, *rest = words
    program = two.program(
        [frameworks, *([WITHOUT_FILE] if name.startswith("jax") else []), PROGRAMS / name, *rest], device="null:0,1",
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    out, _ = program.process.communicate(timeout=500)
    assert program.process.returncode == 0, out[-5000:] + "\n".join(map(str, program.lines()))
    assert '"rank": 0' in out
    assert not [line for line in program.lines("server") if "not supported" in str(line)]
