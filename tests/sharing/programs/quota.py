"""What a program finds of its device's memory, again at each line on standard input: all forms of allocation, up to the
quota and beyond. Something that it keeps goes through a kernel each time."""

import sys
from ctypes import Structure, c_int, c_ubyte, c_ushort

import pynvml
from calls import DRIVER, RUNTIME, byref, c_size_t, c_void_p, kernel, launch, malloc, read, say

MIB = 1 << 20
OUT_OF_MEMORY = 2


class Properties(Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int), ("handles", c_int), ("location", c_int), ("ordinal", c_int), ("windows", c_void_p),
        ("compression", c_ubyte), ("rdma", c_ubyte), ("usage", c_ushort), ("reserved", c_ubyte * 4),
    )  # fmt: skip


def memory() -> tuple[int, int]:
    free, total = c_size_t(), c_size_t()
    DRIVER.cuMemGetInfo_v2(byref(free), byref(total))
    return free.value // MIB, total.value // MIB


def plain(size: int) -> tuple[int, int]:
    where = c_void_p()
    return RUNTIME.code("cudaMalloc", byref(where), size), where.value or 0


def from_pool(size: int) -> int:
    where = c_void_p()
    code = RUNTIME.code("cudaMallocAsync", byref(where), size, 0)
    if code == 0:
        RUNTIME.cudaFreeAsync(where, 0)
        RUNTIME.cudaDeviceSynchronize()
    return code


def mapped(size: int) -> int:
    """Physical memory of the program's own, at an address of its own."""
    handle, base = c_void_p(), c_void_p()
    DRIVER.cuMemAddressReserve(byref(base), size, 0, 0, 0)
    code = DRIVER.code("cuMemCreate", byref(handle), size, byref(Properties(type=1, location=1, ordinal=0)), 0)
    if code == 0:
        code = DRIVER.code("cuMemMap", base.value or 0, size, 0, handle.value or 0, 0)
        if code == 0:
            DRIVER.cuMemUnmap(base.value or 0, size)
        DRIVER.cuMemRelease(handle.value or 0)
    DRIVER.cuMemAddressFree(base.value or 0, size)
    return code


def pitched(width: int, height: int) -> int:
    where, pitch = c_void_p(), c_size_t()
    code = RUNTIME.code("cudaMallocPitch", byref(where), byref(pitch), width, height)
    if code == 0:
        RUNTIME.cudaFree(where)
    return code


quota = int(sys.argv[1])
kept, n = malloc(16 * MIB), 16 * MIB // 8
mix, total = kernel("mix"), c_size_t()
RUNTIME.cudaMemset(kept, 1, 16 * MIB)
for _ in sys.stdin:
    DRIVER.cuDeviceTotalMem_v2(byref(total), 0)
    pynvml.nvmlInit()
    seen = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0))
    free, whole = memory()
    assert (total.value, seen.total, whole) == (quota, quota, quota // MIB), (total.value, seen.total, whole)
    assert free <= whole - 16, free
    code, most = plain(quota - 24 * MIB)
    assert code == 0, code
    assert memory()[0] <= 8, memory()
    assert (plain(16 * MIB)[0], from_pool(16 * MIB), mapped(16 * MIB)) == (OUT_OF_MEMORY,) * 3
    assert pitched(1 << 20, 32) == OUT_OF_MEMORY
    RUNTIME.cudaFree(most)
    assert plain(quota)[0] == OUT_OF_MEMORY
    assert (from_pool(16 * MIB), mapped(16 * MIB), pitched(1 << 20, 4)) == (0, 0, 0)
    launch(mix, 4, 64, kept, 1, n)
    say("within", quota // MIB, read(kept, 4096))
