"""Graphs with conditional nodes in which the program takes part: copies of page-locked memory beside them and in their
bodies, host functions, events, and waits and writes of words."""

import ctypes
import functools
import threading
from ctypes import byref, c_uint, c_void_p

import nodes
from calls import (
    DRIVER,
    RUNTIME,
    event,
    expect,
    expect_error,
    in_one_go,
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
    ASSIGN_DEFAULT,
    DEVICE,
    IF,
    MOVE,
    PINNED,
    SWITCH,
    WHILE,
    BatchParams,
    Copy,
    HostFunction,
    HostParams,
    MemoryOperation,
    NodeParams,
    Side,
    add_child,
    add_conditional,
    add_kernel,
    condition,
    current_context,
    executable,
    new_graph,
)

N = 300
BYTES = 8 * N
fill, mix, add, wait_for = kernel("fill"), kernel("mix"), kernel("add"), kernel("wait_for")
choose, count_down = kernel("choose"), kernel("count_down")
x, y, z, what = malloc(BYTES), malloc(BYTES), malloc(BYTES), malloc(8)
context = current_context()
where, other = stream(), stream()


def page_locked(size: int = BYTES) -> int:
    pointer = c_void_p()
    RUNTIME.cudaHostAlloc(byref(pointer), size, 0)
    ctypes.memset(pointer, 0, size)
    return pointer.value or 0


def put(pointer: int, *numbers: int) -> None:
    """Into the device's memory."""
    write(pointer, b"".join(number.to_bytes(8, "little") for number in numbers))
    RUNTIME.cudaDeviceSynchronize()


def hold(pointer: int, *numbers: int) -> None:
    """Into the program's."""
    ctypes.memmove(pointer, b"".join(number.to_bytes(8, "little") for number in numbers), 8 * len(numbers))


def held(pointer: int) -> int:
    return ctypes.c_uint64.from_address(pointer).value


def bytes_of(pointer: int, size: int = BYTES) -> bytes:
    return ctypes.string_at(pointer, size)


def run(graph: c_void_p) -> None:
    DRIVER.cuGraphLaunch(graph, where)
    RUNTIME.cudaStreamSynchronize(where)


def side(address: int, pitch: int = 0) -> Side:
    if a_pinned(address):
        return Side(type=PINNED, host=address, pitch=pitch)
    return Side(type=DEVICE, device=address, pitch=pitch)


def a_pinned(address: int) -> bool:
    return any(start <= address < start + BYTES for start in pinned)


def of_copy(to: int, source: int, width: int = BYTES, rows: int = 1, pitches: tuple[int, int] = (0, 0)) -> Copy:
    return Copy(side(source, pitches[1]), side(to, pitches[0]), width, rows, 1)


def add_copy(graph: c_void_p, after: list[c_void_p], *args: object, **options: object) -> c_void_p:
    node = c_void_p()
    waits = (c_void_p * len(after))(*after)
    params = of_copy(*args, **options)  # type: ignore[arg-type]
    DRIVER.cuGraphAddMemcpyNode(byref(node), graph, waits, len(after), byref(params), context)
    return node


def add_host(graph: c_void_p, after: list[c_void_p], function: object, data: int) -> c_void_p:
    node = c_void_p()
    waits = (c_void_p * len(after))(*after)
    params = HostParams(ctypes.cast(function, c_void_p), data)  # type: ignore[arg-type]
    DRIVER.cuGraphAddHostNode(byref(node), graph, waits, len(after), byref(params))
    return node


pinned = [page_locked() for _ in range(5)]
one, two, three, four, flag = pinned
for memory in (x, y, z):
    put(memory, *range(N))

