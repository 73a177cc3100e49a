"""What is in order without an event of the program's: launches of one executable graph, and copies from registered
memory that a host function writes."""

import ctypes
import mmap
import time

from calls import (
    D2D,
    D2H,
    DRIVER,
    H2D,
    RUNTIME,
    byref,
    c_void_p,
    expect,
    kernel,
    launch,
    malloc,
    pattern,
    read,
    say,
    stream,
    write,
)

N = 2000
ROUNDS = 2000
mix = kernel("mix")
x, y = malloc(8 * N), malloc(8 * N)
one, two = stream(), stream()
pinned = c_void_p()
RUNTIME.cudaHostAlloc(byref(pinned), 8 * N, 0)


def executable(with_program: bool) -> c_void_p:
    """A slow step on x; with a copy to page-locked memory at its end, if the program is to take part."""
    graph, run = c_void_p(), c_void_p()
    DRIVER.cuStreamBeginCapture_v2(one, 0)
    launch(mix, 4, 32, x, ROUNDS, N, stream=one)
    if with_program:
        RUNTIME.cudaMemcpyAsync(pinned, x, 8 * N, D2H, one)
    DRIVER.cuStreamEndCapture(one, byref(graph))
    DRIVER.cuGraphInstantiateWithFlags(byref(run), graph, 0)
    return run


write(x, pattern(8 * N, 1))
for _ in range(2):
    launch(mix, 4, 32, x, ROUNDS, N)
expected = read(x, 8 * N)
for with_program in (False, True):
    run = executable(with_program)
    write(x, pattern(8 * N, 1))
    RUNTIME.cudaDeviceSynchronize()
    DRIVER.cuGraphLaunch(run, one)
    DRIVER.cuGraphLaunch(run, two)
    RUNTIME.cudaMemcpyAsync(y, x, 8 * N, D2D, two)
    RUNTIME.cudaStreamSynchronize(two)
    expect(read(y, 8 * N) == expected, "the second launch comes after the first, in another stream")
    DRIVER.cuGraphLaunch(run, one)
    RUNTIME.cudaDeviceSynchronize()
    DRIVER.cuGraphExecDestroy(run)
    say(read(x, 8 * N))

# Likewise when the stream of the launch before is gone.
run = executable(False)
write(x, pattern(8 * N, 1))
RUNTIME.cudaDeviceSynchronize()
third = stream()
DRIVER.cuGraphLaunch(run, third)
RUNTIME.cudaStreamDestroy(third)
DRIVER.cuGraphLaunch(run, two)
RUNTIME.cudaMemcpyAsync(y, x, 8 * N, D2D, two)
RUNTIME.cudaStreamSynchronize(two)
expect(read(y, 8 * N) == expected, "the stream of the first launch is gone")

# Registered memory: what is there when the stream comes to the copy.
pages = mmap.mmap(-1, 8 * N)
own = ctypes.addressof(ctypes.c_ubyte.from_buffer(pages))
RUNTIME.cudaHostRegister(own, 8 * N, 0)
data = pattern(8 * N, 2)


def late(_: int | None) -> None:
    time.sleep(0.05)
    ctypes.memmove(own, data, 8 * N)


HostFunction = ctypes.CFUNCTYPE(None, c_void_p)
writes = HostFunction(late)
for _ in range(3):
    ctypes.memset(own, 0, 8 * N)
    RUNTIME.cudaLaunchHostFunc(one, writes, 0)
    RUNTIME.cudaMemcpyAsync(x, own, 8 * N, H2D, one)
    RUNTIME.cudaStreamSynchronize(one)
    expect(read(x, 8 * N) == data, "a copy after a host function")
RUNTIME.cudaHostUnregister(own)
say(read(x, 8 * N))


# Page-locked memory, and the null stream, which waits for others: a blocking copy reads what they have written.
def late_to_pinned(_: int | None) -> None:
    time.sleep(0.05)
    ctypes.memmove(pinned, data, 8 * N)


writes_pinned = HostFunction(late_to_pinned)
waited_for = stream(0)
for size in (64, 4096, 8 * N):
    ctypes.memset(pinned, 0, 8 * N)
    write(x, bytes(8 * N))
    RUNTIME.cudaDeviceSynchronize()
    RUNTIME.cudaLaunchHostFunc(waited_for, writes_pinned, 0)
    RUNTIME.cudaMemcpy(x, pinned, size, H2D)
    expect(read(x, size) == data[:size], f"a blocking copy of {size} bytes after a host function of another stream")
    say(read(x, 8 * N))

# A wait for an event is work of the legacy stream, too, though the event is done: what blocking streams do next comes
# after what they did before.
before, after, apart = stream(0), stream(0), stream()
done, ordered = c_void_p(), c_void_p()
for event in (done, ordered):
    RUNTIME.cudaEventCreateWithFlags(byref(event), 2)
RUNTIME.cudaEventRecord(done, apart)
RUNTIME.cudaEventSynchronize(done)
for legacy in (0, 1):
    write(x, pattern(8 * N, 1))
    RUNTIME.cudaDeviceSynchronize()
    launch(mix, 4, 32, x, ROUNDS, N, stream=before)
    RUNTIME.cudaStreamWaitEvent(legacy, done, 0)
    RUNTIME.cudaEventRecord(ordered, after)
    RUNTIME.cudaStreamWaitEvent(apart, ordered, 0)
    launch(mix, 4, 32, x, ROUNDS, N, stream=apart)
    RUNTIME.cudaDeviceSynchronize()
    expect(read(x, 8 * N) == expected, f"a wait in the legacy stream {legacy} orders the streams of its context")
    say(read(x, 8 * N))
