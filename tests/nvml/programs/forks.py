"""A program that counts devices and then forks: the children may use CUDA, as natively. Children of one that uses CUDA
may not, but NVML goes on answering them."""

import ctypes
import os
import sys
from collections.abc import Callable

import pynvml

CUDA = ctypes.CDLL("libcuda.so.1")


def uuid() -> str:
    return str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(0)))


def in_child(body: Callable[[], bool]) -> bool:
    child = os.fork()
    if child == 0:
        os._exit(0 if body() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def total() -> int:
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total)


pynvml.nvmlInit()
if sys.argv[1] == "requested":
    assert pynvml.nvmlDeviceGetCount() == 1
    first = uuid()
    assert in_child(lambda: CUDA.cuInit(0) == 0 and uuid() == first)
assert CUDA.cuInit(0) == 0
assert in_child(lambda: CUDA.cuInit(0) == 3 and pynvml.nvmlDeviceGetCount() == 1)
first = uuid()
assert in_child(lambda: uuid() == first and total() > 0)
