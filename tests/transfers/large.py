"""A CUDA program with much memory, of which each step changes little: `large.py OUTPUT MIB PAUSE`. Each granule of
2 MiB has other content. A step changes one of them, and appends a line with what it and another one contain. With a
file beside OUTPUT, `.stop` instead of its suffix, it ends after the step that it does."""

import ctypes
import os
import sys
import time
from ctypes import byref, c_uint64, c_void_p
from pathlib import Path

CUDA = ctypes.CDLL("libcuda.so.1")
GRANULE = 2 << 20
N = GRANULE // 4


def call(name: str, *arguments: object) -> None:
    if code := getattr(CUDA, name)(*(c_uint64(a) if isinstance(a, int) else a for a in arguments)):
        raise SystemExit(f"{name} returned {code}")


def fill(address: int, value: float) -> None:
    arguments = (c_uint64(address), ctypes.c_float(value), c_uint64(N))
    pointers = (c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
    call("cuLaunchKernel", kernel, N // 256, 1, 1, 256, 1, 1, 0, None, pointers, None)


def contains(address: int) -> str:
    found = (ctypes.c_float * 1)()
    call("cuMemcpyDtoH_v2", byref(found), address, 4)
    return float(found[0]).hex()


output, granules, pause = open(sys.argv[1], "a"), int(sys.argv[2]) // 2, float(sys.argv[3])  # noqa: SIM115
stop = Path(sys.argv[1]).with_suffix(".stop")
context, module, kernel, memory = c_void_p(), c_void_p(), c_void_p(), c_uint64()
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", byref(context), 0)
call("cuCtxSetCurrent", context)
call("cuModuleLoad", byref(module), os.environ["KERNELS"].encode())
call("cuModuleGetFunction", byref(kernel), module, b"fill")
call("cuMemAlloc_v2", byref(memory), granules * GRANULE)
for granule in range(granules):
    fill(memory.value + granule * GRANULE, granule + 0.5)
step = 0
while not stop.exists():
    changed, other = memory.value + (step % 8) * GRANULE, memory.value + (step * 7 % granules) * GRANULE
    fill(changed, 1000.0 + step)
    print(step, contains(changed), contains(other), contains(other + GRANULE - 4), file=output, flush=True)
    step += 1
    time.sleep(pause)
