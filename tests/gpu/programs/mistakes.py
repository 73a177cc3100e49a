"""Mistakes, each of them tried: what the driver's functions return. No framework: the driver interface itself."""

from __future__ import annotations

import ctypes

import workload

parser = workload.arguments(__doc__, steps=0)
options = parser.parse_args()

driver = ctypes.CDLL("libcuda.so.1")
context, pointer, module, function = (ctypes.c_void_p() for _ in range(4))
assert driver.cuInit(0) == 0
assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == driver.cuCtxSetCurrent(context) == 0
PTX = b""".version 8.0
.target sm_80
.address_size 64
.visible .entry small(.param .u64 a, .param .u32 b) .maxntid 64, 1, 1 { ret; }
"""
assert driver.cuModuleLoadData(ctypes.byref(module), PTX) == 0
assert driver.cuModuleGetFunction(ctypes.byref(function), module, b"small") == 0
values = (ctypes.c_uint64(1), ctypes.c_uint32(2))
parameters = (ctypes.c_void_p * 2)(*map(ctypes.addressof, values))
limit = ctypes.c_size_t()


def alloc(size: int) -> int:
    return int(driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)))


def load(image: bytes) -> int:
    return int(driver.cuModuleLoadData(ctypes.byref(module), image + bytes(64)))


def launch(grid: int = 1, block: int = 1, shared: int = 0, stream: int = 0, of: ctypes.c_void_p = function) -> int:
    return int(driver.cuLaunchKernel(of, grid, 1, 1, block, 1, 1, shared, ctypes.c_void_p(stream), parameters, None))


def set_limit(which: int, value: int) -> int:
    return int(driver.cuCtxSetLimit(which, ctypes.c_size_t(value)))


def cooperative(grid: int) -> int:
    stream = ctypes.c_void_p()
    return int(driver.cuLaunchCooperativeKernel(function, grid, 1, 1, 64, 1, 1, 0, stream, parameters))


def packed(size: int) -> int:
    """A launch whose parameters the program has packed."""
    block, length = (ctypes.c_ubyte * 64)(), ctypes.c_size_t(size)
    extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(block), 2, ctypes.addressof(length), 0)
    return int(driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, None, None, extra))


reported = {
    "nothing wrong": launch(),
    "more memory than there is": alloc(1 << 40),
    "no memory": alloc(0),
    "an image that is none": load(b"nothing at all"),
    "an empty image": load(b"\x7fELF"),
    "PTX that does not compile": load(PTX.replace(b".param .u32 b", b".param .align 3 .b8 b[4]")),
    "a kernel that there is not": int(driver.cuModuleGetFunction(ctypes.byref(pointer), module, b"large")),
    "no blocks": launch(grid=0),
    "no threads": launch(block=0),
    "more threads than the device has": launch(block=1025),
    "more threads than the kernel allows": launch(block=65),
    "more shared memory than there is": launch(shared=1 << 20),
    "more shared memory than was requested": launch(shared=100 << 10),
    "more blocks than run at a time": cooperative(1 << 20),
    "blocks that do": cooperative(1),
    "no kernel": launch(of=ctypes.c_void_p()),
    "parameters, packed": packed(12),
    "parameters, packed, too few": packed(8),
    "a limit that there is not": int(driver.cuCtxGetLimit(ctypes.byref(limit), 99)),
    "a limit": set_limit(0, 5000),
    "a limit that is too large": set_limit(0, 1 << 40),
    "a limit to set that there is not": set_limit(99, 1),
    "a device that there is not": int(driver.cuDeviceGet(ctypes.byref(ctypes.c_int()), 99)),
    "memory that nobody has": int(driver.cuMemFree_v2(ctypes.c_uint64(0x7000))),
    "nothing broken": int(driver.cuCtxSynchronize()),
}
workload.report(options, reported=[f"{what}: {code}" for what, code in reported.items()])
