"""All sum, step by step, until the test leaves the next file in FOLDER: `request`, then all request more memory than a
device has; `fill`, then each takes nearly all that is reported free, and writes to it; `end`."""

import ctypes
import time

import numpy as np
from nccl import (
    DRIVER,
    FOLDER,
    RANKS,
    Memory,
    byref,
    c_void_p,
    driver,
    expect,
    holding,
    join,
    nccl,
    say,
    start,
    stream,
    synchronize,
    there,
    unique_id,
)

UINT32, SUM, MAX = 3, 0, 2
OUT_OF_MEMORY = 2
LEFT = 32 << 20  # what is reported changes while others use the device, too


def reported_free() -> int:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    driver("cuMemGetInfo_v2", byref(free), byref(total))
    return free.value


def as_free_as(before: int) -> int:
    """What another rank's program has just had given up is counted as used until it is free, here, too."""
    end = time.monotonic() + 60
    while (free := reported_free()) < before - LEFT // 2:
        if time.monotonic() > end:
            raise SystemExit(f"{free >> 20} MiB are free, {before >> 20} were")
        time.sleep(0.005)
    return free


def refused(size: int) -> bool:
    return bool(DRIVER.cuMemAlloc_v2(byref(ctypes.c_uint64()), ctypes.c_size_t(size)) == OUT_OF_MEMORY)


def sums_until(name: str, comm: c_void_p, on: int) -> None:
    """All go on at the same step."""
    seen, values = Memory(4), holding(np.ones(1024, np.uint32))
    expected = 1
    while True:
        nccl("ncclAllReduce", values.address, values.address, 1024, UINT32, SUM, comm, on)
        expected = expected * RANKS % 2**32
        seen.write(np.array([(FOLDER / name).exists()], np.uint32))
        nccl("ncclAllReduce", seen.address, seen.address, 1, UINT32, MAX, comm, on)
        expect(synchronize(on) == 0, "a step")
        expect((values.read(np.uint32, 1024) == expected).all(), "the sums")
        if seen.read(np.uint32, 1)[0]:
            break
        time.sleep(0.005)
    for each in (seen, values):
        each.free()


def main() -> None:
    start()
    comm, on = join(unique_id()), stream()
    there("began")
    sums_until("request", comm, on)
    expect(refused(4 << 30), "it is more than the device has")
    before = reported_free()
    there("refused")
    sums_until("fill", comm, on)
    size = as_free_as(before) - LEFT
    all_of_it = Memory(size)
    driver("cuMemsetD8Async", all_of_it.address + size - 1024, 7, 1024, on)
    expect(refused(2 * LEFT), "it is more than there is")
    there("filled")
    sums_until("end", comm, on)
    driver("cuMemcpyDtoDAsync_v2", all_of_it.address, all_of_it.address + size - 1024, 1024, on)
    expect(synchronize(on) == 0, "the copy")
    expect((all_of_it.read(np.uint8, 1024) == 7).all(), "what was written")
    nccl("ncclCommDestroy", comm)
    say("done", size >> 20)


main()
