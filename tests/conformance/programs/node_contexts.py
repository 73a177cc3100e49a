"""Nodes' parameters are set and requested while another device is current: a function's context is where it runs, a
kernel's the one that is named or the current one, and an executable graph's kernels stay where they are."""

import ctypes
from ctypes import byref, c_int, c_uint64, c_void_p

import nodes
from calls import DRIVER, RUNTIME, c_char_p, expect, expect_error, image, kernel, malloc, read, say, stream, write
from nodes import DEVICE, Copy, KernelParams, MemsetParams, NodeParams, Side, executable, function_params, new_graph

N = 200
BYTES = 8 * N
contexts, areas, functions, streams = [], [], [], []
for ordinal in range(2):
    RUNTIME.cudaSetDevice(ordinal)
    contexts.append(nodes.current_context())
    areas.append([malloc(BYTES), malloc(BYTES)])
    streams.append(stream())
    module, found = c_void_p(), c_void_p()
    DRIVER.cuModuleLoadData(byref(module), c_char_p(image()))
    DRIVER.cuModuleGetFunction(byref(found), module, c_char_p(b"fill"))
    functions.append(found.value or 0)
fill = kernel("fill")  # of no context


def run(graph: c_void_p) -> None:
    """In a stream of the first device."""
    RUNTIME.cudaSetDevice(0)
    DRIVER.cuGraphLaunch(graph, streams[0])
    RUNTIME.cudaStreamSynchronize(streams[0])


def first_of(area: int) -> int:
    return int.from_bytes(read(area, 8), "little")


def of_kernel(context: c_void_p | None, *arguments: int) -> KernelParams:
    """The parameters of a kernel that belongs to no context."""
    made = function_params(0, *arguments)
    made.kernel, made.context = fill, context
    return made


def generic(params: KernelParams) -> NodeParams:
    made = NodeParams(nodes.KERNEL)
    made.of.kernel = params
    made.keep = params
    return made


def add(graph: c_void_p, params: KernelParams) -> c_void_p:
    node = c_void_p()
    DRIVER.cuGraphAddKernelNode_v2(byref(node), graph, None, 0, byref(params))
    return node


# Functions, each of its own context, added and set while the other one is current.
for owner in range(2):
    other = 1 - owner
    x, _ = areas[owner]
    RUNTIME.cudaSetDevice(other)
    graph = new_graph()
    node = add(graph, function_params(functions[owner], x, 1, N))
    run_of = executable(graph)
    for step in range(12):
        RUNTIME.cudaSetDevice(step % 2)
        params = function_params(functions[owner], x, 100 * owner + step, N)
        if step % 3 == 2:
            DRIVER.cuGraphExecNodeSetParams(run_of, node, byref(generic(params)))
        elif step % 3 == 1:
            params.context = contexts[other]  # which is ignored
            DRIVER.cuGraphExecKernelNodeSetParams_v2(run_of, node, byref(params))
        else:
            DRIVER.cuGraphExecKernelNodeSetParams(run_of, node, byref(params))
        run(run_of)
        expect(first_of(x) == 100 * owner + step, f"{first_of(x)} on {owner} in step {step}")
        say("function", owner, step, read(x, BYTES))
    RUNTIME.cudaSetDevice(other)
    DRIVER.cuGraphKernelNodeSetParams_v2(node, byref(function_params(functions[owner], x, 4000, N)))
    got = KernelParams()
    DRIVER.cuGraphKernelNodeGetParams_v2(node, byref(got))
    pointers = (c_void_p * 3).from_address(got.parameters)
    expect(got.function == functions[owner], "its own function")
    say("requested", ctypes.c_uint64.from_address(pointers[1] or 0).value)
    DRIVER.cuGraphNodeSetParams(node, byref(generic(function_params(functions[owner], x, 5000, N))))
    DRIVER.cuGraphExecDestroy(run_of)
    run_of = executable(graph)
    run(run_of)
    say("set in the graph", first_of(x))
    # The other context's function is none for it, whoever is current.
    y, _ = areas[other]
    stranger = function_params(functions[other], y, 1, N)
    expect_error(DRIVER, 1, "cuGraphExecKernelNodeSetParams_v2", run_of, node, byref(stranger))
    another = new_graph()
    add(another, stranger)
    info = (c_uint64 * 3)()
    expect_error(DRIVER, 910, "cuGraphExecUpdate_v2", run_of, another, info)
    say("updated", info[0] & 0xFFFFFFFF)
    run(run_of)
    expect(first_of(x) == 5000, "it is as it was")

