"""What is not allowed while a stream is captured, and what an error does to the capture."""

from ctypes import c_int

from calls import (
    DRIVER,
    H2D,
    RUNTIME,
    byref,
    c_char_p,
    c_size_t,
    c_void_p,
    event,
    expect,
    expect_error,
    kernel,
    launch,
    left_out,
    malloc,
    read,
    say,
    stream,
    write,
)

N = 100
fill, mix = kernel("fill"), kernel("mix")
x = malloc(8 * N)

UNSUPPORTED, INVALIDATED, MERGE, UNMATCHED, UNJOINED, ISOLATION, IMPLICIT, CAPTURED_EVENT = range(900, 908)
GLOBAL, THREAD, RELAXED = range(3)


a, b, blocking = stream(), stream(), stream(0)
graph = c_void_p()


def status(where: c_void_p) -> int:
    found = c_int()
    DRIVER.cuStreamIsCapturing(where, byref(found))
    return found.value


# It ends with what was begun.
expect_error(DRIVER, 401, "cuStreamEndCapture", a, byref(graph))
expect_error(DRIVER, UNSUPPORTED, "cuStreamBeginCapture_v2", None, GLOBAL)
DRIVER.cuStreamBeginCapture_v2(a, GLOBAL)
expect_error(DRIVER, 401, "cuStreamBeginCapture_v2", a, GLOBAL)
DRIVER.cuStreamEndCapture(a, byref(graph))
expect(bool(graph.value), "an empty graph is a graph")

# Waiting breaks it.
for name in ("cuStreamSynchronize", "cuStreamQuery"):
    DRIVER.cuStreamBeginCapture_v2(a, RELAXED)
    expect_error(DRIVER, UNSUPPORTED, name, a)
    say("status", status(a))
    expect(RUNTIME.code("cudaStreamWaitEvent", a, event(), 0) != 0, "no work for a broken capture")
    expect_error(DRIVER, INVALIDATED, "cuStreamEndCapture", a, byref(graph))
    say("status", status(a))
DRIVER.cuStreamBeginCapture_v2(a, RELAXED)
expect_error(DRIVER, UNSUPPORTED, "cuCtxSynchronize")
expect_error(DRIVER, INVALIDATED, "cuStreamEndCapture", a, byref(graph))

# Allocating does, unless the thread says that it knows what it does.
pointer = c_void_p()
DRIVER.cuStreamBeginCapture_v2(a, GLOBAL)
mode = c_int(RELAXED)
DRIVER.cuThreadExchangeStreamCaptureMode(byref(mode))
say("mode", mode.value)
DRIVER.cuMemAlloc_v2(byref(pointer), 1000)
DRIVER.cuThreadExchangeStreamCaptureMode(byref(mode))
expect_error(DRIVER, UNSUPPORTED, "cuMemAlloc_v2", byref(pointer), 1000)
expect_error(DRIVER, INVALIDATED, "cuStreamEndCapture", a, byref(graph))

# The legacy stream, while a stream that waits for it is captured; one that does not is fine.
DRIVER.cuStreamBeginCapture_v2(blocking, RELAXED)
expect(RUNTIME.code("cudaMemsetAsync", x, 0, 8, None) != 0, "not on the legacy stream")
expect_error(DRIVER, INVALIDATED, "cuStreamEndCapture", blocking, byref(graph))
DRIVER.cuStreamBeginCapture_v2(a, RELAXED)
write(x, bytes(8 * N))
DRIVER.cuStreamEndCapture(a, byref(graph))
RUNTIME.cudaDeviceSynchronize()

