"""A CUDA program for the dump tests: `client.py OUTPUT STEPS PAUSE`. Real work on the device, and a line per step.

What a test does to it comes before its end, however late: after two thirds of the steps it repeats what it reads, and
nothing else, until there is a file beside OUTPUT, `.go` instead of its suffix."""

import ctypes
import mmap
import os
import struct
import sys
import threading
import time
from ctypes import byref, c_uint64, c_void_p
from pathlib import Path

CUDA = ctypes.CDLL("libcuda.so.1")
N = 1 << 16


def call(name: str, *arguments: object) -> None:
    if code := getattr(CUDA, name)(*(c_uint64(a) if isinstance(a, int) else a for a in arguments)):
        raise SystemExit(f"{name} returned {code}")


def launch(kernel: c_void_p, *arguments: object) -> None:
    pointers = (c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))  # type: ignore[arg-type]
    call("cuLaunchKernel", kernel, N // 256, 1, 1, 256, 1, 1, 0, None, pointers, None)


def read() -> list[str]:
    """The first and the last of the results."""
    call("cuMemcpyDtoHAsync_v2", host, y.value, 4 * N, None)
    call("cuStreamSynchronize", None)
    return [struct.unpack("<f", ctypes.string_at((host.value or 0) + at, 4))[0].hex() for at in (0, 4 * N - 4)]


output, steps, pause = open(sys.argv[1], "w"), int(sys.argv[2]), float(sys.argv[3])  # noqa: SIM115
go = Path(sys.argv[1]).with_suffix(".go")
if "ALSO" in os.environ:
    also = open(os.environ["ALSO"], "r+")  # noqa: SIM115
    if "MAPPED" in os.environ:
        mapped = mmap.mmap(also.fileno(), 0, prot=mmap.PROT_READ)
        also.close()


def does() -> None:
    """In a thread: what a test writes into a file beside OUTPUT, `.does` instead of its suffix."""
    script = Path(sys.argv[1]).with_suffix(".does")
    while not script.exists():
        time.sleep(0.01)
    exec(script.read_text(), {"objects": objects})
    script.with_suffix(".done").touch()


objects: list[object] = []  # that it keeps
if "DOES" in os.environ:
    threading.Thread(target=does, daemon=True).start()
context, module, fill, saxpy, host = c_void_p(), c_void_p(), c_void_p(), c_void_p(), c_void_p()
x, y = c_uint64(), c_uint64()
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", byref(context), 0)
call("cuCtxSetCurrent", context)
call("cuModuleLoad", byref(module), os.environ["KERNELS"].encode())
call("cuModuleGetFunction", byref(fill), module, b"fill")
call("cuModuleGetFunction", byref(saxpy), module, b"saxpy")
call("cuMemAlloc_v2", byref(x), 4 * N)
call("cuMemAlloc_v2", byref(y), 4 * N)
if "PAGEABLE" in os.environ:
    pageable = ctypes.create_string_buffer(4 * N)
    host.value = ctypes.addressof(pageable)
else:
    call("cuMemHostAlloc", byref(host), 4 * N, 0)
launch(fill, y, ctypes.c_float(0), c_uint64(N))
for step in range(steps):
    launch(fill, x, ctypes.c_float(1 + step % 7), c_uint64(N))
    launch(saxpy, ctypes.c_float(0.5 / (1 + step)), x, y, c_uint64(N))
    results = read()
    print(step, *results, file=output, flush=True)
    time.sleep(pause)
    while step == steps * 2 // 3 and not go.exists():
        if (again := read()) != results:
            raise SystemExit(f"memory that nobody writes was {results}, and is {again}")
        time.sleep(0.005)
