"""Every conformance program, moved, suspended and resumed in the middle of what it does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import harness
from tests.conformance.shared import OF_TWO_DEVICES, PROGRAMS
from tests.conformance.start import STOP
from tests.migration.moves import moved, resumed, suspended
from xmigd.demo.node import Node

EVERY = 6  # lines, at least
MOST = 36  # moves and suspensions of a program, about


@pytest.fixture(scope="module")
def daemon(native_dir: Path) -> Iterator[Node]:
    """One for all programs."""
    with harness.own_node(native_dir) as node:
        yield node


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(daemon: Node, kernels: Path, name: str) -> None:
    path = harness.CONFORMANCE / f"{name}.py"
    here, there = ("cpu:0,1", "cpu:1,0") if name in OF_TWO_DEVICES else ("cpu:0", "cpu:1")
    undisturbed = harness.run(daemon, path, kernels=kernels, device=here)
    stopping = {"XMIG_TEST_STOP_EVERY": str(max(EVERY, len(path.read_text().splitlines()) // MOST))}
    program = harness.start(daemon, path, kernels=kernels, device=here, environment=stopping)
    reported, count = "", 0
    harness.go(program)
    assert program.process.stdout is not None
    for line in program.process.stdout:
        if line != f"{STOP}\n":
            reported += line
            continue
        here, there = there, here
        if count % 3 != 1:
            moved(program, here)
        else:
            suspended(program)
            resumed(program, here)
        count += 1
        harness.go(program)
    assert harness.output(program) == ""
    assert reported == undisturbed
    assert count >= 2  # moved, and suspended
    assert program.recoveries() == []
    program.until("ended")
