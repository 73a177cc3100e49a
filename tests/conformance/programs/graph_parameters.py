"""Every way to change a node's parameters: in a graph, in an executable one, in a graph inside, one by one or all."""

import ctypes
from ctypes import byref, c_int, c_uint, c_void_p

import nodes
from calls import (
    DRIVER,
    RUNTIME,
    event,
    expect,
    expect_error,
    kernel,
    launch,
    left_out,
    malloc,
    pattern,
    read,
    say,
    stream,
    write,
)
from nodes import (
    DEVICE,
    PINNED,
    BatchParams,
    Copy,
    HostParams,
    KernelParams,
    MemoryOperation,
    MemsetParams,
    NodeParams,
    Side,
    add_child,
    add_kernel,
    current_context,
    executable,
    kernel_params,
    new_graph,
)

N = 512
BYTES = 8 * N
fill, mix, add = kernel("fill"), kernel("mix"), kernel("add")
x, y, z = malloc(BYTES), malloc(BYTES), malloc(BYTES)
where = stream()
context = current_context()
pointer = c_void_p()
RUNTIME.cudaHostAlloc(byref(pointer), BYTES, 0)
pinned = pointer.value or 0
node = c_void_p()


def put(to: int, data: bytes) -> None:
    write(to, data)
    RUNTIME.cudaDeviceSynchronize()


def run(graph: c_void_p) -> None:
    DRIVER.cuGraphLaunch(graph, where)
    RUNTIME.cudaStreamSynchronize(where)


def device(address: int, pitch: int = 0, height: int = 0, offset: int = 0) -> Side:
    return Side(x=offset, type=DEVICE, device=address, pitch=pitch, height=height)


def host(address: int, pitch: int = 0, height: int = 0) -> Side:
    return Side(type=PINNED, host=address, pitch=pitch, height=height)


def generic(kind: int, **params: object) -> NodeParams:
    made = NodeParams(kind)
    for name, value in params.items():
        setattr(made.of, name, value)
    made.keep = params  # what they point to
    return made


# Kernels: both forms, and another function than before.
graph = new_graph()
first = add_kernel(graph, [], fill, x, 1, N)
second = add_kernel(graph, [first], add, x, 1, N)
run_of = executable(graph)
for value in range(8):
    DRIVER.cuGraphExecKernelNodeSetParams(run_of, first, byref(kernel_params(fill, x, value, N)))
    function, argument = (mix, 2) if value % 2 else (add, 5)
    DRIVER.cuGraphExecKernelNodeSetParams_v2(run_of, second, byref(kernel_params(function, x, argument, N)))
    run(run_of)
    say("kernel", value, read(x, BYTES))
anything = generic(nodes.KERNEL, kernel=kernel_params(fill, x, 77, N))
DRIVER.cuGraphExecNodeSetParams(run_of, first, byref(anything))
run(run_of)
say("kernel, generic", read(x, BYTES))
if not left_out("the driver crashes at a handle that is none"):
    of_none = kernel_params(fill, x, 1, N)
    expect_error(DRIVER, 1, "cuGraphExecKernelNodeSetParams_v2", run_of, c_void_p(12345), byref(of_none))
expect_error(DRIVER, 1, "cuGraphExecMemsetNodeSetParams", run_of, first, byref(MemsetParams(x, 0, 1, 1, 1, 1)), context)
# In the graph: what is executable already stays as it is.
DRIVER.cuGraphKernelNodeSetParams(first, byref(kernel_params(fill, x, 1234, N)))
run(run_of)
say("as it was", read(x, 8))
got = KernelParams()
DRIVER.cuGraphKernelNodeGetParams_v2(first, byref(got))
parameters = (c_void_p * 3).from_address(got.parameters)
say("kernel's", ctypes.c_uint64.from_address(parameters[1] or 0).value, got.grid.x, got.block.x)
attribute = (c_int * 16)(-2)
DRIVER.cuGraphKernelNodeSetAttribute(first, 8, attribute)  # CU_LAUNCH_ATTRIBUTE_PRIORITY
DRIVER.cuGraphKernelNodeCopyAttributes(second, first)
seen = (c_int * 16)()
DRIVER.cuGraphKernelNodeGetAttribute(second, 8, seen)
say("priority", seen[0])

