"""docs/coverage.md is what the API table says; what a program asks for in vain is found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.frameworks.requested import called, not_covered
from tests.harness import ROOT
from xmigd.demo.node import Node

API = ROOT / "shim" / "api"


def generated(folder: Path) -> str:
    include = subprocess.run([sys.executable, API / "find_cuda.py"], capture_output=True, text=True, check=True).stdout
    options = ["--include", include.strip(), "--out", str(folder), "--compiler", os.environ.get("CC", "cc")]
    subprocess.run([sys.executable, API / "generate.py", *options], check=True)
    return (folder / "coverage.md").read_text()


def test_the_document_is_up_to_date(tmp_path: Path) -> None:
    """`make coverage` writes it."""
    assert (ROOT / "docs" / "coverage.md").read_text() == generated(tmp_path)


PROGRAM = """
import ctypes
driver = ctypes.CDLL("libcuda.so.1")
pointer, status, uuid = ctypes.c_void_p(), ctypes.c_int(), (ctypes.c_ubyte * 16)(*range(16))
assert driver.cuInit(0) == 0
%s
"""


@pytest.mark.parametrize(
    ("asks", "found"),
    [
        ("assert driver.cuMemAllocManaged(ctypes.byref(pointer), 64, 1) == 801", ["refused cuMemAllocManaged"]),
        (
            "for name in (b'cuNew', b'cuGLInit', b'cuArrayCreate'):\n"
            "    assert driver.cuGetProcAddress_v2(name, ctypes.byref(pointer), 13000, ctypes.c_uint64(0), None) == 0",
            ["missing cuNew"],
        ),
        (
            "assert driver.cuGetExportTable(ctypes.byref(pointer), uuid) == 500",
            ["table 00010203-0405-0607-0809-0a0b0c0d0e0f"],
        ),
        ("import os\nif os.fork() == 0:\n    driver.cuDriverGetVersion(ctypes.byref(status))\nos.wait()", []),
    ],
    ids=["call", "look-up", "table", "nothing"],
)
def test_what_is_missed_is_named(daemon: Node, tmp_path: Path, asks: str, found: list[str]) -> None:
    requested = tmp_path / "requested"
    program = daemon.program([sys.executable, "-c", PROGRAM % asks], environment={"XMIG_REQUESTED": str(requested)})
    assert program.process.wait() == 0
    assert not_covered(requested) == found
    assert "cuInit" in called(requested)
