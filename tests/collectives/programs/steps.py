"""Steps that depend on all before them and on all ranks, compared with a model: `... STEPS [PAUSE]`. What is lost, done
twice or done with another rank's step shows in every later sum. STEPS 0: until the test has left `enough`.

Every fortieth step a communicator is split off and ended; with SPLIT_EVERY (environment) more often. With GRAPHS
steps are launches of a graph, which is updated every thirtieth step, and made anew as often. With IDLE_MIB there is
memory that is written once, and compared at the end. With LOGGED each rank writes the number of each step to
`steps.RANK` in the folder: a second copy of it, if it ever ran, would leave numbers of its own. The rank JOINS_LAST
waits for the file `may_join` before it joins."""

import os
import random
import sys
import time
from typing import Any

import numpy as np
from capture import UPDATED, capture, executable, launch, update
from nccl import (
    FOLDER,
    NCCL,
    RANK,
    RANKS,
    Memory,
    byref,
    c_int,
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

UINT32 = 3
SUM = 0
COUNT = 3 << 10
PART = COUNT // 4
STEPS = int(sys.argv[4])
# What runs until it is enough is not to take the processors from what is tried meanwhile.
PAUSE = float(sys.argv[5]) if len(sys.argv) > 5 else 0.004 if STEPS else 0.01
SPLIT_EVERY, READ_EVERY = int(os.environ.get("SPLIT_EVERY", "40")), 8
GRAPHS, CHANGE_EVERY = "GRAPHS" in os.environ, 30
IDLE_MIB = int(os.environ.get("IDLE_MIB", "0"))


def splits_at(step: int) -> bool:
    return step % SPLIT_EVERY == SPLIT_EVERY - 1


def modelled(state: np.ndarray[Any, Any], step: int) -> np.ndarray[Any, Any]:
    """All ranks' states after this step."""
    state = np.broadcast_to(state.sum(axis=0, dtype=np.uint32), state.shape).copy()
    received = np.roll(state[:, :PART], 1, axis=0)  # of the rank before
    for rank in range(RANKS):
        state[rank, PART : 2 * PART] = received[rank]
        state[rank, 2 * PART : 3 * PART] = step * RANKS + rank
    sums = [state[color::2, 3 * PART :].sum(axis=0, dtype=np.uint32) for color in range(min(2, RANKS))]
    for rank in range(RANKS):
        state[rank, 3 * PART :] = sums[rank % 2]
    if splits_at(step):
        state[:, :PART] = state[:, :PART].sum(axis=0, dtype=np.uint32)
    return state


def idle(number: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng([RANK, number]).integers(0, 1 << 32, 1 << 18, np.uint32)


def split(comm: c_void_p, color: int) -> c_void_p:
    made = c_void_p()
    if code := NCCL.ncclCommSplit(comm, c_int(color), c_int(RANK), byref(made), None):
        raise SystemExit(f"ncclCommSplit returned {code}: {NCCL.ncclGetLastError(None)}")
    return made


def main() -> None:
    start()
    pauses = random.Random(RANK)
    unique = unique_id()
    if os.environ.get("JOINS_LAST") == str(RANK):
        wait_for_file("may_join")
    comm, on, beside = join(unique), stream(), stream()
    half = split(comm, RANK % 2)
    state = np.arange(RANKS * COUNT, dtype=np.uint32).reshape(RANKS, COUNT)
    memory, received, number = holding(state[RANK]), Memory(4 * PART), Memory(4 * PART)
    unchanged = [holding(idle(number)) for number in range(IDLE_MIB)]
    mark = c_void_p()
    driver("cuEventCreate", byref(mark), 2)

    def work() -> None:
        nccl("ncclAllReduce", memory.address, memory.address, COUNT, UINT32, SUM, comm, on)
        nccl("ncclGroupStart")
        nccl("ncclSend", memory.address, PART, UINT32, (RANK + 1) % RANKS, comm, on)
        nccl("ncclRecv", received.address, PART, UINT32, (RANK - 1) % RANKS, comm, on)
        nccl("ncclGroupEnd")
        # In another stream, as gradients are summed.
        driver("cuEventRecord", mark, on)
        driver("cuStreamWaitEvent", beside, mark, 0)
        nccl("ncclAllReduce", memory.address + 12 * PART, memory.address + 12 * PART, PART, UINT32, SUM, half, beside)
        driver("cuMemcpyDtoDAsync_v2", memory.address + 4 * PART, received.address, 4 * PART, on)
        driver("cuMemcpyDtoDAsync_v2", memory.address + 8 * PART, number.address, 4 * PART, on)
        driver("cuEventRecord", mark, beside)
        driver("cuStreamWaitEvent", on, mark, 0)

    made = c_void_p()
    log = open(FOLDER / f"steps.{RANK}" if "LOGGED" in os.environ else os.devnull, "a")  # noqa: SIM115
    there("began")
    for step in steps(STEPS, READ_EVERY):
        print(step, file=log, flush=True)
        driver("cuMemsetD32Async", number.address, step * RANKS + RANK, PART, on)
        if GRAPHS:
            if step % CHANGE_EVERY == 0:
                graph = capture(on, work)
                if step % (2 * CHANGE_EVERY) == 0:
                    if made:
                        driver("cuGraphExecDestroy", made)
                    made = executable(graph)
                else:
                    expect(update(made, graph) == UPDATED, f"an update before step {step}")
                driver("cuGraphDestroy", graph)
            launch(made, on)
        else:
            work()
        if splits_at(step):
            whole = split(comm, 0)
            nccl("ncclAllReduce", memory.address, memory.address, PART, UINT32, SUM, whole, on)
            nccl("ncclCommDestroy", whole)
        state = modelled(state, step)
        if step % READ_EVERY == READ_EVERY - 1:
            expect(synchronize(on) == 0, f"step {step}")
            expect((memory.read(np.uint32, COUNT) == state[RANK]).all(), f"the state after step {step}")
        time.sleep(pauses.random() * 2 * PAUSE)
    expect(synchronize(on) == 0, "the last step")
    expect((memory.read(np.uint32, COUNT) == state[RANK]).all(), "the state at the end")
    for part, one in enumerate(unchanged):
        expect((one.read(np.uint32, 1 << 18) == idle(part)).all(), f"what was written once, part {part}")
    error = c_int()
    nccl("ncclCommGetAsyncError", comm, byref(error))
    expect(error.value == 0, f"the communicator reports {error.value}")
    there("finished")
    # All have seen it before anybody leaves.
    if made:
        driver("cuGraphExecDestroy", made)
    done = holding(np.ones(1, np.uint32))
    nccl("ncclAllReduce", done.address, done.address, 1, UINT32, SUM, comm, on)
    expect(done.read(np.uint32, 1)[0] >= 1, "the last sum")
    for each in (half, comm):
        nccl("ncclCommDestroy", each)
    say("done")


main()
