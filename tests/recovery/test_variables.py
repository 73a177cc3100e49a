"""Variables of modules for which the program never asks, on a device that places them itself as a GPU's driver does.

The client and the daemon are what they always are.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import harness
from tests.migration.moves import moved, other, resumed, suspended
from xmigd.demo.node import Node, Program
from xmigd.native import SERVER

PLACING = Path(__file__).parents[2] / "build" / "native" / "tests" / "placing" / SERVER
PROGRAM = Path(__file__).parent / "programs" / "counting.py"
FIRST = 5  # what the variable is at first


@pytest.fixture(scope="module")
def daemon(native_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Its servers are those of the native tests."""
    if not PLACING.exists():
        pytest.skip(f"{PLACING} is not there: make native-test builds it")
    folder = tmp_path_factory.mktemp("native")
    shutil.copytree(native_dir, folder, dirs_exist_ok=True)
    shutil.copy(PLACING, folder / SERVER)
    with harness.own_node(folder) as node:
        yield node


def killed(program: Program) -> None:
    before = harness.kill_server(program)
    harness.wait_until(lambda: (program.info() or {})["server_pid"] not in (None, before), "another server has the job")


def injected(program: Program) -> None:
    before = program.until("running")["server_pid"]
    program.inject("fault", point="record", error=700)

    def recovered() -> bool:
        harness.steps(program, 0)  # the server may hear of the fault after the first of its records
        return (program.info() or {})["server_pid"] not in (None, before)

    harness.wait_until(recovered, "another server has the job")


def away_and_back(program: Program) -> None:
    here = other(program)
    suspended(program)
    resumed(program, here)


@pytest.mark.parametrize(
    "disturb", [killed, injected, moved, away_and_back], ids=["kill", "fault", "move", "suspension"]
)
def test_counts_on(daemon: Node, kernels: Path, disturb: Callable[[Program], object]) -> None:
    program = harness.start(daemon, PROGRAM, kernels=kernels)
    harness.go(program)
    count = FIRST
    for launches in (3, 200, 1, 50, 7):
        count += launches
        assert harness.steps(program, launches) == f"{count}\n"
        disturb(program)
        count += 1
        assert harness.steps(program, 1) == f"{count}\n"
    assert harness.output(program) == ""


@pytest.mark.parametrize("name", ["launches", "libraries", "graphs"])
def test_conformance_programs(daemon: Node, native_dir: Path, kernels: Path, name: str) -> None:
    """Others are as on any device, also where they ask for variables by name."""
    path = harness.CONFORMANCE / f"{name}.py"
    with harness.own_node(native_dir) as plain:
        expected = harness.run(plain, path, kernels=kernels)
    assert harness.run(daemon, path, kernels=kernels) == expected
