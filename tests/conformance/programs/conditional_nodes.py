"""Graphs in which kernels decide what runs: if, else, while, switch, one inside another, changed and updated."""

import ctypes
from ctypes import byref, c_uint, c_void_p

import nodes
from calls import DRIVER, RUNTIME, expect, expect_error, kernel, launch, left_out, malloc, read, say, stream, write
from nodes import ASSIGN_DEFAULT, IF, SWITCH, WHILE, add_conditional, add_kernel, condition, executable, new_graph

N = 500
fill, mix, add = kernel("fill"), kernel("mix"), kernel("add")
choose, count_down, choose_one = kernel("choose"), kernel("count_down"), kernel("choose_one")
x, y, what = malloc(8 * N), malloc(8 * N), malloc(8)
where = stream()


def put(pointer: int, *numbers: int) -> None:
    write(pointer, b"".join(number.to_bytes(8, "little") for number in numbers))
    RUNTIME.cudaDeviceSynchronize()


def get(pointer: int) -> int:
    return int.from_bytes(read(pointer, 8), "little")


def run(graph: c_void_p) -> None:
    DRIVER.cuGraphLaunch(graph, where)
    RUNTIME.cudaStreamSynchronize(where)


for memory in (x, y):  # all of it is read below, also what no kernel has written yet
    put(memory, *range(N))

# If, and if with an else: whether a kernel of the graph says so.
graph = new_graph()
only = condition(graph)
either = condition(graph)
first = add_kernel(graph, [], choose, only, what)
second = add_kernel(graph, [first], choose, either, what)
node, (yes,) = add_conditional(graph, [second], only, IF)
add_kernel(yes, [], fill, x, 100, N)
other, (one, two) = add_conditional(graph, [node], either, IF, 2)
add_kernel(one, [], fill, y, 200, N)
changed = add_kernel(two, [], fill, y, 300, N)
add_kernel(two, [changed], add, y, 1, N)
after = add_kernel(graph, [other], mix, x, 2, 8)
ifs = executable(graph)
for step in range(24):
    put(what, step % 3 == 1)
    put(x, 7)
    run(ifs)
    expect(get(y) == (200 if step % 3 == 1 else 301), f"the {'first' if step % 3 == 1 else 'second'} body ran")
    if step % 6 < 2:
        say("if", step, read(x, 8 * N), read(y, 8 * N))

# A kernel in a body does something else from now on; and one beside it.
for step in range(12):
    DRIVER.cuGraphExecKernelNodeSetParams_v2(ifs, changed, byref(nodes.kernel_params(fill, y, 400 + step, N)))
    DRIVER.cuGraphExecKernelNodeSetParams_v2(ifs, second, byref(nodes.kernel_params(choose, either, what)))
    put(what, step % 2)
    run(ifs)
    expect(get(y) == (200 if step % 2 else 401 + step), f"the body was changed to {400 + step}")
say("changed", read(y, 8 * N))
name = nodes.NodeParams(0)
kinds = []
for each in (node, changed):
    kind = ctypes.c_int()
    DRIVER.cuGraphNodeGetType(each, byref(kind))
    kinds.append(kind.value)
say("types", kinds)

# What a launch begins with, if nobody sets it.
graph = new_graph()
usual = condition(graph, 2, ASSIGN_DEFAULT)
node, bodies = add_conditional(graph, [], usual, SWITCH, 3)
for number, body in enumerate(bodies):
    add_kernel(body, [], fill, x, 1000 + number, N)
by_default = executable(graph)
run(by_default)
expect(get(x) == 1002, "the default value was 2")
say("default", read(x, 8 * N))

# Switch, with more values than bodies.
graph = new_graph()
which = condition(graph)
first = add_kernel(graph, [], choose, which, what)
node, bodies = add_conditional(graph, [first], which, SWITCH, 4)
for number, body in enumerate(bodies):
    add_kernel(body, [], fill, x, 50 * number, N)
switch = executable(graph)
for step in range(30):
    put(what, step % 6)
    put(x, 1)
    run(switch)
    expect(get(x) == (50 * (step % 6) if step % 6 < 4 else 1), f"body {step % 6} ran")
say("switch", read(x, 8 * N))

# While: the body is captured, with a copy and a memset in it.
graph = new_graph()
again = condition(graph, 1, ASSIGN_DEFAULT)
node, (body,) = add_conditional(graph, [], again, WHILE)
DRIVER.cuStreamBeginCaptureToGraph(where, body, None, None, 0, 2)
launch(add, 4, 32, x, 3, N, stream=where)
RUNTIME.cudaMemcpyAsync(y, x, 8 * N, 3, where)
RUNTIME.cudaMemsetAsync(x + 8, 0, 8, where)
launch(count_down, 1, 1, again, what, stream=where)
same = c_void_p()
DRIVER.cuStreamEndCapture(where, byref(same))
expect(same.value == body.value, "the body was captured into")
loop = executable(graph)
for step in range(1, 40):
    put(what, step)
    put(x, 0, 5)
    DRIVER.cuGraphLaunch(loop, where)
    RUNTIME.cudaStreamSynchronize(where)
    expect(get(x) == 3 * step and get(what) == 0, f"{step} times around")
    if step % 8 == 0:
        say("while", step, read(x, 8 * N), read(y, 8 * N))

