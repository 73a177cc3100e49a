"""Two ranks that stand in a certain place when they are suspended: `... HOW`."""

import os
import sys

import numpy as np
from nccl import (
    FLOAT32,
    NCCL,
    RANK,
    RANKS,
    NcclError,
    byref,
    c_int,
    c_void_p,
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
    wait_for_file,
)

COUNT = 1 << 12
LARGE = (int(os.environ.get("LARGE_MIB", "0")) << 18) // (RANKS - RANK)  # floats
start()
comm, on = join(unique_id()), stream()
values = np.arange(COUNT, dtype=np.float32)
memory = holding(values + RANK)
large = holding(np.full(LARGE, 3, np.float32))


def total() -> None:
    nccl("ncclAllReduce", memory.address, memory.address, COUNT, FLOAT32, 0, comm, on)
    expect(synchronize(on) == 0, "a sum")


def waits() -> None:
    """Rank 0 in a collective, for rank 1, which waits for something else."""
    total()
    there("began")
    if RANK == 1:
        wait_for_file("come")
    total()
    wait_for_file("end")
    expect((memory.read(np.float32, COUNT) == RANKS * (RANKS * values + sum(range(RANKS)))).all(), "both sums")


def rests() -> None:
    """Both do nothing; rank 1 has twice as much memory."""
    total()
    there("began")
    wait_for_file("come")
    total()
    expect(bool((large.read(np.float32, LARGE) == 3).all()), "what it has")


def splits() -> None:
    """Rank 0 makes a communicator, for which rank 1 comes late."""
    there("began")
    if RANK == 1:
        wait_for_file("come")
    half = c_void_p()
    code = NCCL.ncclCommSplit(comm, c_int(0), c_int(RANK), byref(half), None)
    expect(code == 0, f"it is made: {code}")
    there("split")
    wait_for_file("end")
    nccl("ncclAllReduce", memory.address, memory.address, COUNT, FLOAT32, 0, half, on)
    expect(synchronize(on) == 0, "a sum in it")
    expect((memory.read(np.float32, COUNT) == RANKS * values + sum(range(RANKS))).all(), "the sum in it")


def loses() -> None:
    """Rank 0 goes on after rank 1 has been ended: its memory is what it was, and what it does with the other fails."""
    total()
    there("began")
    wait_for_file("come")
    expect((memory.read(np.float32, COUNT) == RANKS * values + sum(range(RANKS))).all(), "the sum")
    try:
        nccl("ncclAllReduce", memory.address, memory.address, COUNT, FLOAT32, 0, comm, on)
        code = synchronize(on)
    except NcclError as error:
        code = error.code
    expect(code != 0, "a collective with a rank that has gone")


{"waits": waits, "rests": rests, "splits": splits, "loses": loses}[sys.argv[4]]()
say("done")