# Copies beside a conditional node: what it decides by comes from page-locked memory, and what became of it goes there.
# The program writes there again as soon as a launch is done.
graph = new_graph()
only = condition(graph)
brought = add_copy(graph, [], what, one, 8)
first = add_kernel(graph, [brought], choose, only, what)
node, (yes, no) = add_conditional(graph, [first], only, IF, 2)
add_kernel(yes, [], fill, x, 100, N)
add_kernel(no, [], mix, x, 2, N)
add_copy(graph, [node], two, x)
beside = executable(graph)
for step in range(24):
    hold(one, step % 3 == 1)
    run(beside)
    expect(held(two) == 100 or step % 3 != 1, "the first body ran, and what it did has come")
    if step % 4 == 1:
        say("beside", step, bytes_of(two))
    hold(one, 7)
    ctypes.memset(two, step, BYTES)
DRIVER.cuGraphUpload(beside, where)

# In bodies: each takes from another place, and brings to another; who does not run leaves the program's memory alone.
graph = new_graph()
which = condition(graph)
brought = add_copy(graph, [], what, one, 8)
first = add_kernel(graph, [brought], choose, which, what)
node, bodies = add_conditional(graph, [first], which, SWITCH, 4)
for number, body in enumerate(bodies):
    come = add_copy(body, [], x, two + 8 * number, 400)
    add_copy(body, [add_kernel(body, [come], add, x, number, 50)], three + 480 * number, x, 400)
add_copy(bodies[2], [], four, y, 24, 9, (64, 40))  # rows
switch = executable(graph)
for step in range(24):
    hold(one, step % 6)
    hold(two, *range(step, step + 60))
    ctypes.memset(three, 0x5A, BYTES)
    ctypes.memset(four, 0xA5, BYTES)
    run(switch)
    for number in range(4):
        expected = step + 2 * number if step % 6 == number else 0x5A5A5A5A5A5A5A5A
        expect(held(three + 480 * number) == expected, f"body {step % 6}, place {number}: {held(three + 480 * number)}")
    say("switch", step, bytes_of(three), bytes_of(four))

# In a loop, whose turns go through page-locked memory: each reads what the one before has written. Twice, and it shows.
graph = new_graph()
again = condition(graph, 1, ASSIGN_DEFAULT)
node, (body,) = add_conditional(graph, [], again, WHILE)
come = add_copy(body, [], x, one)
changed = add_kernel(body, [come], mix, x, 1, N)
gone = add_copy(body, [changed], one, x)
plus = add_copy(body, [gone], y, two, 80)
add_kernel(body, [plus], count_down, again, what)
loop = executable(graph)
for step in range(1, 25):
    put(what, step)
    hold(one, *range(step, step + N))
    hold(two, *range(10))
    run(loop)
    say("loop", step, bytes_of(one))
    ctypes.memset(one, 1, BYTES)

# The program writes where a body would have written, while the graph is on its way: it knows that it does not run.
graph = new_graph()
only = condition(graph)
first = add_kernel(graph, [], choose, only, what)
waiting = add_kernel(graph, [first], wait_for, flag)
node, (yes,) = add_conditional(graph, [waiting], only, IF)
add_copy(yes, [], three, x)
not_now = executable(graph)
for step in range(12):
    put(what, step % 4 == 3)
    hold(flag, 0)
    hold(three, 77)
    in_one_go(
        functools.partial(DRIVER.cuGraphLaunch, not_now, where),
        functools.partial(hold, three, step),
        functools.partial(hold, flag, 1),
    )
    RUNTIME.cudaStreamSynchronize(where)
    if step % 4 != 3:
        expect(held(three) == step, "it is as the program has left it")
    say("not now", step, bytes_of(three))

# Host functions: ahead of it, beside it, behind it. Each once, each sees what came before it.
calls: list[tuple[int, int]] = []


def prepare(data: int | None) -> None:
    hold(one, len(calls) % 5 * (data or 0) + 1)
    calls.append((1, held(one)))


def note(data: int | None) -> None:
    calls.append((data or 0, held(two)))


def note_aside(data: int | None) -> None:
    calls.append((data or 0, held(one)))


