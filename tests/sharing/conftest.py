"""A node whose jobs share its devices, and programs for it."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.daemon.conftest import make_node, peer_native
from tests.recovery.conftest import kernels
from xmigd.demo.node import Node, Program

__all__ = [
    "MIB",
    "PROGRAMS",
    "Starter",
    "answer",
    "ask",
    "has_answered",
    "kernels",
    "make_node",
    "peer_native",
    "sharing",
]

MIB = 1 << 20
PROGRAMS = Path(__file__).parent / "programs"
Starter = Callable[..., Program]


@pytest.fixture(scope="module")
def daemon(native_dir: Path) -> Iterator[Node]:
    with harness.own_node(native_dir, device_memory=512 * MIB, port=-1, best_effort_wait=5.0) as node:
        yield node


@pytest.fixture
def start(daemon: Node, kernels: Path) -> Starter:
    """Start a program of ``programs``, with what its job is to have; it begins at once and answers ``ask``."""

    def starter(name: str, *arguments: object, **request: Any) -> Program:
        device = request.pop("device", "cpu:0")
        started = harness.start(
            daemon, PROGRAMS / f"{name}.py", *arguments, kernels=kernels, device=device, request=request
        )
        harness.go(started)
        return started

    return starter


def ask(program: Program, words: object) -> None:
    assert program.process.stdin is not None
    program.process.stdin.write(f"{words}\n")
    program.process.stdin.flush()


def answer(program: Program) -> str:
    """Its next line. Fails when it has ended."""
    assert program.process.stdout is not None
    line: str = program.process.stdout.readline()
    assert line, f"it has ended: {program.process.communicate()}"
    return line.strip()


def has_answered(program: Program) -> bool:
    """Whether ``answer`` returns at once."""
    assert program.process.stdout is not None
    return bool(select.select([program.process.stdout], [], [], 0)[0])


def sharing(program: Program) -> dict[str, Any]:
    """What the daemon says of how its only process shares its device."""
    of_job = program.node.client.get(f"/v1/jobs/{program.job}/sharing")
    (process,) = of_job["processes"]
    found: dict[str, Any] = process
    return found
