"""Frameworks as PyPI has them, on the null device: an H200's whole interface, whose kernels do nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import forked
from tests.frameworks.requested import called, not_covered
from tests.gpu.bench import Bench
from xmigd.demo.node import Node


@pytest.fixture
def bench(frameworks: Path, native_dir: Path, tmp_path: Path) -> Iterator[Bench]:
    """Runs the programs of `make gpu`, tiny. Under `pytest --basetemp` what they reported stays there.

    Fails a test whose programs ask for a function that is not covered, and names it."""
    requested = tmp_path / "requested"
    end = time.monotonic() + 780
    environment = {"XMIG_REQUESTED": str(requested)}
    yield Bench(
        tmp_path / "logs", tmp_path, python=str(frameworks), rehearsal=True, end=end, environment=environment,
        make_node=forked.Node,
    )  # fmt: skip
    assert "cuInit" in called(requested)
    assert not_covered(requested) == []


@pytest.fixture
def node(bench: Bench) -> Iterator[Node]:
    with bench.node() as node:
        yield node
