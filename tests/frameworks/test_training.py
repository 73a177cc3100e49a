"""PyTorch trains and generates on the null device: eagerly, compiled, in graphs."""

from __future__ import annotations

import pytest

from tests.frameworks.check import check
from tests.gpu.bench import Bench
from tests.gpu.cases import RESULTS, TIMED, Case
from xmigd.demo.node import Node

CASES = [*TIMED, *(case for case in RESULTS if case.name in ("graphed-callables", "compile-graphs"))]


# Two runs that import a framework, on a machine that runs other tests beside.
pytestmark = pytest.mark.timeout(800)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_across_kills(bench: Bench, node: Node, case: Case) -> None:
    result = check(bench, node, case)
    assert len(result["losses" if "losses" in result else "tokens"]) > 0
