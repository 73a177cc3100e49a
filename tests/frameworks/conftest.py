"""Frameworks as PyPI has them, on the null device: an H200's whole interface, whose kernels do nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.bench import Bench
from xmigd.demo.node import Node


@pytest.fixture
def bench(frameworks: Path, native_dir: Path, tmp_path: Path) -> Bench:
    """Runs the programs of `make gpu`, tiny. Under `pytest --basetemp` what they said stays there."""
    end = time.monotonic() + 170
    return Bench(tmp_path / "logs", tmp_path, python=str(frameworks), rehearsal=True, end=end)


@pytest.fixture
def node(bench: Bench) -> Iterator[Node]:
    with bench.node() as node:
        yield node
