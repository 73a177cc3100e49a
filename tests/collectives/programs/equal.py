"""Data-parallel training in miniature: `... STEPS`. In each step all ranks sum a gradient, and each rank brings the sum
into its own parameters. STEPS 0: until the test has left `enough`.

A rank has parameters, of which each chunk of 2 MiB changes with each step, but for its last part; constants, which
never change; and memory of its own. Where they are is left in `memory.RANK`. Once there is the file `now`, happens what
DOES (environment) says: `work`: rank 0 changes its constants, as nobody else does; `again`: rank 1 frees its constants,
and allocates and fills as much; `alone`: rank 0 goes on with parameters of its own; `apart`: all do. Then `done.RANK`
is left. At the end it is printed how many words are not what they should be, and what the parameters are."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from typing import Any

import numpy as np
from nccl import (
    FOLDER,
    RANK,
    RANKS,
    Memory,
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
)

Array = np.ndarray[Any, Any]
UINT32, SUM = 3, 0
STEPS = int(sys.argv[4])
DOES = os.environ.get("DOES", "")
CHUNK = 2 << 20
CHUNKS = 8  # of parameters
BLOCK = 1024  # words of a gradient
BLOCKS = CHUNK // (4 * BLOCK) - 1  # of a chunk that change
PAUSE = 0.004 if STEPS else 0.01
READ_EVERY = 16


def gradient(step: int, rank: int) -> Array:
    return np.arange(BLOCK, dtype=np.uint32) * np.uint32(step + 3) + np.uint32(rank)


def constants() -> Array:
    return np.random.default_rng(7).integers(0, 1 << 32, CHUNK // 4, dtype=np.uint32)


def main() -> None:
    start()
    comm, on = join(unique_id()), stream()
    state = np.random.default_rng(99).integers(0, 1 << 32, (CHUNKS, CHUNK // 4), dtype=np.uint32)
    parameters, constant = holding(state), holding(constants())
    own = holding(np.random.default_rng(RANK).integers(0, 1 << 32, CHUNK // 4, dtype=np.uint32))
    local, summed = Memory(4 * BLOCK), Memory(4 * BLOCK)
    (FOLDER / f"memory.{RANK}.new").write_text(f"{parameters.address} {constant.address} {own.address}")
    (FOLDER / f"memory.{RANK}.new").rename(FOLDER / f"memory.{RANK}")
    alone, done = False, not DOES
    there("began")
    for step in steps(STEPS, READ_EVERY):
        if not done and (FOLDER / "now").exists():
            done = True
            if DOES == "work" and RANK == 0:
                driver("cuMemsetD32Async", constant.address, 5, 1, on)
            elif DOES == "again" and RANK == 1:
                expect(synchronize(on) == 0, "what comes before")
                constant.free()
                constant = holding(np.arange(CHUNK // 4, dtype=np.uint32))
            alone = DOES == "apart" or (DOES == "alone" and RANK == 0)
            there("done")
        ours = gradient(step, RANK)
        driver("cuMemcpyHtoDAsync_v2", local.address, c_void_p(ours.ctypes.data), ours.nbytes, on)
        nccl("ncclAllReduce", local.address, summed.address, BLOCK, UINT32, SUM, comm, on)
        total = sum((gradient(step, rank) for rank in range(RANKS)), np.zeros(BLOCK, np.uint32))
        block = step % BLOCKS * BLOCK
        for chunk in range(CHUNKS):
            at = parameters.address + chunk * CHUNK + 4 * block
            driver("cuMemcpyDtoDAsync_v2", at, (local if alone else summed).address, 4 * BLOCK, on)
            state[chunk, block : block + BLOCK] = ours if alone else total
        driver("cuMemsetD32Async", own.address + 4 * block, step * RANKS + RANK, BLOCK, on)
        if step % READ_EVERY == READ_EVERY - 1:
            expect(synchronize(on) == 0, f"step {step}")
        time.sleep(PAUSE)
    expect(synchronize(on) == 0, "the last step")
    there("finished")
    found = parameters.read(np.uint32, state.size).reshape(state.shape)
    wrong = int((found != state).sum())
    nccl("ncclCommDestroy", comm)
    say(f"{RANK}: {wrong} words wrong, {hashlib.sha256(found.tobytes()).hexdigest()[:16]}")


main()