# Copies in one, two and three dimensions, within the device, to page-locked memory and from it.
graph = new_graph()
line = Copy(device(x), device(y), BYTES, 1, 1)
DRIVER.cuGraphAddMemcpyNode(byref(node), graph, None, 0, byref(line), context)
copy = c_void_p(node.value)
seen_copy = Copy()
DRIVER.cuGraphMemcpyNodeGetParams(copy, byref(seen_copy))
reported = [
    (c.source.device, c.source.type, c.to.device, c.to.type, c.width, c.rows, c.depth) for c in (seen_copy, line)
]
expect(reported[0] == reported[1], f"the copy's parameters are what they were set to: {reported}")
run_of = executable(graph)
copies = (
    ("line", line),
    ("part of a line", Copy(device(x, offset=64), device(y, offset=8), 128, 1, 1)),
    ("rows", Copy(device(x, 256, 16), device(y, 64, 16), 48, 10, 1)),
    ("box", Copy(device(x, 64, 8), device(y, 128, 4), 32, 4, 5)),
    ("from the host", Copy(host(pinned), device(y), BYTES, 1, 1)),
    ("rows from the host", Copy(host(pinned, 128, 8), device(y, 64, 8), 40, 8, 1)),
    ("to the host", Copy(device(x), host(pinned), BYTES, 1, 1)),
    ("box to the host", Copy(device(x, 64, 8), host(pinned, 64, 8), 24, 8, 4)),
    ("line again", line),
)
in_place_of_copies = not left_out(
    "the driver changes copies of one dimension within the device, and no others, where they are"
)
for step, (what, params) in enumerate(copies * 2):
    put(x, pattern(BYTES, step))
    put(y, bytes(BYTES))
    ctypes.memmove(pinned, pattern(BYTES, 100 + step), BYTES)
    anew = not in_place_of_copies and "line" not in what
    if anew:
        DRIVER.cuGraphMemcpyNodeSetParams(copy, byref(params))
        run_of = executable(graph)
    elif step < len(copies):
        DRIVER.cuGraphExecMemcpyNodeSetParams(run_of, copy, byref(params), context)
    else:
        anything = generic(nodes.MEMCPY, copy=nodes.CopyNodeParams(0, 0, context, params))
        DRIVER.cuGraphExecNodeSetParams(run_of, copy, byref(anything))
    run(run_of)
    say(what, read(y, BYTES), ctypes.string_at(pinned, BYTES))
    if anew:
        DRIVER.cuGraphMemcpyNodeSetParams(copy, byref(line))
        run_of = executable(graph)
DRIVER.cuGraphMemcpyNodeSetParams(copy, byref(copies[3][1]))
DRIVER.cuGraphMemcpyNodeGetParams(copy, byref(seen_copy))
say("copy's", seen_copy.width, seen_copy.rows, seen_copy.depth, seen_copy.to.pitch, seen_copy.source.height)

# Memsets of every width of element, with a value that is wider; of rows.
graph = new_graph()
DRIVER.cuGraphAddMemsetNode(byref(node), graph, None, 0, byref(MemsetParams(x, 0, 1, 1, 16, 1)), context)
memset = c_void_p(node.value)
run_of = executable(graph)
in_place = not left_out("the driver changes where and with what a memset fills, and not how much")
wide = not left_out("a value that is wider than the element is undefined")
for step, element in enumerate((1, 2, 4, 4, 2, 1)):
    height = 1 if step < 3 else 5
    value = 0xA1B2C3D4 + step if wide else 0xA1B2C3D4 + step & (1 << 8 * element) - 1
    fills = MemsetParams(x + 8 * step, 96, value, element, 11, height, context)
    put(x, bytes(BYTES))
    if not in_place:
        DRIVER.cuGraphMemsetNodeSetParams(memset, byref(fills))
        run_of = executable(graph)
    elif step % 2:
        DRIVER.cuGraphExecNodeSetParams(run_of, memset, byref(generic(nodes.MEMSET, memset=fills)))
    else:
        DRIVER.cuGraphExecMemsetNodeSetParams(run_of, memset, byref(fills), context)
    run(run_of)
    say("memset", element, height, read(x, BYTES))
    DRIVER.cuGraphMemsetNodeSetParams(memset, byref(fills))
    back = MemsetParams()
    DRIVER.cuGraphMemsetNodeGetParams(memset, byref(back))
    expect((back.element, back.width, back.height) == (element, 11, height), "what was set")

