"""Which functions `libnccl.so.2` has, compared with those that programs ask for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import harness
from tests.harness import ROOT
from xmigd.demo.node import Node
from xmigd.native import NCCL_SHIM, find_shims

sys.path.insert(0, str(ROOT / "shim" / "api"))
from nccl_table import FUNCTIONS, INTERNAL


def names(text: str) -> set[str]:
    return set(text.split())


# What libtorch_cuda.so of PyTorch 2.11+cu130 needs.
PYTORCH = names(
    """
    ncclAllGather ncclAllReduce ncclAlltoAll ncclBcast ncclBroadcast ncclCommAbort ncclCommCount ncclCommDeregister
    ncclCommDestroy ncclCommFinalize ncclCommGetAsyncError ncclCommInitAll ncclCommInitRank ncclCommInitRankConfig
    ncclCommInitRankScalable ncclCommRegister ncclCommShrink ncclCommSplit ncclCommUserRank ncclCommWindowDeregister
    ncclCommWindowRegister ncclDevCommCreate ncclDevCommDestroy ncclGetErrorString ncclGetLastError ncclGetUniqueId
    ncclGetVersion ncclGroupEnd ncclGroupSimulateEnd ncclGroupStart ncclMemAlloc ncclMemFree ncclRecv
    ncclRedOpCreatePreMulSum ncclRedOpDestroy ncclReduce ncclReduceScatter ncclSend
    """
)
# What CuPy 14's nccl module needs.
CUPY = names(
    """
    ncclAllGather ncclAllReduce ncclBcast ncclBroadcast ncclCommAbort ncclCommCount ncclCommCuDevice ncclCommDestroy
    ncclCommGetAsyncError ncclCommInitAll ncclCommInitRankConfig ncclCommSplit ncclCommUserRank ncclGetErrorString
    ncclGetUniqueId ncclGetVersion ncclGroupEnd ncclGroupStart ncclRecv ncclReduce ncclReduceScatter ncclSend
    """
)
TABLE = {function.name for function in FUNCTIONS}


def symbols(library: Path, *options: str) -> set[str]:
    shown = subprocess.run(["nm", "-D", *options, library], check=True, capture_output=True, text=True).stdout
    return {name for line in shown.splitlines() if re.fullmatch(r"p?nccl[A-Z]\w*", name := line.split()[-1])}


@pytest.fixture
def library(native_dir: Path) -> Path:
    return next(shim for shim in find_shims(native_dir) if shim.name == NCCL_SHIM)


def test_frameworks_find_what_they_need(library: Path) -> None:
    assert len(PYTORCH) == 38
    assert symbols(library, "--defined-only") >= PYTORCH | CUPY
    refused = {function.name for function in FUNCTIONS if function.call == "refused"}
    assert (PYTORCH | CUPY) & refused == {"ncclCommShrink", "ncclDevCommCreate", "ncclDevCommDestroy"}


def test_the_table_is_what_the_library_has(library: Path) -> None:
    assert symbols(library, "--defined-only") == TABLE | {f"p{name}" for name in TABLE}
    assert not set(INTERNAL) & TABLE


def test_nothing_is_missing_that_the_installed_frameworks_want(library: Path) -> None:
    """Those of the tests with frameworks, where they are installed: they may be newer than the lists above."""
    packages = sorted((ROOT / ".venv-frameworks").glob("lib/python3*/site-packages"))
    torch = [path for folder in packages for path in folder.glob("torch/lib/libtorch_cuda.so")]
    if not torch:
        pytest.skip("PyTorch for CUDA is not installed (make frameworks brings it)")
    assert symbols(torch[0], "--undefined-only") <= symbols(library, "--defined-only")
    genuine = next(packages[0].glob("nvidia/nccl/lib/libnccl.so.2"))
    ours = symbols(library, "--defined-only") | set(INTERNAL)
    assert {name for name in symbols(genuine, "--defined-only") if not name.startswith("p")} <= ours


GENUINE = "int ncclGetVersion(int* version) { *version = 1; return 0; }\n"
OPENS = """
import ctypes, sys
for name in sys.argv[1:]:
    version = ctypes.c_int()
    ctypes.CDLL(name).ncclGetVersion(ctypes.byref(version))
    print(version.value)
"""


def test_every_name_is_ours(node: Node, tmp_path: Path) -> None:
    """Also a full path, as JAX and CuPy open it, and a link to such a file."""
    (tmp_path / "genuine.c").write_text(GENUINE)
    library = tmp_path / "libnccl.so.2"
    build: list[str | Path] = [
        harness.COMPILER,
        "-shared",
        "-fPIC",
        "-Wl,-soname,libnccl.so.2",
        tmp_path / "genuine.c",
        "-o",
        library,
    ]
    subprocess.run(build, check=True)
    (tmp_path / "linked.so").symlink_to(library)
    names: list[str | Path] = ["libnccl.so.2", library, tmp_path / "linked.so"]
    program = node.program([sys.executable, "-c", OPENS, *names])
    assert program.finish() == (0, "22809\n22809\n22809\n")
