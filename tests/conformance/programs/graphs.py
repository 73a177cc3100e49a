"""CUDA graphs: captured from streams, built by hand, changed, nested, launched many times with work in between."""

import ctypes
from collections.abc import Callable
from ctypes import c_int

from calls import (
    D2D,
    D2H,
    DRIVER,
    H2D,
    RUNTIME,
    Dim3,
    byref,
    c_size_t,
    c_uint,
    c_void_p,
    event,
    expect,
    function_of,
    kernel,
    launch,
    left_out,
    malloc,
    pack,
    pattern,
    read,
    say,
    stream,
    write,
)

N = 2000
fill, mix, copy_bytes = kernel("fill"), kernel("mix"), kernel("copy_bytes")
x, y = malloc(8 * N), malloc(8 * N)


def put(pointer: int, data: bytes) -> None:
    write(pointer, data)
    RUNTIME.cudaDeviceSynchronize()  # the copy is on another stream than the graphs


def capture(where: c_void_p, body: Callable[[], None], mode: int = 0) -> c_void_p:
    graph = c_void_p()
    DRIVER.cuStreamBeginCapture_v2(where, mode)
    body()
    DRIVER.cuStreamEndCapture(where, byref(graph))
    return graph


def executable(graph: c_void_p, flags: int = 0) -> c_void_p:
    made = c_void_p()
    DRIVER.cuGraphInstantiateWithFlags(byref(made), graph, flags)
    return made


def nodes(graph: c_void_p) -> list[int]:
    count = c_size_t()
    DRIVER.cuGraphGetNodes(graph, None, byref(count))
    all_of_them = (c_void_p * count.value)()
    DRIVER.cuGraphGetNodes(graph, all_of_them, byref(count))
    return [node or 0 for node in all_of_them]


def kinds(graph: c_void_p) -> list[int]:
    found = []
    for node in nodes(graph):
        kind = c_int()
        DRIVER.cuGraphNodeGetType(node, byref(kind))
        found.append(kind.value)
    return found


first, second = stream(), stream()


# Captured from two streams that fork and join; nothing happens until it is launched.
def two_streams() -> None:
    forked, joined = event(), event()
    launch(fill, 4, 32, x, 7, N, stream=first)
    RUNTIME.cudaEventRecord(forked, first)
    RUNTIME.cudaStreamWaitEvent(second, forked, 0)
    RUNTIME.cudaMemcpyAsync(y, x, 8 * N, D2D, second)
    launch(mix, 4, 32, y, 3, N, stream=second)
    RUNTIME.cudaEventRecord(joined, second)
    launch(mix, 4, 32, x, 5, N, stream=first)
    RUNTIME.cudaStreamWaitEvent(first, joined, 0)
    RUNTIME.cudaMemsetAsync(x, 1, 8, first)
    status = c_int()
    DRIVER.cuStreamIsCapturing(second, byref(status))
    say("second stream", status.value)


put(x, bytes(8 * N))
graph = capture(first, two_streams)
expect(read(x, 8 * N) == bytes(8 * N), "a capture does nothing")
say("kinds", kinds(graph))
count = c_size_t()
DRIVER.cuGraphGetEdges_v2(graph, None, None, None, byref(count))
say("edges", count.value)
run = executable(graph)
DRIVER.cuGraphDestroy(graph)  # the executable one does not need it
for step in range(40):
    DRIVER.cuGraphLaunch(run, first)
    launch(mix, 4, 32, x, step, N, stream=first)
    if step % 8 == 3:
        RUNTIME.cudaStreamSynchronize(first)
        say(step, read(x, 8 * N), read(y, 8 * N))
RUNTIME.cudaStreamSynchronize(first)
say("x", read(x, 8 * N), "y", read(y, 8 * N))


# A step that changes its own input, launched in a row; and the same recorded with a graph inside.
def step_body() -> None:
    launch(mix, 4, 32, x, 2, N, stream=first)
    launch(mix, 4, 32, y, 4, N, stream=first)


put(x, pattern(8 * N, 1))
put(y, pattern(8 * N, 2))
inner = capture(first, step_body, mode=2)
inner_run = executable(inner)


def twice() -> None:
    """The graph as a node, and then the same again."""
    state, number, into, node = c_int(), ctypes.c_uint64(), c_void_p(), c_void_p()
    DRIVER.cuStreamGetCaptureInfo_v2(first, byref(state), byref(number), byref(into), None, None)
    DRIVER.cuGraphAddChildGraphNode(byref(node), into, None, 0, inner)
    DRIVER.cuStreamUpdateCaptureDependencies(first, byref(node), 1, 1)
    step_body()


outer = capture(first, twice)
say("with a graph inside", kinds(outer))
outer_run = executable(outer)
for _ in range(60):
    DRIVER.cuGraphLaunch(outer_run, first)
    DRIVER.cuGraphLaunch(inner_run, first)
RUNTIME.cudaStreamSynchronize(first)
say("x", read(x, 8 * N), "y", read(y, 8 * N))


# Built by hand, then changed: one node of the executable graph, and all of it.
class KernelParams(ctypes.Structure):
    _fields_ = (
        ("function", c_void_p),
        ("grid", Dim3),
        ("block", Dim3),
        ("shared", c_uint),
        ("parameters", c_void_p),
        ("extra", c_void_p),
        ("kernel", c_void_p),
        ("context", c_void_p),
    )


class MemsetParams(ctypes.Structure):
    _fields_ = (
        ("to", ctypes.c_uint64),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("element", c_uint),
        ("width", c_size_t),
        ("height", c_size_t),
    )


