"""A driver that a GPU server cannot use: the program's first call gets the error that it gets natively, and one line of
the log says why. The driver is a stand-in; the server and its cuda device are the real ones."""

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
PROGRAM = "import ctypes; driver = ctypes.CDLL('libcuda.so.1'); print(driver.cuInit(0), driver.cuInit(0))"


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
        ("", {"cuDevicePrimaryCtxRetain": 46}, 46, "the GPU is in exclusive mode and another process has it"),
        ("", {"cuDevicePrimaryCtxRetain": 2}, 2, "the GPU has no memory left for a context"),
        ("", {"cuInit": 100}, 100, "the driver finds no GPU"),
    ],
    ids=["older than 12.4", "exclusive mode", "no memory", "no GPU"],
)
def test_the_program_is_reported(
    native_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str, fails: dict[str, int], error: int,
    reported: str,
) -> None:  # fmt: skip
    build_driver(tmp_path, without=without, fails=fails)
    monkeypatch.setenv("LD_LIBRARY_PATH", os.pathsep.join([str(tmp_path), os.environ.get("LD_LIBRARY_PATH", "")]))
    with tempfile.TemporaryDirectory(prefix="xmig-") as folder:
        with Node(Path(folder), native_dir=native_dir, devices="cuda:0", port=-1) as node:
            program = node.program([sys.executable, "-c", PROGRAM], stderr=subprocess.PIPE)
            output, errors = program.process.communicate(timeout=60)
            lines = program.lines()
        assert (output, errors) == (f"{error} {error}\n", "")
        # Each time that it asks: a line of its job's log, and one that its job is refused in the daemon's.
        assert len(lines) == 2
        assert all(reported in line for line in lines), lines
        log = [line for line in (Path(folder) / "xmigd.log").read_text().splitlines() if "program refused" in line]
        assert len(log) == 2, log
        assert all(reported in line and f"error={error} " in line for line in log), log
