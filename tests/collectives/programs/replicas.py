"""Ranks that hold equal memory, as data-parallel ones do, compared with a model: `... STEPS [OWN [HOLD]]`.

Only collectives change what is equal, so it is at every position at which ranks can stand still together. STEPS 0:
until the test has left `enough`. OWN: so many MiB of each rank are its own, and what it has there goes into the sums of
all. HOLD: at this step they wait for the file `go`. With LOADER (environment) each step sums what every rank has
brought from the same page-locked buffer. With BEHIND each step fills all but the first block, some time after its
collectives: then the ranks are equal only where they have stopped behind the same one. With ALONE, while they wait,
each changes what is its own once more, when there is the file `alone`; no collective is between that and the last."""

import ctypes
import os
import random
import sys
import time
from typing import Any

import numpy as np
from nccl import (
    RANK,
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
    steps,
    stream,
    synchronize,
    there,
    unique_id,
    wait_for_file,
)

Array = np.ndarray[Any, Any]
UINT32 = 3
SUM = 0
BLOCK = 16 << 10
BLOCKS = 128  # 8 MiB
STEPS = int(sys.argv[4])
OWN = (int(sys.argv[5]) if len(sys.argv) > 5 else 0) << 18
HOLD = int(sys.argv[6]) if len(sys.argv) > 6 else -1
PAUSE = 0.004 if STEPS else 0.01
READ_EVERY = 16


def owned(rank: int) -> Array:
    """What a rank has of its own at first."""
    return np.random.default_rng(rank).integers(0, 1 << 32, OWN, dtype=np.uint32)


def loaded(step: int, rank: int) -> Array:
    """What a rank's loader brings for a step."""
    return np.arange(BLOCK, dtype=np.uint32) * np.uint32(step + 1) + np.uint32(rank)


class Loader:
    """A page-locked buffer that is used for each step, as soon as the copy of the last one is done."""

    def __init__(self) -> None:
        made, self.done = c_void_p(), c_void_p()
        driver("cuMemAllocHost_v2", byref(made), 4 * BLOCK)
        driver("cuEventCreate", byref(self.done), 2)
        self.pinned = made
        self.buffer = np.ctypeslib.as_array(ctypes.cast(made, ctypes.POINTER(ctypes.c_uint32)), (BLOCK,))
        self.memory = Memory(4 * BLOCK)

    def bring(self, step: int, on: int) -> None:
        driver("cuEventSynchronize", self.done)
        self.buffer[:] = loaded(step, RANK)
        driver("cuMemcpyHtoDAsync_v2", self.memory.address, self.pinned, 4 * BLOCK, on)
        driver("cuEventRecord", self.done, on)


def check(memory: Memory, expected: Array, what: str) -> None:
    expect((memory.read(np.uint32, expected.size) == expected.reshape(-1)).all(), what)


def main() -> None:
    start()
    pauses = random.Random(RANK)
    comm, on = join(unique_id()), stream()
    state = np.random.default_rng(99).integers(0, 1 << 32, BLOCK * BLOCKS, dtype=np.uint32).reshape(BLOCKS, BLOCK)
    model = holding(state)
    every = [owned(rank) for rank in range(RANKS)] if OWN else []
    own = holding(every[RANK]) if OWN else None
    loader = Loader() if os.environ.get("LOADER") else None
    behind = bool(os.environ.get("BEHIND"))
    there("began")
    for step in steps(STEPS, READ_EVERY):
        if step == HOLD:
            expect(synchronize(on) == 0, "what comes before the pause")
            there("holds")
            if os.environ.get("ALONE"):
                wait_for_file("alone")
                assert own is not None
                driver("cuMemsetD32Async", own.address, 77 + RANK, BLOCK, on)
                expect(synchronize(on) == 0, "what it does alone")
                for rank, each in enumerate(every):
                    each[:BLOCK] = 77 + rank
                there("alone")
            wait_for_file("go")
        block = step * 37 % BLOCKS
        at = model.address + 4 * BLOCK * block
        nccl("ncclAllReduce", at, at, BLOCK, UINT32, SUM, comm, on)
        state[block] *= RANKS
        if own is not None:
            part = step % (OWN // BLOCK) * BLOCK
            nccl("ncclAllReduce", own.address + 4 * part, at, BLOCK, UINT32, SUM, comm, on)
            driver("cuMemsetD32Async", own.address + 4 * part, step * RANKS + RANK, BLOCK // 2, on)
            state[block] = sum((each[part : part + BLOCK] for each in every), np.zeros(BLOCK, np.uint32))
            for rank, each in enumerate(every):
                each[part : part + BLOCK // 2] = step * RANKS + rank
        if loader is not None:
            loader.bring(step, on)
            nccl("ncclAllReduce", loader.memory.address, at, BLOCK, UINT32, SUM, comm, on)
            state[block] = sum((loaded(step, rank) for rank in range(RANKS)), np.zeros(BLOCK, np.uint32))
        if behind:
            time.sleep(pauses.random() * 2 * PAUSE)
            driver("cuMemsetD32Async", model.address + 4 * BLOCK, step, BLOCK * (BLOCKS - 1), on)
            state[1:] = step
        if step % READ_EVERY == READ_EVERY - 1:
            expect(synchronize(on) == 0, f"step {step}")
            check(model, state, f"the state after step {step}")
        time.sleep(pauses.random() * 2 * PAUSE)
    expect(synchronize(on) == 0, "the last step")
    check(model, state, "the state at the end")
    if own is not None:
        check(own, every[RANK], "what it has of its own")
    there("finished")
    done = holding(np.ones(1, np.uint32))
    nccl("ncclAllReduce", done.address, done.address, 1, UINT32, SUM, comm, on)
    expect(done.read(np.uint32, 1)[0] >= 1, "the last sum")
    nccl("ncclCommDestroy", comm)
    say("done")


main()