preparing, noting, noting_aside = HostFunction(prepare), HostFunction(note), HostFunction(note_aside)
graph = new_graph()
again = condition(graph, 1, ASSIGN_DEFAULT)
start = add_host(graph, [], preparing, 1)
brought = add_copy(graph, [start], what, one, 8)
aside = add_host(graph, [start], noting_aside, 2)
node, (body,) = add_conditional(graph, [brought], again, WHILE)
add_kernel(body, [add_kernel(body, [], add, x, 3, N)], count_down, again, what)
gone = add_copy(graph, [node], two, x)
end = add_host(graph, [gone, aside], noting, 3)
after = add_kernel(graph, [end], mix, x, 1, 4)
with_functions = executable(graph)
for step in range(24):
    put(x, step)
    run(with_functions)
    DRIVER.cuGraphExecHostNodeSetParams(with_functions, end, byref(HostParams(ctypes.cast(noting, c_void_p), 4 + step)))
    if step % 6 == 0:
        say("functions", calls[-3:], read(x, BYTES))
expect(len(calls) == 3 * 24, f"{len(calls)} calls")
say("functions", calls)

# Events: one from outside is waited for, one is recorded that another stream waits for.
ready, done = event(), event()
graph = new_graph()
only = condition(graph)
wait, record = c_void_p(), c_void_p()
DRIVER.cuGraphAddEventWaitNode(byref(wait), graph, None, 0, ready)
first = add_kernel(graph, [wait], choose, only, what)
node, (yes,) = add_conditional(graph, [first], only, IF)
add_kernel(yes, [], add, x, 5, N)
DRIVER.cuGraphAddEventRecordNode(byref(record), graph, byref(node), 1, done)
last = add_kernel(graph, [record], add, y, 1, N)
with_events = executable(graph)
for step in range(24):
    hold(one, step % 2)
    RUNTIME.cudaMemcpyAsync(what, one, 8, 1, other)
    launch(fill, 4, 32, x, step, N, stream=other)
    RUNTIME.cudaEventRecord(ready, other)
    DRIVER.cuGraphLaunch(with_events, where)
    RUNTIME.cudaStreamWaitEvent(other, done, 0)
    RUNTIME.cudaMemcpyAsync(two, x, BYTES, 2, other)
    RUNTIME.cudaStreamSynchronize(other)
    expect(held(two) == step + 5 * (step % 2), f"{held(two)} in step {step}")
    RUNTIME.cudaEventSynchronize(done)
    if step % 6 == 5:
        say("events", step, bytes_of(two))
RUNTIME.cudaStreamSynchronize(where)
say("events", read(y, BYTES))

# Waits for words and writes of them.
graph = new_graph()
only = condition(graph)
operations = (MemoryOperation * 2)(
    MemoryOperation(nodes.WAIT_64, z, 1, 0),
    MemoryOperation(nodes.WRITE_64, what, 1, 0),
)
batched = c_void_p()
batch = BatchParams(context, 2, ctypes.addressof(operations), 0)
DRIVER.cuGraphAddBatchMemOpNode(byref(batched), graph, None, 0, byref(batch))
first = add_kernel(graph, [batched], choose, only, what)
node, (yes,) = add_conditional(graph, [first], only, IF)
add_kernel(yes, [], add, x, 9, N)
with_words = executable(graph)
for step in range(8):
    put(z, 0)
    put(x, step)
    in_one_go(
        functools.partial(DRIVER.cuGraphLaunch, with_words, where),
        functools.partial(DRIVER.cuStreamWriteValue64_v2, other, c_void_p(z), 1, 0),
    )
    RUNTIME.cudaStreamSynchronize(where)
    say("words", step, read(x, 8))

