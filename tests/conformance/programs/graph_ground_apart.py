"""As in graph_ground, of two devices: the graph is the second one's, and is launched in a stream of the first one,
which is current then. Its memory comes and goes between launches."""

from ctypes import byref, c_uint64, c_void_p

from calls import DRIVER, RUNTIME, expect, kernel, pattern, read, say, stream, write
from nodes import MemsetParams, current_context, executable, kernel_params, new_graph

N = 256
BYTES = 8 * N
mix = kernel("mix")
RUNTIME.cudaSetDevice(1)
there, context = stream(), current_context()
RUNTIME.cudaSetDevice(0)
here = stream()
stopped: list[int] = []


def take(seed: int) -> int:
    """Memory of the second device in stream order, with content."""
    address = c_uint64()
    RUNTIME.cudaSetDevice(1)
    DRIVER.cuMemAllocAsync(byref(address), BYTES, there)
    RUNTIME.cudaStreamSynchronize(there)
    write(address.value, pattern(BYTES, seed))
    RUNTIME.cudaDeviceSynchronize()
    RUNTIME.cudaSetDevice(0)
    return address.value


def give(address: int) -> None:
    DRIVER.cuMemFreeAsync(c_uint64(address), there)
    RUNTIME.cudaStreamSynchronize(there)


def filled(address: int, value: int) -> MemsetParams:
    """The second half of it."""
    return MemsetParams(address + BYTES // 2, 0, value, 4, N // 2, 1)


RUNTIME.cudaSetDevice(1)
graph, first, second = new_graph(), c_void_p(), c_void_p()
x = take(1)
RUNTIME.cudaSetDevice(1)
DRIVER.cuGraphAddMemsetNode(byref(first), graph, None, 0, byref(filled(x, 7)), context)
DRIVER.cuGraphAddKernelNode_v2(byref(second), graph, byref(first), 1, byref(kernel_params(mix, x, 3, N)))
made = executable(graph)
RUNTIME.cudaSetDevice(0)


def run() -> None:
    """In the other device's stream."""
    DRIVER.cuGraphLaunch(made, here)
    RUNTIME.cudaStreamSynchronize(here)


run()
say("at first", read(x, BYTES))

for step in range(4):
    give(x)
    # Nothing is there. A test that stops every few lines stops here, too.
    stopped.append(step)
    stopped.append(step)
    stopped.append(step)
    stopped.append(step)
    stopped.append(step)
    stopped.append(step)
    again = take(step)
    expect(again == x, "an allocator gives the same memory again")
    run()
    say("the same again", read(x, BYTES))

for step in range(3):
    before, x = x, take(10 + step)
    give(before)
    # The graph has memory that is gone.
    stopped.append(step)
    stopped.append(step)
    stopped.append(step)
    stopped.append(step)
    stopped.append(step)
    stopped.append(step)
    other = filled(x, step)
    RUNTIME.cudaSetDevice(1)
    DRIVER.cuGraphExecMemsetNodeSetParams(made, first, byref(other), context)
    DRIVER.cuGraphExecKernelNodeSetParams_v2(made, second, byref(kernel_params(mix, x, step, N)))
    RUNTIME.cudaSetDevice(0)
    run()
    say("another", read(x, BYTES))

give(x)
DRIVER.cuGraphExecDestroy(made)
say("destroyed without ground")
