"""Programs scattered over cpu devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.recovery.conftest import PROGRAMS, kernels
from xmigd.demo.node import Node, Program

__all__ = ["kernels", "node", "scatter"]

DEVICES = "cpu:0,cpu:1,cpu:2"
Scatter = Callable[..., list[Program]]


@pytest.fixture
def node(native_dir: Path) -> Iterator[Node]:
    with harness.own_node(native_dir, devices=DEVICES, port=-1) as node:
        yield node


@pytest.fixture
def scatter(node: Node, kernels: Path) -> Scatter:
    """`stepwise` on each of these devices; each has done some steps, so that it has memory."""

    def begin(*devices: str) -> list[Program]:
        programs = [harness.start(node, PROGRAMS / "stepwise.py", kernels=kernels, device=each) for each in devices]
        for program in programs:
            harness.go(program)
            harness.steps(program, 50)
        return programs

    return begin


def make_plan(node: Node, **request: Any) -> dict[str, Any]:
    """Busy shares are not known so early: none is assumed."""
    made: dict[str, Any] = node.client.post("/v1/consolidation-plans", {"assumed_busy_share": 0.0} | request)
    return made


def make_spread(node: Node, programs: list[Program], share: float = 0.3) -> dict[str, Any]:
    """Of programs that count as equally busy: what has been measured of them depends on how long they waited."""
    return make_plan(node, objective="balance", busy_shares={str(program.job): share for program in programs})


def begin_apply(node: Node, plan: dict[str, Any], guard_seconds: float = 0) -> dict[str, Any]:
    """The operation."""
    path = f"/v1/consolidation-plans/{plan['id']}/apply"
    operation: dict[str, Any] = node.client.post(path, {"guard_seconds": guard_seconds})
    return operation


def device_of(program: Program) -> str:
    found = program.info()
    assert found is not None
    return str(found["device"])