# Between the kernel that sets a condition and the node that follows it: copies either way, and events. All captured.
graph = new_graph()
only = condition(graph)
DRIVER.cuStreamBeginCaptureToGraph(where, graph, None, None, 0, 2)
launch(choose, 1, 1, only, what, stream=where)
RUNTIME.cudaMemcpyAsync(y, one, BYTES, 1, where)
launch(add, 4, 32, y, 1, N, stream=where)
DRIVER.cuEventRecordWithFlags(done, where, 1)  # a node
RUNTIME.cudaMemcpy2DAsync(two, 64, y, 40, 32, 20, 2, where)
DRIVER.cuStreamWaitEvent(where, ready, 1)
status, serial, found, waits, count = ctypes.c_int(), ctypes.c_uint64(), c_void_p(), c_void_p(), ctypes.c_size_t()
DRIVER.cuStreamGetCaptureInfo_v2(where, byref(status), byref(serial), byref(found), byref(waits), byref(count))
last = c_void_p.from_address(waits.value or 0)
node, (yes,) = add_conditional(graph, [c_void_p(last.value)], only, IF)
DRIVER.cuStreamUpdateCaptureDependencies(where, byref(node), 1, 1)
RUNTIME.cudaMemcpyAsync(three, x, BYTES, 2, where)
same = c_void_p()
DRIVER.cuStreamEndCapture(where, byref(same))
add_copy(yes, [add_copy(yes, [], x, y)], four, x)
between = executable(graph)
RUNTIME.cudaEventRecord(ready, other)
hold(four, 0)
recorded = not left_out("the driver records an event of a graph when the graph comes to it, and not before")
for step in range(24):
    put(what, step % 2)
    hold(one, *range(step, step + N))
    ctypes.memset(two, 0, BYTES)
    DRIVER.cuGraphLaunch(between, where)
    RUNTIME.cudaEventSynchronize(done)
    expect(held(two) == step + 1 or not recorded, "what was copied before the event has come")
    RUNTIME.cudaStreamSynchronize(where)
    expect(held(four) == (step + 1 if step % 2 else step), f"{held(four)} in step {step}")
    say("between", step, bytes_of(two), bytes_of(three))

# What nodes do is changed: a copy in a body goes elsewhere, within the device only, to page-locked memory; is left out.
graph = new_graph()
only = condition(graph, 1, ASSIGN_DEFAULT)
node, (yes,) = add_conditional(graph, [], only, IF)
moved = add_copy(yes, [], y, x)
changing = executable(graph)
mixed = not left_out("the driver lets an executable graph's copy stay in the kind of memory where it was")
targets = (y, one, two, z, three) if mixed else (y, z, z, y, z)
for step in range(20):
    put(x, *range(step, step + N))
    target = targets[step % 5]
    params = of_copy(target, x)
    if step % 2:
        DRIVER.cuGraphExecMemcpyNodeSetParams(changing, moved, byref(params), context)
    else:
        generic = NodeParams(nodes.MEMCPY)
        generic.of.copy = nodes.CopyNodeParams(0, 0, context, params)
        DRIVER.cuGraphExecNodeSetParams(changing, moved, byref(generic))
    run(changing)
    got = bytes_of(target) if a_pinned(target) else read(target, BYTES)
    expect(got == read(x, BYTES), f"copied to another place in step {step}")
    if step == 12:
        DRIVER.cuGraphNodeSetEnabled(changing, moved, 0)
        hold(two, 4711)
        put(z, 4711)
        run(changing)
        expect(held(two) == 4711 and (mixed or read(z, 8) == bytes_of(two, 8)), "the copy is left out")
        DRIVER.cuGraphNodeSetEnabled(changing, moved, 1)
say("changed", read(y, BYTES), read(z, BYTES), bytes_of(one), bytes_of(two), bytes_of(three))


# All of it at once; and while something else is captured, during which nothing may wait.
def counted(value: int, target: int) -> c_void_p:
    made = new_graph()
    handle = condition(made, 1, ASSIGN_DEFAULT)
    _, (inside,) = add_conditional(made, [add_host(made, [], noting, value)], handle, WHILE)
    begin = add_kernel(inside, [], add, x, value, N)
    add_kernel(inside, [add_copy(inside, [begin], target, x)], count_down, handle, what)
    return made