# One in another, three deep; the handles belong to the body that has the node, to the outermost graph, and are given to
# kernels one by one and all in one structure.
graph = new_graph()
outer = condition(graph, 1, ASSIGN_DEFAULT)
of_outermost = condition(graph)
node, (body,) = add_conditional(graph, [], outer, WHILE)
inner = [condition(body) for _ in range(3)]


class Conditions(ctypes.Structure):
    _fields_ = (("count", c_uint), ("all", ctypes.c_uint64 * 4))


several = Conditions(3, (ctypes.c_uint64 * 4)(*inner, 0))
first = add_kernel(body, [], choose_one, ctypes.c_uint8(1), several, what)
last = first
for number, handle in enumerate(inner):
    last, (inside,) = add_conditional(body, [last], handle, IF)
    start = add_kernel(inside, [], add, x, 10**number, N)
    if number != 1:
        continue
    start = add_kernel(inside, [start], choose, of_outermost, what)
    deep, (innermost,) = add_conditional(inside, [start], of_outermost, IF)
    add_kernel(innermost, [], add, x, 1000, N)
add_kernel(body, [last], count_down, outer, what)
nested = executable(graph)
for step in range(1, 25):
    put(what, step)
    put(x, 0)
    run(nested)
    # around with 1 ... step: at 1 the second of three, with another inside; at 2 the third
    expected = (1010 if step >= 1 else 0) + (100 if step >= 2 else 0)
    expect(get(x) == expected, f"{get(x)} is {expected}")
say("nested", read(x, 8 * N))


# Updated as a whole, with a graph of the same shape and other handles.
def loop_of(value: int) -> c_void_p:
    made = new_graph()
    handle = condition(made, 1, ASSIGN_DEFAULT)
    _, (inside,) = add_conditional(made, [], handle, WHILE)
    begin = add_kernel(inside, [], add, x, value, N)
    add_kernel(inside, [begin], count_down, handle, what)
    return made


graph = loop_of(2)
run_of = executable(graph)
info = (ctypes.c_uint64 * 3)()
for value in range(3, 12):
    put(what, value)
    put(x, 0)
    run(run_of)
    expect(get(x) == value * (value - 1), f"{value} times {value - 1}")
    DRIVER.cuGraphExecUpdate_v2(run_of, loop_of(value), info)
say("updated", read(x, 8 * N))
say("another shape", DRIVER.code("cuGraphExecUpdate_v2", run_of, new_graph(), info), info[0] & 0xFFFFFFFF)

# What is not allowed.
got = c_void_p()
expect_error(DRIVER, 801, "cuGraphClone", byref(got), graph)
expect_error(DRIVER, 801, "cuGraphAddChildGraphNode", byref(got), new_graph(), None, 0, graph)
expect_error(DRIVER, 801, "cuGraphInstantiateWithFlags", byref(got), graph, 0)
DRIVER.cuGraphExecDestroy(run_of)
run_of = executable(graph)
DRIVER.cuGraphExecDestroy(run_of)
empty = new_graph()
stranger = nodes.conditional_params(again, IF, 1)
expect_error(DRIVER, 1, "cuGraphAddNode_v2", byref(got), empty, None, None, 0, byref(stranger))
own = condition(empty)
for form, size in ((IF, 3), (IF, 0), (WHILE, 2), (3, 1)):
    wrong = nodes.conditional_params(own, form, size)
    expect_error(DRIVER, 1, "cuGraphAddNode_v2", byref(got), empty, None, None, 0, byref(wrong))
expect_error(DRIVER, 1, "cuGraphConditionalHandleCreate", byref(ctypes.c_uint64()), empty, None, 0, 2)
expect_error(DRIVER, 1, "cuGraphInstantiateWithFlags", byref(got), empty, 0)  # its handle is used by no node
unused = (ctypes.c_uint64 * 4)()
DRIVER.code("cuGraphInstantiateWithParams", byref(got), empty, unused)
say("unused handle", unused[3] & 0xFFFFFFFF)
node, (inside,) = add_conditional(empty, [], own, IF)
if not left_out("what the driver says of a body that is used as a graph of its own is undefined"):
    expect_error(DRIVER, 1, "cuGraphDestroy", inside)
    expect_error(DRIVER, 1, "cuGraphInstantiateWithFlags", byref(got), inside, 0)
host = nodes.HostParams(ctypes.cast(nodes.HostFunction(lambda data: None), c_void_p), None)
DRIVER.cuGraphAddHostNode(byref(got), inside, None, 0, byref(host))
expect_error(DRIVER, 1, "cuGraphInstantiateWithFlags", byref(got), empty, 0)  # a host function in a body
DRIVER.cuGraphDestroyNode(node)
DRIVER.cuGraphDestroy(empty)
for made in (ifs, by_default, switch, loop, nested):
    DRIVER.cuGraphExecDestroy(made)
