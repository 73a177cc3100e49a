"""Real programs under `xmigctl run --movable`: dumped in the middle, restored, and compared with what they compute if
nothing happens to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests import harness
from tests.criu.apart import checkpoint, restored, run_apart
from tests.criu.test_client_dump import criu_or_skip
from xmigd.demo.node import Node

pytestmark = [pytest.mark.criu, pytest.mark.timeout(600)]
STEPS = 30
REACHED = STEPS * 2 // 3 + 1  # steps, before they wait
PROGRAMS = Path(__file__).parent


@pytest.fixture(scope="module")
def node(native_dir: Path) -> Iterator[Node]:
    with harness.own_node(native_dir, devices="cpu:0,cpu:1", port=-1, criu=criu_or_skip()) as node:
        yield node


def sums() -> list[str]:
    """What each rank of elastic.py writes."""
    expected, content = [], np.zeros(1024, np.float32)
    for step in range(STEPS):
        batches = [np.repeat(np.arange(4 * step, 4 * step + 4) % 13 + rank, 256).astype(np.float32) for rank in (0, 1)]
        ranks = [batch * np.float32(step + 1) + content * np.float32(0.5) for batch in batches]
        content = ranks[0] + ranks[1]
        expected.append(f"{step} {float(content[0]).hex()} {float(content[-1]).hex()}")
    return expected


def test_torchrun(node: Node, frameworks: Path, tmp_path: Path) -> None:
    """With its agent, its store, two ranks, their connections, and their DataLoaders' workers."""
    launcher: list[str | Path] = [frameworks, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    goes_on(node, [*launcher, PROGRAMS / "elastic.py", tmp_path, str(STEPS)], tmp_path, [sums(), sums()])


def test_a_notebook(node: Node, frameworks: Path, tmp_path: Path) -> None:
    """Jupyter's kernel, and who is connected with it."""
    expected = [f"{step} {pow(3, step, 1000003)}" for step in range(STEPS)]
    goes_on(node, [frameworks, PROGRAMS / "notebook.py", tmp_path, str(STEPS)], tmp_path, [expected])


def goes_on(node: Node, command: list[str | Path], folder: Path, expected: Sequence[list[str]]) -> None:
    (folder / "home").mkdir()
    environment = {"HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(command[0]).parent}:/usr/bin:/bin"
    program = run_apart(node, command, folder / "output", **environment)
    files = [folder / f"rank{rank}" for rank in range(len(expected))]
    for file in files:
        harness.wait_until(lambda file=file: file.exists() and len(file.read_text().splitlines()) == REACHED,  # type: ignore[misc]
                           "it waits", timeout=300)  # fmt: skip
    again = restored(node, checkpoint(program, stop=True))
    assert [len(file.read_text().splitlines()) for file in files] == [REACHED] * len(files)
    (folder / "go").touch()
    job = f"/v1/jobs/{again['job']}"
    harness.wait_until(lambda: node.client.get(job)["state"] == "ended", "the job is over", timeout=300)
    assert node.client.get(job)["exit_code"] == 0, (folder / "output.out").read_text()
    assert [file.read_text().splitlines() for file in files] == list(expected)