def params(kernel: int, *arguments: object) -> KernelParams:
    packed = pack(*arguments)
    made = KernelParams(
        function_of(kernel), Dim3(4, 1, 1), Dim3(32, 1, 1), 0, ctypes.addressof(packed), None, None, None
    )
    made.packed = packed
    return made


context = c_void_p()
DRIVER.cuCtxGetCurrent(byref(context))


def by_hand(value: int) -> tuple[c_void_p, list[c_void_p]]:
    made = c_void_p()
    DRIVER.cuGraphCreate(byref(made), 0)
    a, b, c = c_void_p(), c_void_p(), c_void_p()
    DRIVER.cuGraphAddKernelNode_v2(byref(a), made, None, 0, byref(params(fill, x, value, N)))
    DRIVER.cuGraphAddMemsetNode(byref(b), made, byref(a), 1, byref(MemsetParams(x, 0, value, 4, 32, 1)), context)
    DRIVER.cuGraphAddKernelNode_v2(byref(c), made, byref(b), 1, byref(params(mix, x, 3, N)))
    return made, [a, b, c]


graph, (a, b, c) = by_hand(11)
got = KernelParams()
DRIVER.cuGraphKernelNodeGetParams_v2(a, byref(got))
values = (c_void_p * 3).from_address(got.parameters)
numbers = [ctypes.c_uint64.from_address(value or 0).value for value in values]
say("parameters", numbers[1:], got.grid.x)
run = executable(graph)
for value in range(20):
    DRIVER.cuGraphExecKernelNodeSetParams_v2(run, a, byref(params(fill, x, value, N)))
    DRIVER.cuGraphExecMemsetNodeSetParams(run, b, byref(MemsetParams(x, 0, value + 1, 4, 32, 1)), context)
    DRIVER.cuGraphLaunch(run, second)
    if value % 4 == 0:
        RUNTIME.cudaStreamSynchronize(second)
        say("changed", value, read(x, 8 * N))
DRIVER.cuGraphNodeSetEnabled(run, c, 0)
DRIVER.cuGraphLaunch(run, second)
RUNTIME.cudaStreamSynchronize(second)
say("without its last node", read(x, 8 * N))
DRIVER.cuGraphNodeSetEnabled(run, c, 1)
other = by_hand(99)[0]
info = (ctypes.c_uint64 * 3)()
DRIVER.cuGraphExecUpdate_v2(run, other, info)
DRIVER.cuGraphLaunch(run, second)
RUNTIME.cudaStreamSynchronize(second)
say("updated", read(x, 8 * N))
say("another shape", DRIVER.code("cuGraphExecUpdate_v2", run, inner, info), info[0] & 0xFFFFFFFF)

# Page-locked memory and host functions: read and written when the launch comes to it, each launch anew.
pointer = c_void_p()
RUNTIME.cudaHostAlloc(byref(pointer), 8 * N, 0)
host = (ctypes.c_uint64 * N).from_address(pointer.value or 0)
seen: list[int] = []
HostFunction = ctypes.CFUNCTYPE(None, c_void_p)
look = HostFunction(lambda data: seen.append(host[0] * 10 + (data or 0)))


def with_host() -> None:
    RUNTIME.cudaMemcpyAsync(x, pointer, 8 * N, H2D, first)
    launch(mix, 4, 32, x, 2, N, stream=first)
    RUNTIME.cudaMemcpyAsync(pointer, x, 8 * N, D2H, first)
    RUNTIME.cudaLaunchHostFunc(first, look, 1)
    launch(mix, 4, 32, y, 2, N, stream=first)
    RUNTIME.cudaLaunchHostFunc(first, look, 2)


run = executable(capture(first, with_host))
for step in range(25):
    for index in range(N):
        host[index] += step
    DRIVER.cuGraphLaunch(run, first)
    RUNTIME.cudaStreamSynchronize(first)
expect(len(seen) == 50, f"50 calls, not {len(seen)}")
say("host", bytes(host), seen[-4:], read(y, 8 * N))

# Events outside: waited for before the graph, recorded after it.
outside, inside = event(), event()


def with_events() -> None:
    DRIVER.cuStreamWaitEvent(first, outside, 1)
    launch(copy_bytes, 4, 32, y, x, 8 * N, stream=first)
    DRIVER.cuEventRecordWithFlags(inside, first, 1)


run = executable(capture(first, with_events))
for step in range(15):
    launch(fill, 4, 32, x, step, N, stream=second)
    RUNTIME.cudaEventRecord(outside, second)
    DRIVER.cuGraphLaunch(run, first)
    RUNTIME.cudaEventSynchronize(inside)
    RUNTIME.cudaStreamWaitEvent(second, inside, 0)
say("events", read(y, 8 * N))

# Memory of a graph's own.
address = c_void_p()


def with_memory() -> None:
    DRIVER.cuMemAllocAsync(byref(address), 8 * N, first)
    launch(fill, 4, 32, address.value, 5, N, stream=first)
    launch(copy_bytes, 4, 32, y, address.value, 8 * N, stream=first)
    DRIVER.cuMemFreeAsync(address, first)


graph = capture(first, with_memory)
say("kinds", kinds(graph))
run = executable(graph)
for _ in range(5):
    DRIVER.cuGraphLaunch(run, first)
RUNTIME.cudaStreamSynchronize(first)
say("memory", read(y, 8 * N))
DRIVER.cuGraphExecDestroy(run)
DRIVER.cuGraphDestroy(graph)
if not left_out("what the driver does with a destroyed graph is undefined"):
    expect(DRIVER.code("cuGraphLaunch", run, first) != 0, "a destroyed graph cannot be launched")
