"""Programs of several ranks on cpu devices."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import harness
from tests.collectives.nodes import PROGRAMS as PROGRAMS
from tests.collectives.nodes import RankNode, all_started, cluster
from xmigd.demo.node import Node, Program

Launch = Callable[..., Program]


@pytest.fixture(scope="module")
def node(native_dir: Path) -> Iterator[Node]:
    """Two devices: four ranks share them."""
    with harness.own_node(native_dir, devices="cpu:0,cpu:1", port=-1) as node:
        yield node


@pytest.fixture
def launch(node: Node, tmp_path: Path) -> Launch:
    """Start a program's ranks as one job."""

    def starter(
        name: str, ranks: int, *arguments: object, device: str | None = None, hang_timeout: float | None = None,
        **environment: str,
    ) -> Program:  # fmt: skip
        program = PROGRAMS / f"{name}.py"
        command: list[str | Path] = [
            sys.executable,
            PROGRAMS / "launch.py",
            str(ranks),
            tmp_path,
            program,
            *map(str, arguments),
        ]
        return node.program(
            command, name=name, device=device, hang_timeout=hang_timeout, environment=environment
        )  # fmt: skip

    return starter


@pytest.fixture(scope="module")
def pair(native_dir: Path) -> Iterator[list[RankNode]]:
    with cluster(native_dir, 2) as made:
        yield made


@pytest.fixture
def two(pair: list[RankNode]) -> list[RankNode]:
    """Nodes that reach each other, whatever the test before has done to them."""
    for one in all_started(pair):
        one.until("b" if one.name == "a" else "a", "connected")
    return pair


@pytest.fixture(autouse=True)
def ends_with_its_test(tmp_path: Path) -> Iterator[None]:
    """Also if that has failed: the next one has the machine for itself."""
    yield
    enough(tmp_path)


def enough(folder: Path) -> None:
    """A program that runs for as long as it is needed (programs/nccl.py, `steps`) may end."""
    (folder / "enough").touch()


def lines_of(program: Program, timeout: float = 300) -> list[str]:
    """What its ranks printed. Fails with it if one did not end well."""
    try:
        out, _ = program.process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        found = program.node.client.get("/v1/processes", job=program.job)
        raise AssertionError("they have not ended: " + "\n".join(map(str, [*found, *program.lines()]))) from None
    assert program.process.returncode == 0, out[-6000:] + "\n".join(map(str, program.lines()))
    return [line for line in out.splitlines() if " ended with " not in line]
