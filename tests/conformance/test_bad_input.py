"""What a program does wrong: the error that it gets natively, from the same call, and one line that says what it was.

That native calls return the same is shown on a GPU, by the part `mistakes` of `make gpu`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from xmigd.demo.node import Node

# Each mistake three times. The results as JSON: what every call returned.
PROGRAM = """
import ctypes, json
driver = ctypes.CDLL("libcuda.so.1")
context, pointer, module, function = (ctypes.c_void_p() for _ in range(4))
assert driver.cuInit(0) == 0
assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == driver.cuCtxSetCurrent(context) == 0
def launch(grid, block, shared):
    return driver.cuLaunchKernel(function, grid, 1, 1, block, 1, 1, shared, None, None, None)
%s
print(json.dumps([driver.%s for _ in range(3)]))
# Nothing of it matters to what comes after it.
assert driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(4096)) == driver.cuCtxSynchronize() == 0
"""
PTX = r"""
ptx = b".version 8.0\\n.target sm_90\\n.visible .entry small() .maxntid 64, 1, 1 { ret; }\\0"
assert driver.cuModuleLoadData(ctypes.byref(module), ptx) == 0
assert driver.cuModuleGetFunction(ctypes.byref(function), module, b"small") == 0
driver.launch = launch
"""

COOPERATIVE = (
    PTX
    + r"""
driver.launch = lambda grid: driver.cuLaunchCooperativeKernel(function, grid, 1, 1, 64, 1, 1, 0, None, None)
assert driver.launch(132 * 32) == driver.launch(132 * 32) == 0
"""
)
CLUSTER = (
    PTX
    + r"""
class Config(ctypes.Structure):
    _fields_ = [("shape", ctypes.c_uint * 7), ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p),
                ("count", ctypes.c_uint)]
def launch(grid, cluster):
    attribute = (ctypes.c_uint * 18)(4, 0, cluster, 1, 1)  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    config = Config((ctypes.c_uint * 7)(grid, 1, 1, 64, 1, 1, 0), None, ctypes.addressof(attribute), 1)
    return driver.cuLaunchKernelEx(ctypes.byref(config), function, None, None)
driver.launch = launch
assert launch(8, 4) == launch(8, 4) == 0
"""
)

MISTAKES = [
    ("memory", "", "cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(1 << 38))", 2,
     "no device memory for 274877906944 bytes: CUDA error 2"),
    ("more than addresses", "", "cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(1 << 50))", 2,
     "no device memory for 1125899906842624 bytes: CUDA error 2"),
    ("no image", "", "cuModuleLoadData(ctypes.byref(module), b'nothing at all' + bytes(64))", 200,
     "a module cannot be loaded: it is no fat binary, no cubin and no PTX, or damaged: CUDA error 200"),
    ("PTX", "", "cuModuleLoadData(ctypes.byref(module), b'.version 8.0\\n.entry f(.param .align 3 .b8 x[4]) { ret; }')",
     218, "a module of 57 bytes cannot be loaded: CUDA error 218"),
    ("function", "", "cuMemAllocManaged(ctypes.byref(pointer), ctypes.c_size_t(64), 1)", 801,
     "cuMemAllocManaged is not supported: the call returned CUDA_ERROR_NOT_SUPPORTED"),
    ("threads", PTX, "launch(1, 65, 0)", 1,
     "kernel small cannot be launched with 1 x 1 x 1 blocks of 65 x 1 x 1 threads and 0 bytes of dynamic shared "
     "memory: CUDA error 1"),
    ("no blocks", PTX, "launch(0, 1, 0)", 1,
     "kernel small cannot be launched with 0 x 1 x 1 blocks of 1 x 1 x 1 threads and 0 bytes of dynamic shared "
     "memory: CUDA error 1"),
    ("shared memory", PTX, "launch(1, 1, 1 << 20)", 1,
     "kernel small cannot be launched with 1 x 1 x 1 blocks of 1 x 1 x 1 threads and 1048576 bytes of dynamic shared "
     "memory: CUDA error 1"),
    ("blocks that do not run at a time", COOPERATIVE, "launch(132 * 32 + 1)", 720,
     "kernel small cannot be launched with 4225 x 1 x 1 blocks of 64 x 1 x 1 threads and 0 bytes of dynamic shared "
     "memory: CUDA error 720"),
    ("clusters that do not fill the grid", CLUSTER, "launch(9, 4)", 912,
     "kernel small cannot be launched with 9 x 1 x 1 blocks of 64 x 1 x 1 threads and 0 bytes of dynamic shared "
     "memory: CUDA error 912"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("visible", "code"), [("", 100), ("-1", 100), ("NoDevFiles", 100), ("0", 0), ("GPU-0", 0), (None, 0)]
)
def test_a_program_hides_its_devices(null_node: Node, visible: str | None, code: int) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    requested = "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"
    program = null_node.program([sys.executable, "-c", requested], environment=environment)
    assert program.process.communicate(timeout=60)[0] == f"{code}\n"
    assert (program.info() is not None) == (code == 0)


@pytest.mark.parametrize(("setup", "call", "error", "line"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_reported_once_and_returned_each_time(null_node: Node, setup: str, call: str, error: int, line: str) -> None:
    program = null_node.program([sys.executable, "-c", PROGRAM % (setup, call)], stderr=subprocess.PIPE)
    output, reported = program.process.communicate(timeout=60)
    assert program.process.returncode == 0, reported
    assert json.loads(output) == [error] * 3
    assert reported == ""
    assert program.lines() == [line]
