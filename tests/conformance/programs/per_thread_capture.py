"""Graphs captured from per-thread default streams, each thread from its own; the legacy stream cannot be captured."""

import threading
import time

from calls import (
    DRIVER,
    RUNTIME,
    Dim3,
    byref,
    c_int,
    c_void_p,
    event,
    expect,
    expect_error,
    kernel,
    malloc,
    pack,
    read,
    say,
    stream,
)

N = 500
PER_THREAD = 2  # cudaStreamPerThread
THREAD_LOCAL = 1
fill, mix = kernel("fill"), kernel("mix")
areas = [malloc(8 * N) for _ in range(3)]
done_by: list[int] = []
one, many = Dim3(2, 1, 1), Dim3(32, 1, 1)


def captured() -> int:
    found = c_int()
    DRIVER.cuStreamIsCapturing(PER_THREAD, byref(found))
    return found.value


def work(index: int) -> None:
    RUNTIME.cudaSetDevice(0)
    area, graph, run = areas[index], c_void_p(), c_void_p()
    RUNTIME.cudaLaunchKernel_ptsz(fill, one, many, pack(area, index, N), 0, 0)
    RUNTIME.cudaStreamBeginCapture(PER_THREAD, THREAD_LOCAL)
    expect(captured() == 1, "the thread's own stream is captured")
    # Stream 0 of the _ptsz forms is the same stream: all of it goes into the graph, in this order.
    RUNTIME.cudaLaunchKernel_ptsz(mix, one, many, pack(area, 3 + index, N), 0, 0)
    RUNTIME.cudaLaunchKernel(mix, one, many, pack(area, 100 + index, N), 0, PER_THREAD)
    # Another stream joins, and comes back.
    other, begun, done = stream(), event(), event()
    RUNTIME.cudaEventRecord(begun, PER_THREAD)
    RUNTIME.cudaStreamWaitEvent(other, begun, 0)
    RUNTIME.cudaLaunchKernel(mix, one, many, pack(area, 7, N), 0, other)
    RUNTIME.cudaEventRecord(done, other)
    RUNTIME.cudaStreamWaitEvent(PER_THREAD, done, 0)
    RUNTIME.cudaStreamEndCapture(PER_THREAD, byref(graph))
    expect(captured() == 0, "and is no more")
    nodes = c_void_p()
    DRIVER.cuGraphGetNodes(graph, None, byref(nodes))
    expect(nodes.value == 3, "three kernels")
    DRIVER.cuGraphInstantiateWithFlags(byref(run), graph, 0)
    for step in range(5):
        DRIVER.cuGraphLaunch(run, PER_THREAD)
        DRIVER.cuGraphLaunch_ptsz(run, 0)
        RUNTIME.cudaLaunchKernel_ptsz(mix, one, many, pack(area, step, N), 0, 0)
    RUNTIME.cudaStreamSynchronize(PER_THREAD)
    done_by.append(index)
    DRIVER.cuGraphExecDestroy(run)
    DRIVER.cuGraphDestroy(graph)


RUNTIME.cudaSetDevice(0)
expect_error(RUNTIME, 900, "cudaStreamBeginCapture", None, THREAD_LOCAL)
expect_error(DRIVER, 900, "cuStreamBeginCapture_v2", 1, THREAD_LOCAL)
# One thread captures while the others work, and the other way round.
threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
# Only now: the legacy stream, which a read uses, waits for the threads' own ones, and must not while one is captured.
expect(sorted(done_by) == [0, 1, 2], "every thread came to its end")
for index in range(3):
    say(index, read(areas[index], 8 * N))
expect(captured() == 0, "this thread's stream was never captured")
RUNTIME.cudaLaunchKernel_ptsz(mix, one, many, pack(areas[0], 1, N), 0, 0)
RUNTIME.cudaStreamSynchronize(PER_THREAD)
say(read(areas[0], 8 * N))

# A blocking stream, as it is, keeps the legacy stream from being used while it is captured.
graph = c_void_p()
RUNTIME.cudaStreamBeginCapture(PER_THREAD, THREAD_LOCAL)
expect(RUNTIME.code("cudaMemsetAsync", areas[0], 0, 8, None) != 0, "not on the legacy stream")
expect_error(DRIVER, 901, "cuStreamEndCapture", PER_THREAD, byref(graph))
RUNTIME.code("cudaGetLastError")


# A thread that ends in the middle of a capture takes it with it.
def leave() -> None:
    RUNTIME.cudaSetDevice(0)
    RUNTIME.cudaStreamBeginCapture(PER_THREAD, THREAD_LOCAL)


for _ in range(3):
    leaving = threading.Thread(target=leave)
    leaving.start()
    leaving.join()
    expect(captured() == 0, "not this thread's")
# Python's join does not wait for the system's thread, with which the capture ends.
while RUNTIME.code("cudaMemset", areas[0], 1, 8) == 906:
    time.sleep(0.001)
RUNTIME.code("cudaGetLastError")
say(read(areas[0], 8 * N))