# A kernel of no context: the named one, or the current one.
(x, y), (z, w) = areas
for owner in range(2):
    area = areas[owner][0]
    RUNTIME.cudaSetDevice(1 - owner)
    graph = new_graph()
    node = add(graph, of_kernel(contexts[owner], area, 7, N))
    run_of = executable(graph)
    for step in range(6):
        RUNTIME.cudaSetDevice(step % 2)
        context = None if step % 2 == owner else contexts[owner]
        params = of_kernel(context, area, 10 * step + owner, N)
        if step < 3:
            DRIVER.cuGraphExecKernelNodeSetParams_v2(run_of, node, byref(params))
        else:
            DRIVER.cuGraphExecNodeSetParams(run_of, node, byref(generic(params)))
        run(run_of)
        say("kernel", owner, step, read(area, BYTES))
    RUNTIME.cudaSetDevice(1 - owner)
    elsewhere = of_kernel(None, areas[1 - owner][0], 1, N)
    expect_error(DRIVER, 1, "cuGraphExecKernelNodeSetParams_v2", run_of, node, byref(elsewhere))
    expect_error(DRIVER, 1, "cuGraphExecNodeSetParams", run_of, node, byref(generic(elsewhere)))
    # In a graph that is not executable it goes where it is instructed to.
    DRIVER.cuGraphKernelNodeSetParams_v2(node, byref(of_kernel(None, areas[1 - owner][0], 77 + owner, N)))
    moved = executable(graph)
    run(moved)
    say("moved", first_of(areas[1 - owner][0]))

# What has no function: where it is done its memory says.
graph, copy, memset = new_graph(), c_void_p(), c_void_p()
RUNTIME.cudaSetDevice(0)
there = Copy(Side(type=DEVICE, device=z), Side(type=DEVICE, device=w), BYTES, 1, 1)
DRIVER.cuGraphAddMemcpyNode(byref(copy), graph, None, 0, byref(there), contexts[1])
DRIVER.cuGraphAddMemsetNode(byref(memset), graph, byref(copy), 1, byref(MemsetParams(z, 0, 1, 4, N, 1)), contexts[1])
run_of = executable(graph)
for step in range(6):
    RUNTIME.cudaSetDevice(step % 2)
    write(z, bytes([step]) * BYTES)
    RUNTIME.cudaDeviceSynchronize()  # the graph's stream does not wait for the one of the copy
    DRIVER.cuGraphExecMemsetNodeSetParams(run_of, memset, byref(MemsetParams(z, 0, step, 4, N, 1)), contexts[1])
    back = Copy(Side(type=DEVICE, device=z, x=8), Side(type=DEVICE, device=w), BYTES - 8, 1, 1)
    DRIVER.cuGraphExecMemcpyNodeSetParams(run_of, copy, byref(back), contexts[1])
    DRIVER.cuGraphMemcpyNodeSetParams(copy, byref(back))
    DRIVER.cuGraphMemsetNodeSetParams(memset, byref(MemsetParams(z, 0, step, 4, N, 1)))
    run(run_of)
    say("copied", step, read(w, BYTES), read(z, BYTES))
count = c_int()
RUNTIME.cudaGetDevice(byref(count))
say("current", count.value, first_of(x))
