"""One process with two devices: communicators of both, and threads that make them."""

import threading

import numpy as np
from capture import capture, executable, launch
from model import Array
from nccl import (
    FLOAT32,
    NCCL,
    Memory,
    byref,
    c_int,
    c_void_p,
    driver,
    expect,
    nccl,
    say,
    start,
    synchronize,
    unique_id,
)  # fmt: skip

COUNT = 5000
start()
contexts = []
for device in range(2):
    context = c_void_p()
    driver("cuDevicePrimaryCtxRetain", byref(context), device)
    contexts.append(context)


def use(device: int) -> None:
    driver("cuCtxSetCurrent", contexts[device])


def stream_of(device: int) -> int:
    use(device)
    made = c_void_p()
    driver("cuStreamCreate", byref(made), 1)
    return int(made.value or 0)


def memory_of(device: int, data: Array) -> Memory:
    use(device)
    return Memory(data.nbytes).write(data)


streams = [stream_of(device) for device in range(2)]
comms = (c_void_p * 2)()
devices = (c_int * 2)(1, 0)  # rank 0 is on device 1
nccl("ncclCommInitAll", comms, 2, devices)
for rank in range(2):
    answer = c_int()
    nccl("ncclCommCuDevice", c_void_p(comms[rank]), byref(answer))
    expect(answer.value == 1 - rank, "the device of a rank")
memories = [memory_of(1 - rank, np.full(COUNT, rank + 1, np.float32)) for rank in range(2)]
use(0)
nccl("ncclGroupStart")
for rank in range(2):
    where = memories[rank].address
    nccl("ncclAllReduce", where, where, COUNT, FLOAT32, 0, c_void_p(comms[rank]), streams[1 - rank])
nccl("ncclGroupEnd")
for rank in range(2):
    use(1 - rank)
    expect(synchronize(streams[1 - rank]) == 0, "synchronize")
    expect((memories[rank].read(np.float32, COUNT) == 3).all(), "a sum over two devices")

# The same in the default streams, which are another one on each device.
use(0)
nccl("ncclGroupStart")
for rank in range(2):
    where = memories[rank].address
    nccl("ncclAllReduce", where, where, COUNT, FLOAT32, 0, c_void_p(comms[rank]), (0, 2)[rank])
nccl("ncclGroupEnd")
for rank in range(2):
    use(1 - rank)
    driver("cuCtxSynchronize")
    expect((memories[rank].read(np.float32, COUNT) == 6).all(), "a sum in default streams")

# In one graph, of streams of both devices; with what each does before and behind it.
marks = [c_void_p(), c_void_p()]
for device in range(2):
    use(device)
    driver("cuEventCreate", byref(marks[device]), 2)
others = [memory_of(1 - rank, np.zeros(COUNT, np.float32)) for rank in range(2)]


def both() -> None:
    driver("cuEventRecord", marks[0], streams[0])
    driver("cuStreamWaitEvent", streams[1], marks[0], 0)
    for rank in range(2):
        use(1 - rank)
        driver("cuMemsetD32Async", memories[rank].address, (0x3F800000, 0x40000000)[rank], COUNT, streams[1 - rank])
    nccl("ncclGroupStart")
    for rank in range(2):
        where = memories[rank].address
        nccl("ncclAllReduce", where, where, COUNT, FLOAT32, 0, c_void_p(comms[rank]), streams[1 - rank])
    nccl("ncclGroupEnd")
    for rank in range(2):
        use(1 - rank)
        driver("cuMemcpyDtoDAsync_v2", others[rank].address, memories[rank].address, 4 * COUNT, streams[1 - rank])
    use(0)
    driver("cuEventRecord", marks[1], streams[1])
    driver("cuStreamWaitEvent", streams[0], marks[1], 0)


use(0)
graph = executable(capture(streams[0], both))
for device in (0, 1, 0):
    use(device)
    for rank in range(2):
        others[rank].write(np.zeros(COUNT, np.float32))
    launch(graph, streams[device])
    expect(synchronize(streams[device]) == 0, "synchronize after a launch")
    for rank in range(2):
        expect((others[rank].read(np.float32, COUNT) == 3).all(), "a sum over two devices in a graph")
driver("cuGraphExecDestroy", graph)
use(0)

# Both halves of a split in a group, then apart in threads.
parts = [c_void_p(), c_void_p()]
nccl("ncclGroupStart")
for rank in range(2):
    nccl("ncclCommSplit", c_void_p(comms[rank]), 0, -rank, byref(parts[rank]), None)
nccl("ncclGroupEnd")
answer = c_int()
nccl("ncclCommUserRank", parts[0], byref(answer))
expect(answer.value == 1, "the rank in a split")

made = [c_void_p(), c_void_p()]
unique = unique_id("threads")


def join(rank: int) -> None:
    use(rank)
    if code := NCCL.ncclCommInitRank(byref(made[rank]), c_int(2), unique, c_int(rank)):
        say(f"ncclCommInitRank returned {code}")


threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
expect(all(one.value for one in made), "communicators made by threads")
for one in [*map(c_void_p, comms), *parts, *made]:
    nccl("ncclCommDestroy", one)
say("done")