run_of = executable(counted(2, one))
info = (ctypes.c_uint64 * 3)()
for value in range(3, 12):
    put(what, value)
    put(x, 0)
    run(run_of)
    say("updated", value, held(one), held(two), calls[-1])
    if value % 2:
        DRIVER.cuStreamBeginCapture_v2(other, 0)
        DRIVER.cuGraphExecUpdate_v2(run_of, counted(value, two if value % 4 == 1 else one), info)
        DRIVER.cuStreamEndCapture(other, byref(same))
    else:
        DRIVER.cuGraphExecUpdate_v2(run_of, counted(value, one), info)
DRIVER.cuGraphExecDestroy(run_of)

# A graph is changed, launched again and destroyed while a launch of it waits for the program: nothing waits for that.
goes_on = threading.Event()


def hold_up(_: int | None) -> None:
    goes_on.wait()


holding_up = HostFunction(hold_up)
waits_for_it = left_out("the driver may wait for a launch of what is changed or destroyed")
for step in range(0 if waits_for_it else 8):
    graph = new_graph()
    only = condition(graph, 1, ASSIGN_DEFAULT)
    node, (yes,) = add_conditional(graph, [add_host(graph, [], holding_up, 0)], only, IF)
    moved = add_copy(yes, [], one, x)
    held_up = executable(graph)
    put(x, *range(step + 1, step + 1 + N))
    for place in (one, two):
        ctypes.memset(place, 0, BYTES)
    goes_on.clear()
    elsewhere = of_copy(two, x)
    in_one_go(
        functools.partial(DRIVER.cuGraphLaunch, held_up, where),
        functools.partial(DRIVER.cuGraphExecMemcpyNodeSetParams, held_up, moved, byref(elsewhere), context),
        functools.partial(DRIVER.cuGraphLaunch, held_up, where),
        functools.partial(DRIVER.cuGraphExecDestroy, held_up),
        lambda: expect(held(one) == 0, "the launch waits"),
        goes_on.set,
    )
    RUNTIME.cudaStreamSynchronize(where)
    expect(bytes_of(one) == bytes_of(two) == read(x, BYTES), "both launches were made")

# In a graph inside, which is given away; with more beside it.
deep = None
if not left_out("the driver takes no graph with conditional nodes as another's child"):
    child = new_graph()
    inner = condition(child)
    start = add_host(child, [], preparing, 0)
    brought = add_copy(child, [start], what, one, 8)
    first = add_kernel(child, [brought], choose, inner, what)
    node, (yes,) = add_conditional(child, [first], inner, IF)
    add_copy(yes, [], y, two)
    end = add_host(child, [node], noting, 40)
    graph = new_graph()
    outer = condition(graph, 1, ASSIGN_DEFAULT)
    begin = add_kernel(graph, [], fill, y, 5, N)
    inside = add_child(graph, [begin], child, MOVE)
    more, (body,) = add_conditional(graph, [inside], outer, WHILE)
    add_copy(body, [], three, y)
    add_kernel(body, [], count_down, outer, what)
    deep = executable(graph)
    for step in range(12):
        hold(two, *range(step, step + N))
        run(deep)
        say("deep", step, calls[-1], bytes_of(three), read(what, 8))

# What cannot be: a function of the program between the two, and a kernel that is given what a copy reads or writes.
if not left_out("the driver takes both"):
    none = c_void_p()
    graph = new_graph()
    only = condition(graph)
    first = add_kernel(graph, [], choose, only, what)
    node, (yes,) = add_conditional(graph, [add_host(graph, [first], noting, 1)], only, IF)
    expect_error(DRIVER, 801, "cuGraphInstantiateWithFlags", byref(none), graph, 0)
    graph = new_graph()
    only = condition(graph, 1, ASSIGN_DEFAULT)
    node, (yes,) = add_conditional(graph, [], only, IF)
    add_copy(yes, [add_kernel(yes, [], fill, one, 1, N)], x, one)
    expect_error(DRIVER, 801, "cuGraphInstantiateWithFlags", byref(none), graph, 0)
for made in (beside, switch, loop, not_now, with_functions, with_events, with_words, between, changing, deep):
    if made:
        DRIVER.cuGraphExecDestroy(made)
say("still here", pattern(8), read(x, BYTES), c_uint(len(calls)).value)
