"""A driver that a GPU server cannot use: the program's first call that needs it gets the error that it gets natively,
and one line of the log says why. The driver is a stand-in; the server and its cuda device are the real ones."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import table

from tests.forked import Node
from tests.harness import COMPILER

FUNCTIONS = dict.fromkeys(
    [*table.SERVER_ONLY, *(f.name for f in table.FUNCTIONS if f.call != "local" and f.server == "generated")]
)
START = "import ctypes; driver = ctypes.CDLL('libcuda.so.1'); print(driver.cuInit(0), driver.cuInit(0))"
OPEN = f"""
{START}
context, name = ctypes.c_void_p(), (ctypes.c_char * 8)()
retain = lambda: driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
print(driver.cuDeviceGetName(name, 8, 0), retain(), retain())
"""


def build_driver(folder: Path, *, without: str = "", fails: dict[str, int]) -> None:
    """A libcuda.so.1 with one GPU, all of whose functions succeed but these."""
    lines = ["#include <string.h>"]
    for name in dict.fromkeys((*FUNCTIONS, "cuCtxGetCurrent")):
        if name == without:
            continue
        does = "*(int*)first = 1;" if name == "cuDeviceGetCount" else ""
        lines.append(f"int {name}(void* first, ...) {{ {does} return {fails.get(name, 0)}; }}")
    source = folder / "driver.c"
    source.write_text("\n".join(lines))
    library = folder / "libcuda.so.1"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-w", source, "-o", library], check=True)


@pytest.mark.parametrize(
    ("without", "fails", "error", "reported"),
    [
        ("cuFuncGetParamInfo", {}, 803, "it lacks cuFuncGetParamInfo; xMIG needs one for CUDA 12.4 or newer"),
        ("", {"cuInit": 100}, 100, "the driver finds no GPU"),
    ],
    ids=["older than 12.4", "no GPU"],
)
def test_a_driver_that_does_not_start(
    native_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str, fails: dict[str, int], error: int,
    reported: str,
) -> None:  # fmt: skip
    build_driver(tmp_path, without=without, fails=fails)
    monkeypatch.setenv("LD_LIBRARY_PATH", os.pathsep.join([str(tmp_path), os.environ.get("LD_LIBRARY_PATH", "")]))
    with tempfile.TemporaryDirectory(prefix="xmig-") as folder:
        with Node(Path(folder), native_dir=native_dir, devices="cuda:0", port=-1) as node:
            program = node.program([sys.executable, "-c", START], stderr=subprocess.PIPE)
            output, errors = program.process.communicate(timeout=60)
            lines = program.lines()
        assert (output, errors) == (f"{error} {error}\n", "")
        # Each time that it asks: a line of its job's log, and one that its job is refused in the daemon's.
        assert len(lines) == 2
        assert all(reported in line for line in lines), lines
        log = [line for line in (Path(folder) / "xmigd.log").read_text().splitlines() if "program refused" in line]
        assert len(log) == 2, log
        assert all(reported in line and f"error={error} " in line for line in log), log


@pytest.mark.parametrize(
    ("fails", "error", "reported"),
    [
        (
            "cuDevicePrimaryCtxRetain",
            46,
            "Retain failed with CUDA error 46: the GPU is in exclusive mode and another process",
        ),
        ("cuDevicePrimaryCtxRetain", 2, "Retain failed with CUDA error 2: the GPU has no memory left for a context"),
        ("cuModuleLoadData", 2, "kernels failed with CUDA error 2: the GPU has no memory left for a context"),
    ],
    ids=["exclusive mode", "no memory", "no memory after the context"],
)
def test_a_context_that_cannot_be_made(
    native_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, error: int, reported: str
) -> None:
    """Until then nothing is opened: whatever else the program asks is answered."""
    build_driver(tmp_path, fails={fails: error})
    monkeypatch.setenv("LD_LIBRARY_PATH", os.pathsep.join([str(tmp_path), os.environ.get("LD_LIBRARY_PATH", "")]))
    with tempfile.TemporaryDirectory(prefix="xmig-") as folder:
        with Node(Path(folder), native_dir=native_dir, devices="cuda:0", port=-1) as node:
            program = node.program([sys.executable, "-c", OPEN], stderr=subprocess.PIPE)
            output, errors = program.process.communicate(timeout=60)
            lines = program.lines("server")
        assert (output, errors) == (f"0 0\n0 {error} {error}\n", "")
        # Each time that it is requested.
        assert len(lines) == 2
        assert all(reported in line for line in lines), lines
