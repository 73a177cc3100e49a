"""`torchrun --nnodes 2` in a network of the job's own: its agents, its store, its ranks and gloo, on nodes of which one
is replaced by another with another address."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.criu.test_nodes import in_reach, restore
from tests.frameworks.test_movable import PROGRAMS, REACHED, STEPS
from tests.frameworks.test_nodes import lines, reaches
from tests.harness import found_again, wait_until
from tests.migration.moves import succeeded
from tests.namespaces import needs_networks
from tests.transfers.nodes import TransferNode, several
from xmigd.demo.node import Program

pytestmark = [pytest.mark.criu, needs_networks, pytest.mark.timeout(600)]


def begin(nodes: Sequence[TransferNode], python: Path, folder: Path) -> list[Program]:
    """A job of one rank on each node. Nothing names an address but the leader's, which is the same everywhere."""
    environment = {"HOME": str(folder), "OMP_NUM_THREADS": "1", "PATH": f"{python.parent}:/usr/sbin:/usr/bin:/bin"}
    options = ["--network", "job", "--nodes", ",".join(one.name for one in nodes)]
    script = 'exec "$0" -m torch.distributed.run --master-addr "$XMIG_JOB_LEADER_ADDRESS" "$@"'
    words = ["--master-port", "29501", "--nnodes", "2", "--nproc-per-node", "1"]
    return [
        node.begin_movable(
            ["sh", "-c", script, python, *words, "--node-rank", str(number), PROGRAMS / "nodes.py", folder, str(STEPS)],
            folder / f"torchrun{number}.err", *options, name="trains", **environment,
        )
        for number, node in enumerate(nodes)
    ]  # fmt: skip


def test_torchrun(native_dir: Path, frameworks: Path, tmp_path: Path) -> None:
    """Both daemons are started again while it trains. The losses of both ranks, and the weights after each step, are to
    the last bit those that one process computes without xMIG and torchrun."""
    (tmp_path / "alone").mkdir()
    with (
        tempfile.TemporaryDirectory(prefix="xmig-mirror-") as mirror,
        several(3, native_dir, checkpoint_mirror=mirror) as nodes,
    ):
        one, two, three = nodes
        programs = begin([one, two], frameworks, tmp_path)
        subprocess.run([frameworks, PROGRAMS / "nodes.py", tmp_path / "alone", str(STEPS)], check=True, timeout=300)
        wait_until(lambda: all(lines(tmp_path)), "they train", timeout=300)
        for node in (one, two):
            node.kill()
            node.starts_again()
            found_again(node)
        wait_until(lambda: reaches(tmp_path, REACHED), "they wait", timeout=300)
        wait_until(lambda: in_reach(one, "two") and in_reach(two, "one"), "they reach each other")
        succeeded(one, one.client.post("/v1/checkpoints", {"job": programs[0].job}))
        operation = one.client.post("/v1/checkpoints", {"job": programs[0].job, "stop": True})
        checkpoint = succeeded(one, operation)["result"]["checkpoint"]
        for node in (one, two):
            wait_until((Path(mirror) / node.name / f"{checkpoint}.json").exists, "it is in the mirror", 60)
        two.close()
        succeeded(one, restore(one, checkpoint, two="three"))
        assert reaches(tmp_path, REACHED)
        (tmp_path / "go").touch()
        wait_until(lambda: not (one.lives() + three.lives()), "the job is over", timeout=300)
        # The agent that has the store may end before the other one knows that it may, which then reports an error.
        errors = [(tmp_path / f"torchrun{number}.err").read_text() for number in range(2)]
        assert lines(tmp_path) == lines(tmp_path / "alone"), errors
