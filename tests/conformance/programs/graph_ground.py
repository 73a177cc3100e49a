"""An executable graph whose memory is freed between two launches: at the next one there is memory at the same address
again, or the graph has got other memory. So it is in programs whose allocator gives memory back after each step.

Once in a stream of the graph's own device, once in one of another device, which is current then."""

from ctypes import byref, c_uint64, c_void_p

from calls import DRIVER, RUNTIME, expect, kernel, left_out, pattern, read, say, stop_here, stream, write
from nodes import MemsetParams, current_context, executable, kernel_params, new_graph

N = 256
BYTES = 8 * N
mix = kernel("mix")


def filled(address: int, value: int) -> MemsetParams:
    """The second half of it."""
    return MemsetParams(address + BYTES // 2, 0, value, 4, N // 2, 1)


def story(owner: int, launcher: int) -> None:
    """The graph and its memory are the one device's, the stream in which it is launched the other's."""
    RUNTIME.cudaSetDevice(launcher)
    launches = stream()
    RUNTIME.cudaSetDevice(owner)
    where, context = stream(), current_context()

    def take(seed: int) -> int:
        """Memory in stream order, with content."""
        address = c_uint64()
        DRIVER.cuMemAllocAsync(byref(address), BYTES, where)
        RUNTIME.cudaStreamSynchronize(where)
        write(address.value, pattern(BYTES, seed))
        RUNTIME.cudaDeviceSynchronize()
        return address.value

    def give(address: int) -> None:
        DRIVER.cuMemFreeAsync(c_uint64(address), where)
        RUNTIME.cudaStreamSynchronize(where)

    def run() -> None:
        RUNTIME.cudaSetDevice(launcher)
        DRIVER.cuGraphLaunch(made, launches)
        RUNTIME.cudaStreamSynchronize(launches)
        RUNTIME.cudaSetDevice(owner)

    graph, first, second = new_graph(), c_void_p(), c_void_p()
    x = take(1)
    DRIVER.cuGraphAddMemsetNode(byref(first), graph, None, 0, byref(filled(x, 7)), context)
    DRIVER.cuGraphAddKernelNode_v2(byref(second), graph, byref(first), 1, byref(kernel_params(mix, x, 3, N)))
    made = executable(graph)
    run()
    say("at first", read(x, BYTES))

    for step in range(4):
        give(x)
        stop_here()  # nothing is there
        again = take(step)
        if again != x:
            expect(left_out("a pool need not give the same memory again"), "an allocator gives the same memory again")
            x = again
            DRIVER.cuGraphExecMemsetNodeSetParams(made, first, byref(filled(x, 7)), context)
            DRIVER.cuGraphExecKernelNodeSetParams_v2(made, second, byref(kernel_params(mix, x, 3, N)))
        run()
        say("the same again", read(x, BYTES))

    for step in range(3):
        before, x = x, take(10 + step)
        give(before)
        stop_here()  # the graph has memory that is gone
        other = filled(x, step)
        DRIVER.cuGraphExecMemsetNodeSetParams(made, first, byref(other), context)
        DRIVER.cuGraphExecKernelNodeSetParams_v2(made, second, byref(kernel_params(mix, x, step, N)))
        run()
        say("another", read(x, BYTES))

    give(x)
    stop_here()
    DRIVER.cuGraphExecDestroy(made)
    say("destroyed without ground")


story(0, 0)
story(1, 0)
