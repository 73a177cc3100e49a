"""A genuine driver that is a stand-in: a library with the driver's names in which two functions answer."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import harness
from xmigd.demo.node import Node

DRIVER = """
int cuInit(unsigned flags) { return 0; }
int genuine(void) { return 42; }
int nvmlInit_v2(void) { return 0; }
"""


@pytest.fixture(scope="session")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a driver's package fills it: one file with the version, and links to it."""
    folder = tmp_path_factory.mktemp("driver")
    source = folder / "driver.c"
    source.write_text(DRIVER)
    for name in ("libcuda", "libnvidia-ml"):
        library = folder / f"{name}.so.550.54.15"
        subprocess.run(
            [harness.COMPILER, "-shared", "-fPIC", f"-Wl,-soname,{name}.so.1", source, "-o", library], check=True
        )
        (folder / f"{name}.so.1").symlink_to(library.name)
        (folder / f"{name}.so").symlink_to(f"{name}.so.1")
    (folder / "vendor.so").symlink_to(folder / "libcuda.so")
    return folder


@pytest.fixture(scope="module")
def node(native_dir: Path) -> Iterator[Node]:
    with harness.own_node(native_dir, devices="cpu:0", port=-1) as node:
        yield node