# Whether a node is done at all.
enabled = c_uint(7)
DRIVER.cuGraphNodeSetEnabled(run_of, memset, 0)
DRIVER.cuGraphNodeGetEnabled(run_of, memset, byref(enabled))
put(x, bytes(BYTES))
run(run_of)
expect(read(x, BYTES) == bytes(BYTES) and enabled.value == 0, "the node is not done")
DRIVER.cuGraphNodeSetEnabled(run_of, memset, 1)
run(run_of)
say("enabled again", read(x, BYTES))

# Host functions.
calls: list[int] = []
one = nodes.HostFunction(lambda data: calls.append(data or 0))
two = nodes.HostFunction(lambda data: calls.append(-(data or 0)))
graph = new_graph()
DRIVER.cuGraphAddHostNode(byref(node), graph, None, 0, byref(HostParams(ctypes.cast(one, c_void_p), 1)))
called = c_void_p(node.value)
run_of = executable(graph)
run(run_of)
DRIVER.cuGraphExecHostNodeSetParams(run_of, called, byref(HostParams(ctypes.cast(two, c_void_p), 2)))
run(run_of)
anything = generic(nodes.HOST, host=HostParams(ctypes.cast(one, c_void_p), 3))
DRIVER.cuGraphExecNodeSetParams(run_of, called, byref(anything))
run(run_of)
DRIVER.cuGraphHostNodeSetParams(called, byref(HostParams(ctypes.cast(two, c_void_p), 4)))
back_host = HostParams()
DRIVER.cuGraphHostNodeGetParams(called, byref(back_host))
say("host", calls, back_host.data)
expect(calls == [1, -2, 3], "each as it was set")

# Events: the ones outside that are recorded and waited for.
events = [event() for _ in range(4)]
other = stream()
graph = new_graph()
DRIVER.cuGraphAddEventWaitNode(byref(node), graph, None, 0, events[0])
wait = c_void_p(node.value)
middle = add_kernel(graph, [wait], add, x, 1, N)
DRIVER.cuGraphAddEventRecordNode(byref(node), graph, byref(middle), 1, events[1])
record = c_void_p(node.value)
run_of = executable(graph)
for step in range(6):
    before, after = events[step % 2 * 2], events[step % 2 * 2 + 1]
    if step % 3:
        DRIVER.cuGraphExecEventWaitNodeSetEvent(run_of, wait, before)
        DRIVER.cuGraphExecEventRecordNodeSetEvent(run_of, record, after)
    else:
        DRIVER.cuGraphExecNodeSetParams(run_of, wait, byref(generic(nodes.WAIT, event=before)))
        DRIVER.cuGraphExecNodeSetParams(run_of, record, byref(generic(nodes.RECORD, event=after)))
    launch(fill, 4, 32, x, step, N, stream=other)
    RUNTIME.cudaEventRecord(before, other)
    DRIVER.cuGraphLaunch(run_of, where)
    RUNTIME.cudaEventSynchronize(after)
    say("events", step, read(x, BYTES))
back_event = c_void_p()
DRIVER.cuGraphEventWaitNodeGetEvent(wait, byref(back_event))
expect(back_event.value == events[0].value, "the graph is as it was")

# Waits and writes of words, several in one node.
graph = new_graph()


def batch(value: int) -> BatchParams:
    operations = (MemoryOperation * 3)(
        MemoryOperation(nodes.WRITE_32, z, value, 0),
        MemoryOperation(nodes.WRITE_64, z + 8, value << 32 | 5, 0),
        MemoryOperation(nodes.WAIT_32, z, value, 0),
    )
    made = BatchParams(context, 3, ctypes.addressof(operations), 0)
    made.operations = operations
    return made


DRIVER.cuGraphAddBatchMemOpNode(byref(node), graph, None, 0, byref(batch(1)))
batched = c_void_p(node.value)
run_of = executable(graph)
for step in range(6):
    words = batch(20 + step)
    if step % 2:
        DRIVER.cuGraphExecBatchMemOpNodeSetParams(run_of, batched, byref(words))
    else:
        DRIVER.cuGraphExecNodeSetParams(run_of, batched, byref(generic(nodes.BATCH, batch=words)))
    run(run_of)
    say("batch", step, read(z, 16))
