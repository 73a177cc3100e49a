"""The driver under its other names is the shim, and nothing else changes for who loads a library."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import COMPILER
from xmigd.demo.node import Node
from xmigd.native import LOADER, find_shims

# Which file has the function, and is it the driver's own?
PROGRAM = """
import ctypes, json, os, sys
def who(library, function):
    address = ctypes.cast(getattr(library, function), ctypes.c_void_p).value
    for line in open("/proc/self/maps"):
        first, last = (int(each, 16) for each in line.split()[0].split("-"))
        if first <= address < last:
            return line.split()[-1]
folder = sys.argv[1]
names = ["libcuda.so.1", "libcuda.so", "libcuda.so.550.54.15", "vendor.so"]
print(json.dumps({
    "cuda": [who(ctypes.CDLL(name if "/" in name else f"{where}{name}"), "cuInit")
             for where in ("", folder + "/") for name in names if where or name in ("libcuda.so.1", "libcuda.so")],
    "nvml": [who(ctypes.CDLL(f"{where}{name}"), "nvmlInit_v2")
             for where in ("", folder + "/") for name in ("libnvidia-ml.so.1", "libnvidia-ml.so")],
}))
"""


def test_every_name_is_the_shim(node: Node, native_dir: Path, genuine: Path) -> None:
    """Also where the driver's folder is searched for plain names."""
    shims = [str(shim.resolve()) for shim in find_shims(native_dir)[:2]]
    for path in ("", str(genuine)):
        program = node.program([sys.executable, "-c", PROGRAM, genuine], environment={"LD_LIBRARY_PATH": path})
        code, out = program.finish()
        assert code == 0
        found = json.loads(out)
        assert {str(Path(each).resolve()) for each in found["cuda"]} == {shims[0]}
        assert {str(Path(each).resolve()) for each in found["nvml"]} == {shims[1]}
        assert (len(found["cuda"]), len(found["nvml"])) == (6, 4)


NAMESPACE = """
import ctypes, sys
libc = ctypes.CDLL(None)
libc.dlmopen.restype = ctypes.c_void_p
libc.dlmopen.argtypes = [ctypes.c_long, ctypes.c_char_p, ctypes.c_int]
handle = libc.dlmopen(-1, sys.argv[1].encode(), 2)
library = ctypes.CDLL("driver", handle=handle)
print(hasattr(library, "xmigShim"), hasattr(library, "genuine"))
other = libc.dlmopen(-1, b"libm.so.6", 2)
print(bool(other), ctypes.CDLL("m", handle=other)._handle != ctypes.CDLL("libm.so.6")._handle)
"""


def test_a_namespace_has_the_same_shim(node: Node, genuine: Path) -> None:
    """A second one would want the addresses of the first. Other libraries go where they are queried to."""
    code, out = node.program([sys.executable, "-c", NAMESPACE, genuine / "libcuda.so.1"]).finish()
    assert (code, out) == (0, "True False\nTrue True\n")


def test_find_library(node: Node) -> None:
    """What libraries ask that look for the driver before they load it. It needs a linker, as it does natively."""
    code = "import ctypes.util; print(ctypes.util.find_library('cuda'), ctypes.util.find_library('nvidia-ml'))"
    if shutil.which("ld") is None or shutil.which("objdump") is None:
        pytest.skip("there is no linker (binutils): find_library finds what ldconfig lists, and here that is no driver")
    assert node.program([sys.executable, "-c", code]).finish() == (0, "libcuda.so.1 libnvidia-ml.so.1\n")


LIBRARY = """
#include <dlfcn.h>
void* open_it(const char* name) { return dlopen(name, RTLD_NOW); }
void* open_in(long space, const char* name) { return dlmopen(space, name, RTLD_NOW); }
"""


@pytest.mark.parametrize("tag", ["--enable-new-dtags", "--disable-new-dtags"], ids=["RUNPATH", "RPATH"])
def test_who_calls_decides_where_is_searched(node: Node, tmp_path: Path, tag: str) -> None:
    """A library's own search path holds for what it opens itself."""
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    inner.mkdir()
    outer.mkdir()
    (tmp_path / "plugin.c").write_text("int plugin(void) { return 7; }")
    (tmp_path / "opener.c").write_text("#define _GNU_SOURCE\n" + LIBRARY)
    build = [COMPILER, "-shared", "-fPIC"]
    subprocess.run([*build, tmp_path / "plugin.c", "-o", inner / "libplugin-of-test.so"], check=True)
    subprocess.run(
        [*build, tmp_path / "opener.c", "-o", outer / "libopener.so", f"-Wl,{tag}", "-Wl,-rpath,$ORIGIN/../inner"],
        check=True,
    )
    program = f"""
import ctypes
opener = ctypes.CDLL({str(outer / "libopener.so")!r})
for function in ("open_it", "open_in"):
    getattr(opener, function).restype = ctypes.c_void_p
handles = [opener.open_it(b"libplugin-of-test.so"), opener.open_in(ctypes.c_long(0), b"libplugin-of-test.so")]
print([ctypes.CDLL("plugin", handle=each).plugin() for each in handles])
try:
    ctypes.CDLL("libplugin-of-another-test.so")
except OSError as error:
    print(error)
"""
    code, out = node.program([sys.executable, "-c", program]).finish()
    why = "libplugin-of-another-test.so: cannot open shared object file: No such file or directory"
    assert (code, out) == (0, f"[7, 7]\n{why}\n")


def test_native_without_a_daemon(native_dir: Path, genuine: Path) -> None:
    """XMIG_WITHOUT_DAEMON=native: the shim itself gets the genuine driver, by its path."""
    shims = find_shims(native_dir)
    environment = os.environ | {
        "LD_PRELOAD": ":".join(map(str, shims)), "XMIG_WITHOUT_DAEMON": "native", "XMIG_SOCKET": "/no/such/socket",
        "XMIG_NATIVE_LIBCUDA": str(genuine / "libcuda.so.1"),
    }  # fmt: skip
    code = """
import ctypes
print(ctypes.CDLL("libcuda.so").cuInit(0), "libcuda.so.550.54.15" in open("/proc/self/maps").read())
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("0 True\n", "")


def test_what_is_preloaded_shows_nothing_else(native_dir: Path) -> None:
    """Any other symbol would take the place of the program's."""
    loader = next(shim for shim in find_shims(native_dir) if shim.name == LOADER)
    symbols = subprocess.run(["nm", "-D", "--defined-only", loader], capture_output=True, text=True, check=True).stdout
    assert {line.split()[-1].partition("@")[0] for line in symbols.splitlines()} == {"dlopen", "dlmopen"}
    needed = subprocess.run(["readelf", "-d", loader], capture_output=True, text=True, check=True).stdout
    assert "libstdc++" not in needed
