"""One process with two devices, a rank on each, and a thread for each of them: `... STEPS`. The first thread begins
its part of a sum and waits for it, every other time by way of the other device, and only then the other one begins its
own. STEPS 0: until the test has left `enough`."""

import sys
import threading
import time

import numpy as np
from nccl import INT32, Memory, byref, c_int, c_void_p, driver, expect, nccl, say, start, steps, synchronize, there

COUNT, RANKS, SUM = 5000, 2, 0
BEHIND = 0.001  # seconds: the first one's wait is in the journal by then, as a rule
STEPS = int(sys.argv[4])

start()
contexts = [c_void_p() for _ in range(RANKS)]
for device, context in enumerate(contexts):
    driver("cuDevicePrimaryCtxRetain", byref(context), device)
comms = (c_void_p * RANKS)()
nccl("ncclCommInitAll", comms, RANKS, (c_int * RANKS)(0, 1))
begun = threading.Event()
both = threading.Barrier(RANKS + 1)
over = False
found: list[list[int]] = [[] for _ in range(RANKS)]


def work(rank: int) -> None:
    driver("cuCtxSetCurrent", contexts[rank])
    made = c_void_p()
    driver("cuStreamCreate", byref(made), 1)
    stream, memory, step = int(made.value or 0), Memory(4 * COUNT), 0
    mark, elsewhere = c_void_p(), c_void_p()
    driver("cuEventCreate", byref(mark), 2)
    driver("cuCtxSetCurrent", contexts[1 - rank])
    driver("cuStreamCreate", byref(elsewhere), 1)
    driver("cuCtxSetCurrent", contexts[rank])
    while True:
        both.wait()
        if over:
            return
        if rank == 1:
            begun.wait()
            time.sleep(BEHIND)
        driver("cuMemsetD32Async", memory.address, RANKS * step + rank, COUNT, stream)
        nccl("ncclAllReduce", memory.address, memory.address, COUNT, INT32, SUM, c_void_p(comms[rank]), stream)
        if rank == 0:
            begun.set()
            if step % 2:
                driver("cuEventRecord", mark, stream)
                driver("cuStreamWaitEvent", elsewhere, mark, 0)
                driver("cuCtxSetCurrent", contexts[1])
                expect(synchronize(int(elsewhere.value or 0)) == 0, f"step {step}, seen from the other device")
                driver("cuCtxSetCurrent", contexts[0])
        expect(synchronize(stream) == 0, f"step {step}")
        found[rank] = sorted(set(memory.read(np.int32, COUNT).tolist()))
        both.wait()
        step += 1


threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(RANKS)]
for thread in threads:
    thread.start()
there("began")
for step in steps(STEPS, 1):
    begun.clear()
    both.wait()
    both.wait()
    expect(found == [[2 * RANKS * step + 1]] * RANKS, f"the sum of step {step} is {found}")
over = True
both.wait()
for thread in threads:
    thread.join()
for each in comms:
    nccl("ncclCommDestroy", c_void_p(each))
say("done")