DRIVER.cuGraphBatchMemOpNodeSetParams(batched, byref(batch(9)))
back_batch = BatchParams()
DRIVER.cuGraphBatchMemOpNodeGetParams(batched, byref(back_batch))
say("batch's", back_batch.count, MemoryOperation.from_address(back_batch.all).value)
now = batch(50)
DRIVER.cuStreamBatchMemOp_v2(where, 3, ctypes.c_void_p(now.all), 0)
RUNTIME.cudaStreamSynchronize(where)
say("batch in a stream", read(z, 16))
nowhere = (MemoryOperation * 1)(MemoryOperation(nodes.WRITE_32, 4096, 1, 0))
expect_error(DRIVER, 1, "cuStreamBatchMemOp_v2", where, 1, nowhere, 0)


# Graphs inside: a copy, whose nodes keep the names they had; and the graph itself, which is given away.
def pair(value: int) -> tuple[c_void_p, c_void_p]:
    made = new_graph()
    begin = add_kernel(made, [], fill, x, value, N)
    return made, add_kernel(made, [begin], add, x, 1, N)


graph = new_graph()
child, _ = pair(10)
inside = add_child(graph, [], child)
run_of = executable(graph)
embedded = c_void_p()
DRIVER.cuGraphChildGraphNodeGetGraph(inside, byref(embedded))
several = (c_void_p * 2)()
DRIVER.cuGraphGetNodes(embedded, several, byref(ctypes.c_size_t(2)))
for step in range(6):
    if step % 2:
        DRIVER.cuGraphExecChildGraphNodeSetParams(run_of, inside, pair(20 + step)[0])
    else:
        replaced = generic(nodes.CHILD, child=nodes.ChildParams(pair(30 + step)[0], 0))
        DRIVER.cuGraphExecNodeSetParams(run_of, inside, byref(replaced))
    DRIVER.cuGraphExecKernelNodeSetParams_v2(run_of, several[1], byref(kernel_params(add, x, step, N)))
    run(run_of)
    say("child", step, read(x, BYTES))
expect_error(DRIVER, 910, "cuGraphExecChildGraphNodeSetParams", run_of, inside, new_graph())  # another shape

graph = new_graph()
child, last = pair(40)
deeper, deepest = pair(50)
add_child(child, [last], deeper, nodes.MOVE)
given = add_child(graph, [], child, nodes.MOVE)
DRIVER.cuGraphAddMemcpyNode(byref(node), child, byref(last), 1, byref(line), context)
moved_copy = c_void_p(node.value)
DRIVER.cuGraphChildGraphNodeGetGraph(given, byref(embedded))
expect(embedded.value == child.value, "the graph that was given away")
run_of = executable(graph)
lines = copies[: 3 if in_place_of_copies else 2]
for step in range(6):
    put(y, bytes(BYTES))
    DRIVER.cuGraphExecKernelNodeSetParams_v2(run_of, last, byref(kernel_params(add, x, 2 * step, N)))
    DRIVER.cuGraphExecKernelNodeSetParams_v2(run_of, deepest, byref(kernel_params(mix, x, step, N)))
    DRIVER.cuGraphExecMemcpyNodeSetParams(run_of, moved_copy, byref(lines[step % len(lines)][1]), context)
    run(run_of)
    say("moved", step, read(x, BYTES), read(z, 16))
if not left_out("what the driver says of a graph that was given away is undefined, and of one in itself"):
    expect_error(DRIVER, 1, "cuGraphDestroy", child)
    expect_error(DRIVER, 1, "cuGraphInstantiateWithFlags", byref(node), child, 0)
    expect_error(DRIVER, 1, "cuGraphAddChildGraphNode", byref(node), new_graph(), None, 0, child)
    circle = new_graph()
    itself = generic(nodes.CHILD, child=nodes.ChildParams(circle, nodes.MOVE))
    expect_error(DRIVER, 1, "cuGraphAddNode_v2", byref(node), circle, None, None, 0, byref(itself))

