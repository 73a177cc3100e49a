"""One daemon for all conformance programs of a worker."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import forked, harness
from xmigd.demo.node import Node


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.compile_kernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="session")
def node() -> Iterator[Node]:
    # Not tmp_path: a socket's path has at most 107 bytes.
    with (
        tempfile.TemporaryDirectory(prefix="xmig-test-") as folder,
        forked.Node(Path(folder), devices="cpu:0,cpu:1", device_memory=1 << 30) as node,
    ):
        yield node


@pytest.fixture(scope="module")
def null_node(native_dir: Path) -> Iterator[Node]:
    """A daemon with a null device."""
    with harness.own_node(native_dir, devices="null:0", device_memory=0, port=-1) as node:
        yield node