# Events: what is inside is not to be requested outside, and what is outside cannot be waited for inside.
inside, outside = event(), event()
RUNTIME.cudaEventRecord(outside, b)
DRIVER.cuStreamBeginCapture_v2(a, RELAXED)
RUNTIME.cudaEventRecord(inside, a)
expect_error(DRIVER, CAPTURED_EVENT, "cuEventQuery", inside)
expect_error(DRIVER, INVALIDATED, "cuStreamEndCapture", a, byref(graph))
DRIVER.cuStreamBeginCapture_v2(a, RELAXED)
expect_error(DRIVER, ISOLATION, "cuStreamWaitEvent", a, outside, 0)
expect_error(DRIVER, INVALIDATED, "cuStreamEndCapture", a, byref(graph))

# A stream that joined must come back; and two captures do not mix.
DRIVER.cuStreamBeginCapture_v2(a, RELAXED)
RUNTIME.cudaEventRecord(inside, a)
RUNTIME.cudaStreamWaitEvent(b, inside, 0)
launch(fill, 1, 32, x, 3, N, stream=b)
say("joined", status(b))
expect_error(DRIVER, UNMATCHED, "cuStreamEndCapture", b, byref(graph))
DRIVER.code("cuStreamEndCapture", a, byref(graph))
DRIVER.cuStreamBeginCapture_v2(a, RELAXED)
RUNTIME.cudaEventRecord(inside, a)
RUNTIME.cudaStreamWaitEvent(b, inside, 0)
launch(fill, 1, 32, x, 3, N, stream=b)
expect_error(DRIVER, UNJOINED, "cuStreamEndCapture", a, byref(graph))
say("left", status(a), status(b))
DRIVER.cuStreamBeginCapture_v2(a, RELAXED)
DRIVER.cuStreamBeginCapture_v2(b, RELAXED)
RUNTIME.cudaEventRecord(inside, a)
expect_error(DRIVER, MERGE, "cuStreamWaitEvent", b, inside, 0)
expect_error(DRIVER, INVALIDATED, "cuStreamEndCapture", a, byref(graph))
expect_error(DRIVER, INVALIDATED, "cuStreamEndCapture", b, byref(graph))

# Pageable memory has nobody who keeps it until the launch.
if not left_out("the driver captures copies of pageable memory"):
    DRIVER.cuStreamBeginCapture_v2(a, RELAXED)
    expect(RUNTIME.code("cudaMemcpyAsync", x, c_char_p(bytes(80)), 80, H2D, a) != 0, "not from pageable memory")
    expect_error(DRIVER, INVALIDATED, "cuStreamEndCapture", a, byref(graph))

# A graph is no part of what is captured: a child node would be.
made, run = c_void_p(), c_void_p()
DRIVER.cuGraphCreate(byref(made), 0)
DRIVER.cuGraphInstantiateWithFlags(byref(run), made, 0)
DRIVER.cuStreamBeginCapture_v2(a, RELAXED)
expect_error(DRIVER, UNSUPPORTED, "cuGraphLaunch", run, a)
expect_error(DRIVER, INVALIDATED, "cuStreamEndCapture", a, byref(graph))
DRIVER.cuGraphExecDestroy(run)
DRIVER.cuGraphDestroy(made)

# After all of that streams work as before, and can be captured.
launch(fill, 1, 32, x, 3, N, stream=a)
RUNTIME.cudaStreamSynchronize(a)
say(read(x, 8 * N))
for _ in range(30):
    DRIVER.cuStreamBeginCapture_v2(a, GLOBAL)
    launch(mix, 1, 32, x, 3, N, stream=a)
    DRIVER.cuStreamEndCapture(a, byref(graph))
    run = c_void_p()
    DRIVER.cuGraphInstantiateWithFlags(byref(run), graph, 0)
    DRIVER.cuGraphLaunch(run, a)
    DRIVER.cuGraphExecDestroy(run)
    count = c_size_t()
    DRIVER.cuGraphGetNodes(graph, None, byref(count))
    expect(count.value == 1, "one node")
    DRIVER.cuGraphDestroy(graph)
RUNTIME.cudaStreamSynchronize(a)
say(read(x, 8 * N))