# All of it, in both forms.
graph = pair(60)[0]
run_of = executable(graph)
result, culprit = c_int(), c_void_p()
for step in range(6):
    other_graph = pair(70 + step)[0]
    if step % 2:
        DRIVER.cuGraphExecUpdate(run_of, other_graph, byref(culprit), byref(result))
    else:
        info = (ctypes.c_uint64 * 3)()
        DRIVER.cuGraphExecUpdate_v2(run_of, other_graph, info)
    run(run_of)
    say("updated", step, result.value, read(x, BYTES))
alone = new_graph()
add_kernel(alone, [], fill, x, 1, N)
say("another shape", DRIVER.code("cuGraphExecUpdate", run_of, alone, byref(culprit), byref(result)))
expect(result.value in (2, 6), f"another topology, or something that is not supported: {result.value}")

# Every type of node through the functions that know them all: added, set in the graph, set in what is executable.
graph, last = new_graph(), c_void_p()


def add_any(params: NodeParams) -> c_void_p:
    global last
    made = c_void_p()
    waits = (c_void_p * 1)(last)
    DRIVER.cuGraphAddNode_v2(byref(made), graph, waits, None, int(bool(last)), byref(params))
    last = made
    return made


memory = generic(nodes.ALLOCATE, allocation=nodes.AllocationParams(1, 0, 1, 0, size=BYTES))
allocating = add_any(memory)
own = memory.of.allocation.address
say("allocated", own % 256)
event_in, event_out = event(), event()


def every_kind(value: int) -> list[NodeParams]:
    return [
        generic(nodes.KERNEL, kernel=kernel_params(fill, own, value, N)),
        generic(nodes.MEMCPY, copy=nodes.CopyNodeParams(0, 0, context, Copy(device(own), device(y), BYTES, 1, 1))),
        generic(nodes.MEMSET, memset=MemsetParams(y, 0, value, 4, 5, 1, context)),
        generic(nodes.HOST, host=HostParams(ctypes.cast(one, c_void_p), 1000 + value)),
        generic(nodes.CHILD, child=nodes.ChildParams(pair(value)[0], 0)),
        generic(nodes.EMPTY),
        generic(nodes.WAIT, event=event_in),
        generic(nodes.RECORD, event=event_out),
        generic(nodes.BATCH, batch=batch(value)),
    ]


every = [add_any(params) for params in every_kind(1)]
freed = generic(nodes.FREE, address=own)
freeing = add_any(freed)
RUNTIME.cudaEventRecord(event_in, other)
run_of = executable(graph)
run(run_of)
say("every kind", read(x, BYTES), read(y, BYTES), read(z, 16), calls[-1])
sets_children = not left_out("the driver sets no child of a graph that is not executable")
for step in range(2, 8):
    for where_it_is, anything in zip(every, every_kind(step), strict=True):
        if anything.type == nodes.EMPTY or (anything.type == nodes.CHILD and step % 2 == 0 and not sets_children):
            continue
        if step % 2:
            DRIVER.cuGraphExecNodeSetParams(run_of, where_it_is, byref(anything))
        else:
            DRIVER.cuGraphNodeSetParams(where_it_is, byref(anything))
    if step % 2 == 0:
        DRIVER.cuGraphExecDestroy(run_of)
        run_of = executable(graph)
    run(run_of)
    RUNTIME.cudaEventSynchronize(event_out)
    say("every kind", step, read(x, BYTES), read(y, BYTES), read(z, 16), calls[-1])
    expect(calls[-1] == 1000 + step, "the host function's argument")
for own_node, fixed in ((allocating, memory), (freeing, freed)):  # an allocation stays what it is
    expect_error(DRIVER, 801, "cuGraphExecNodeSetParams", run_of, own_node, byref(fixed))
    expect_error(DRIVER, 801, "cuGraphNodeSetParams", own_node, byref(fixed))

# What belongs to other interfaces says so.
if not left_out("the driver has external semaphores"):
    semaphores = generic(nodes.SIGNAL_SEMAPHORE)
    expect_error(DRIVER, 801, "cuGraphAddNode_v2", byref(node), graph, None, None, 0, byref(semaphores))
    expect_error(DRIVER, 801, "cuGraphExecExternalSemaphoresSignalNodeSetParams", run_of, first, byref(semaphores))
