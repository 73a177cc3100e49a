"""A program that computes a little at a time until it is instructed to end: `calm.py MEBIBYTES`. It checks itself:
every value that it reads back is what it computed, whatever happened to its device in between."""

from __future__ import annotations

import ctypes
import select
import sys
from typing import Any

from cuda.bindings import driver

CHUNK = 1 << 20
PACE = 0.01  # seconds between two steps


def check(answer: tuple[Any, ...]) -> Any:
    code, *results = answer
    if code != driver.CUresult.CUDA_SUCCESS:
        raise SystemExit(f"CUDA: {driver.cuGetErrorName(code)[1].decode()}")
    return results[0] if len(results) == 1 else tuple(results)


def main() -> None:
    chunks = int(sys.argv[1])
    check(driver.cuInit(0))
    device = check(driver.cuDeviceGet(0))
    check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(device))))
    memory = check(driver.cuMemAlloc(chunks * CHUNK))
    check(driver.cuMemsetD32(memory, 0, chunks * CHUNK // 4))
    expected = [0] * chunks
    back = (ctypes.c_uint32 * 4)()
    print("begun", flush=True)
    step = 0
    # A line on standard input, or its end, ends the program.
    while not select.select([sys.stdin], [], [], PACE)[0]:
        step += 1
        place = step % chunks
        expected[place] = step
        check(driver.cuMemsetD32(int(memory) + place * CHUNK, step, CHUNK // 4))
        check(driver.cuMemcpyDtoH(ctypes.addressof(back), int(memory) + place * CHUNK, ctypes.sizeof(back)))
        if list(back) != [step] * 4:
            raise SystemExit(f"step {step}: {list(back)}")
    for place, value in enumerate(expected):
        check(driver.cuMemcpyDtoH(ctypes.addressof(back), int(memory) + place * CHUNK, ctypes.sizeof(back)))
        if list(back) != [value] * 4:
            raise SystemExit(f"chunk {place}: {list(back)} instead of {value}")
    print("exact", step, flush=True)


if __name__ == "__main__":
    main()
