"""Every program of ``programs`` on an unmodified libcudart: undisturbed, and while its server is killed repeatedly."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import harness
from tests.conformance.shared import KILLS, OF_TWO_DEVICES, PROGRAMS
from xmigd.demo.node import Node


@pytest.mark.parametrize("runtime", ["12", "13"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(node: Node, kernels: Path, name: str, runtime: str) -> None:
    path = harness.CONFORMANCE / f"{name}.py"
    device = "cpu:0,1" if name in OF_TWO_DEVICES else "cpu:0"
    undisturbed = harness.run(node, path, kernels=kernels, runtime=runtime, device=device)
    assert undisturbed

    program = harness.start(node, path, kernels=kernels, runtime=runtime, device=device)
    for sequence in KILLS:
        program.inject("kill", sequence=sequence)
    harness.go(program)
    assert harness.output(program) == undisturbed
    program.until("ended")
    recoveries = program.recoveries()
    if name != "device_queries":  # which are answered in the program
        assert recoveries
    # A program that has its results may end while the last recovery goes on.
    assert all(r["outcome"] == "resumed" for r in recoveries[:-1])
    assert all(r["outcome"] in ("resumed", "abandoned") for r in recoveries[-1:])
    assert all(r["exact"] for r in recoveries if r["outcome"] == "resumed")


@pytest.mark.parametrize("name", ["captures", "graphs", "launches", "per_thread_capture", "per_thread_stream"])
def test_launches_that_block(node: Node, kernels: Path, name: str) -> None:
    path = harness.CONFORMANCE / f"{name}.py"
    blocking = harness.run(node, path, kernels=kernels, environment={"CUDA_LAUNCH_BLOCKING": "1"})
    assert blocking == harness.run(node, path, kernels=kernels)


def test_attributes_of_an_h200(null_node: Node, kernels: Path) -> None:
    """What it promises, less what xMIG refuses: the null device describes itself as one."""
    assert harness.run(null_node, harness.CONFORMANCE / "attributes.py", kernels=kernels, device="null:0")
