"""NCCL and the driver for the programs here, through ctypes. Nothing in it knows of xMIG.

A program is one rank: `PROGRAM RANK RANKS FOLDER`. Rank 0 leaves the unique id in FOLDER for the others."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Iterator
from ctypes import byref, c_char, c_char_p, c_int, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "AVERAGE", "BFLOAT16", "DRIVER", "FLOAT32", "FOLDER", "INT32", "NAMES", "NCCL", "RANK", "RANKS", "Memory",
    "NcclError", "UniqueId", "byref", "c_int", "c_void_p", "driver", "expect", "holding", "join", "nccl", "say",
    "start", "steps", "stream", "synchronize", "there", "unique_id", "wait_for_file",
]  # fmt: skip

ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: nobody is left when launch.py is killed

RANK, RANKS, FOLDER = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
DRIVER = ctypes.CDLL("libcuda.so.1")
NCCL = ctypes.CDLL("libnccl.so.2")
NCCL.ncclGetLastError.restype = c_char_p
NCCL.ncclGetErrorString.restype = c_char_p

SUM, PRODUCT, MAX, MIN, AVERAGE = range(5)
NAMES = (
    "int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16", "e4m3", "e5m2",
)  # fmt: skip
INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, E4M3, E5M2 = range(12)


class NcclError(Exception):
    def __init__(self, call: str, code: int) -> None:
        reason = (NCCL.ncclGetLastError(None) or b"").decode()
        super().__init__(f"{call} returned {code}: {reason}")
        self.code, self.reason = code, reason


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", c_char * 128)]


def driver(name: str, *arguments: Any) -> None:
    words = [c_uint64(a & (2**64 - 1)) if isinstance(a, int) else a for a in arguments]
    if code := getattr(DRIVER, name)(*words):
        raise SystemExit(f"{name} returned {code}")


def nccl(name: str, *arguments: Any) -> None:
    words = [c_uint64(a & (2**64 - 1)) if isinstance(a, int) else a for a in arguments]
    if code := getattr(NCCL, name)(*words):
        raise NcclError(name, code)


def say(*words: Any) -> None:
    print(*words, flush=True)


def expect(condition: bool, what: str) -> None:
    if not condition:
        raise SystemExit(f"rank {RANK}: not as expected: {what}")


def start(device: int = 0) -> None:
    driver("cuInit", 0)
    context, handle = c_void_p(), c_int()
    driver("cuDeviceGet", byref(handle), device)
    driver("cuDevicePrimaryCtxRetain", byref(context), handle.value)
    driver("cuCtxSetCurrent", context)


def stream() -> int:
    made = c_void_p()
    driver("cuStreamCreate", byref(made), 1)
    return int(made.value or 0)


def synchronize(of: int) -> int:
    return int(DRIVER.cuStreamSynchronize(c_void_p(of)))


class Memory:
    """Device memory of so many bytes."""

    def __init__(self, size: int) -> None:
        made = c_uint64()
        driver("cuMemAlloc_v2", byref(made), max(size, 1))
        self.address, self.size = made.value, size

    def write(self, data: np.ndarray[Any, Any]) -> Memory:
        raw = np.ascontiguousarray(data).view(np.uint8)
        if raw.size:
            driver("cuMemcpyHtoD_v2", self.address, c_void_p(raw.ctypes.data), raw.size)
            driver("cuStreamSynchronize", None)  # streams here do not wait for the default one
        return self

    def read(self, dtype: Any, count: int) -> np.ndarray[Any, Any]:
        out = np.empty(count, dtype)
        if out.nbytes:
            driver("cuMemcpyDtoH_v2", c_void_p(out.ctypes.data), self.address, out.nbytes)
        return out

    def free(self) -> None:
        driver("cuMemFree_v2", self.address)


def holding(data: np.ndarray[Any, Any]) -> Memory:
    return Memory(data.nbytes).write(data)


def unique_id(name: str = "id", ranks: int | None = None) -> UniqueId:
    """The id that rank 0 makes; the others wait for it."""
    made = UniqueId()
    path = FOLDER / name
    if RANK == 0:
        nccl("ncclGetUniqueId", byref(made))
        path.with_suffix(".new").write_bytes(bytes(made))
        path.with_suffix(".new").rename(path)
        return made
    end = time.monotonic() + 60
    while not path.exists():
        if time.monotonic() > end:
            raise SystemExit("rank 0 has left no id")
        time.sleep(0.005)
    ctypes.memmove(byref(made), path.read_bytes(), 128)
    return made


def join(unique: UniqueId, ranks: int = RANKS, rank: int = RANK) -> c_void_p:
    made = c_void_p()
    code = NCCL.ncclCommInitRank(byref(made), c_int(ranks), unique, c_int(rank))
    if code:
        raise NcclError("ncclCommInitRank", code)
    return made


def there(name: str) -> None:
    """Leave a mark for whoever watches."""
    (FOLDER / f"{name}.{RANK}").touch()


def wait_for_file(name: str) -> None:
    end = time.monotonic() + 120
    while not (FOLDER / name).exists():
        if time.monotonic() > end:
            raise SystemExit(f"nobody has left {name}")
        time.sleep(0.005)


def steps(count: int, read_every: int) -> Iterator[int]:
    """The numbers of so many steps. 0: until the test has left `enough` in FOLDER, equally many in each rank.

    All ranks sum in each step, and every `read_every` steps, counted from 0, each waits for all that it has begun.
    While rank 0 is before its step n, no other is behind such a wait of step n or of a later one: it would have the
    sum of step n, which takes rank 0. One of the steps n to n + read_every - 1 ends with such a wait, so nobody has
    begun step n + read_every: who does begin it finds what rank 0 has written before its step n."""
    step, last, enough, end = 0, count or None, FOLDER / "enough", time.monotonic() + 300
    agreed = FOLDER / "last"
    while step != last:
        if last is None:
            if RANK == 0 and enough.exists():
                last = step + read_every
                agreed.with_suffix(".new").write_text(str(last))
                agreed.with_suffix(".new").rename(agreed)
            elif RANK != 0 and agreed.exists():
                last = int(agreed.read_text())
                continue
            elif time.monotonic() > end:
                raise SystemExit("nobody has left enough")
        yield step
        step += 1
