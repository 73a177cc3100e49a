"""Collectives of every kind in graphs: captured, launched many times, with several streams and communicators, as a
child, a clone, changed, destroyed; and what is refused."""

import time

import numpy as np
from capture import UPDATED, capture, executable, launch, update
from model import Array
from nccl import (
    AVERAGE,
    DRIVER,
    FLOAT32,
    FOLDER,
    INT32,
    RANK,
    RANKS,
    Memory,
    NcclError,
    byref,
    c_int,
    c_void_p,
    driver,
    expect,
    join,
    nccl,
    say,
    start,
    stream,
    synchronize,
    unique_id,
    wait_for_file,
)  # fmt: skip

COUNT = 1001
BYTES = 4 * COUNT
SUM, MAX = 0, 2
INVALID_USAGE, UNHANDLED_CUDA_ERROR = 5, 1
LEGACY, PER_THREAD = 1, 2


def of(rank: int, seed: int = 0, count: int = COUNT) -> Array:
    return np.random.default_rng(1000 * seed + rank).integers(0, 1 << 20, count, dtype=np.int32)


start()
comm, twin, on, beside = join(unique_id()), join(unique_id("twin")), stream(), stream()
mark, back = c_void_p(), c_void_p()
for event in (mark, back):
    driver("cuEventCreate", byref(event), 2)


def follow(waiting: int, event: c_void_p, this: int) -> None:
    driver("cuEventRecord", event, this)
    driver("cuStreamWaitEvent", waiting, event, 0)


def total_of(ranks: list[Array]) -> Array:
    return np.array(np.sum(ranks, axis=0, dtype=np.int32))


def same(what: str, memory: Memory, expected: Array, offset: int = 0) -> None:
    expect(synchronize(on) == 0, f"synchronize after {what}")
    got = memory.read(expected.dtype, offset + len(expected))[offset:]
    expect(np.array_equal(got, expected), what)


def refused(name: str, *arguments: object) -> int:
    try:
        nccl(name, *arguments)
    except NcclError as error:
        return error.code
    return 0


# --- every kind, in one graph, with copies and fills between
mine, whole, out = Memory(BYTES), Memory(BYTES * RANKS), Memory(BYTES * RANKS)
slots = {name: Memory(BYTES * RANKS) for name in (
    "reduced", "average", "scaled", "broadcast", "root", "gathered", "scattered", "exchanged", "collected", "dealt",
    "ring", "pair",
)}  # fmt: skip
floats, factor = Memory(BYTES), c_int()
half = np.array([0.5], np.float32)
nccl("ncclRedOpCreatePreMulSum", byref(factor), c_void_p(half.ctypes.data), FLOAT32, 1, comm)
after, before = (RANK + 1) % RANKS, (RANK - 1) % RANKS


def every_kind() -> None:
    at = {name: memory.address for name, memory in slots.items()}
    driver("cuMemcpyDtoDAsync_v2", whole.address + BYTES * RANK, mine.address, BYTES, on)
    nccl("ncclAllReduce", mine.address, at["reduced"], COUNT, INT32, SUM, comm, on)
    nccl("ncclAllReduce", floats.address, at["average"], COUNT, FLOAT32, AVERAGE, comm, on)
    nccl("ncclAllReduce", floats.address, at["scaled"], COUNT, FLOAT32, factor.value, comm, on)
    nccl("ncclBroadcast", mine.address, at["broadcast"], COUNT, INT32, RANKS - 1, comm, on)
    nccl("ncclReduce", mine.address, at["root"], COUNT, INT32, MAX, 0, comm, on)
    nccl("ncclAllGather", mine.address, at["gathered"], COUNT, INT32, comm, on)
    nccl("ncclReduceScatter", at["gathered"], at["scattered"], COUNT, INT32, SUM, comm, on)
    nccl("ncclAlltoAll", at["gathered"], at["exchanged"], COUNT, INT32, comm, on)
    nccl("ncclGather", mine.address, at["collected"], COUNT, INT32, 0, comm, on)
    nccl("ncclScatter", at["gathered"], at["dealt"], COUNT, INT32, 0, comm, on)
    nccl("ncclGroupStart")
    nccl("ncclSend", mine.address, COUNT, INT32, after, comm, on)
    nccl("ncclRecv", at["ring"], COUNT, INT32, before, comm, on)
    nccl("ncclGroupEnd")
    if RANK < 2:  # outside of groups
        nccl(
            "ncclSend" if RANK == 0 else "ncclRecv",
            at["ring"] if RANK == 0 else at["pair"],
            COUNT,
            INT32,
            1 - RANK,
            comm,
            on,
        )
    driver("cuMemsetD32Async", out.address, 7, COUNT, on)
    driver("cuMemcpyDtoDAsync_v2", out.address + BYTES, at["ring"], BYTES, on)


for mode in range(3):  # global, of the thread, relaxed
    graph = capture(on, every_kind, mode)
    made = executable(graph)
    driver("cuGraphDestroy", graph)
    driver("cuGraphUpload", made, on)
    for turn in range(3):
        seed = 10 * mode + turn
        ranks = [of(rank, seed) for rank in range(RANKS)]
        mine.write(ranks[RANK])
        floats.write(ranks[RANK].astype(np.float32))
        for memory in slots.values():
            driver("cuMemsetD32Async", memory.address, 0, COUNT * RANKS, on)
        launch(made, (on, beside)[turn % 2])
        expect(synchronize((on, beside)[turn % 2]) == 0, f"synchronize after launch {seed}")
        what = f"of launch {seed}"
        total = total_of(ranks)
        everything = np.concatenate(ranks)
        same(f"all-reduce {what}", slots["reduced"], total)
        same(f"average {what}", slots["average"], (total / RANKS).astype(np.float32))
        same(f"scaled sum {what}", slots["scaled"], (total / 2).astype(np.float32))
        same(f"broadcast {what}", slots["broadcast"], ranks[-1])
        if RANK == 0:
            same(f"reduce {what}", slots["root"], np.max(ranks, axis=0))
            same(f"gather {what}", slots["collected"], everything)
        same(f"all-gather {what}", slots["gathered"], everything)
        same(f"reduce-scatter {what}", slots["scattered"], ranks[RANK] * RANKS)
        same(f"all-to-all {what}", slots["exchanged"], np.tile(ranks[RANK], RANKS))
        same(f"scatter {what}", slots["dealt"], ranks[RANK])
        same(f"ring {what}", slots["ring"], ranks[before])
        if RANK == 1:
            same(f"pair {what}", slots["pair"], ranks[RANKS - 1])
        same(f"fill {what}", out, np.full(COUNT, 7, np.int32))
        same(f"copy {what}", out, ranks[before], COUNT)
    driver("cuGraphExecDestroy", made)

# --- several streams and communicators; work that does not wait for them goes on beside; a host function among them
a, b, c, d = (Memory(BYTES) for _ in range(4))
page = c_void_p()
driver("cuMemHostAlloc", byref(page), BYTES, 0)


def forked(last: int = SUM, value: int = 5) -> None:
    nccl("ncclAllReduce", a.address, a.address, COUNT, INT32, SUM, comm, on)
    follow(beside, mark, on)
    nccl("ncclAllReduce", a.address, b.address, COUNT, INT32, MAX, twin, beside)
    driver("cuMemsetD32Async", c.address, value, COUNT, on)
    driver("cuMemcpyDtoDAsync_v2", d.address, c.address, BYTES, on)
    nccl("ncclGroupStart")  # in two streams: each waits for both
    nccl("ncclAllReduce", c.address, c.address, COUNT, INT32, last, comm, on)
    nccl("ncclAllReduce", b.address, b.address, COUNT, INT32, SUM, twin, beside)
    nccl("ncclGroupEnd")
    driver("cuMemcpyDtoHAsync_v2", page, b.address, BYTES, beside)
    follow(on, back, beside)
    driver("cuMemcpyDtoDAsync_v2", d.address, b.address, 4, on)


def try_forked(what: str, made: c_void_p, fill: int = 5, where: int = on) -> None:
    ranks = [of(rank, 77) for rank in range(RANKS)]
    a.write(ranks[RANK])
    launch(made, where)
    expect(synchronize(where) == 0, f"synchronize after {what}")
    total = total_of(ranks)
    same(f"the first sum {what}", a, total)
    same(f"the other communicator's {what}", b, total * RANKS)
    same(f"the group's {what}", c, np.full(COUNT, fill * RANKS, np.int32))
    same(f"what went on beside {what}", d, np.concatenate([total[:1] * RANKS, np.full(COUNT - 1, fill, np.int32)]))
    got = np.ctypeslib.as_array((c_int * COUNT).from_address(page.value or 0))
    expect(np.array_equal(got, total * RANKS), f"what was copied to the host {what}")


graph = capture(on, forked)
made, clone = executable(graph), c_void_p()
try_forked("forked", made)
try_forked("in the legacy stream", made, where=LEGACY)
try_forked("in the thread's stream", made, where=PER_THREAD)
driver("cuGraphClone", byref(clone), graph)
again = executable(clone)
driver("cuGraphDestroy", graph)
try_forked("cloned", again)
other = capture(on, lambda: forked(MAX, 9))
expect(update(made, other) == UPDATED, "an update of what is the same but for its parameters")
for fill, one in ((9, made), (5, again)):
    ranks = [of(rank, 78) for rank in range(RANKS)]
    a.write(ranks[RANK])
    launch(one, on)
    same("after an update", c, np.full(COUNT, fill if one is made else fill * RANKS, np.int32))
parent, child = c_void_p(), c_void_p()
driver("cuGraphCreate", byref(parent), 0)
driver("cuGraphAddChildGraphNode", byref(child), parent, None, 0, clone)
nested = executable(parent)
try_forked("as a child", nested)


# --- what does not wait for a collective is done before it: the last rank launches when the first has seen that
def overlapped() -> None:
    follow(beside, mark, on)
    nccl("ncclAllReduce", a.address, a.address, COUNT, INT32, SUM, comm, beside)
    driver("cuMemsetD32Async", c.address, 11, COUNT, on)
    driver("cuMemcpyDtoHAsync_v2", page, c.address, BYTES, on)
    follow(on, back, beside)
    driver("cuMemcpyDtoDAsync_v2", d.address, a.address, BYTES, on)


overlap = executable(capture(on, overlapped))
for turn in range(2):
    host = np.ctypeslib.as_array((c_int * COUNT).from_address(page.value or 0))
    host[:] = 0
    a.write(np.full(COUNT, turn + 1, np.int32))
    if RANK == RANKS - 1:
        wait_for_file(f"seen.{turn}")
    launch(overlap, on)
    if RANK == 0:
        end = time.monotonic() + 30
        while host[-1] != 11 and time.monotonic() < end:
            time.sleep(0.001)
        expect(host[-1] == 11, "what does not wait for a collective was done before it")
        (FOLDER / f"seen.{turn}").touch()
    same("behind a collective that was beside", d, np.full(COUNT, RANKS * (turn + 1), np.int32))


# --- two communicators on branches that do not wait for each other: ranks may capture them in any order
def crossed() -> None:
    follow(beside, mark, on)
    calls = [(c, comm, on), (d, twin, beside)]
    for memory, which, where in calls if RANK % 2 else calls[::-1]:
        nccl("ncclAllReduce", memory.address, memory.address, COUNT, INT32, SUM, which, where)
    follow(on, back, beside)
    driver("cuMemcpyDtoDAsync_v2", a.address, d.address, BYTES, on)


cross = executable(capture(on, crossed))
for turn in range(3):
    c.write(np.full(COUNT, 3, np.int32))
    d.write(np.full(COUNT, turn, np.int32))
    launch(cross, (on, beside, on)[turn])
    expect(synchronize(beside) == 0, "synchronize")
    same("one branch", c, np.full(COUNT, 3 * RANKS, np.int32))
    same("the other branch", a, np.full(COUNT, turn * RANKS, np.int32))


def without() -> None:
    driver("cuMemsetD32Async", c.address, 1, COUNT, on)


def another() -> None:
    nccl("ncclAllReduce", c.address, c.address, COUNT, INT32, SUM, comm, on)


plain, alone = executable(capture(on, without)), capture(on, another)
expect(update(made, alone) != UPDATED, "an update to another shape")
expect(update(plain, alone) != UPDATED, "an update of a fill to a collective")
launch(plain, on)
launch(executable(alone), on)
same("alone", c, np.full(COUNT, RANKS, np.int32))

# --- in the thread's own stream
own = executable(
    capture(PER_THREAD, lambda: nccl("ncclAllReduce", c.address, c.address, COUNT, INT32, SUM, comm, PER_THREAD))
)
launch(own, on)
same("captured in the thread's stream", c, np.full(COUNT, RANKS * RANKS, np.int32))


# --- what is wrong
def outside() -> None:
    nccl("ncclGroupStart")
    nccl("ncclAllReduce", c.address, c.address, COUNT, INT32, SUM, comm, on)
    code = refused("ncclAllReduce", c.address, c.address, COUNT, INT32, SUM, comm, third)
    expect(code == INVALID_USAGE, f"a group of which a part is captured: {code}")
    expect(refused("ncclGroupEnd") == INVALID_USAGE, "its end")
    expect(refused("ncclAllReduce", c.address, c.address, COUNT, INT32, SUM, c_void_p(77), on) == 4, "no communicator")


third = stream()
launch(executable(capture(on, outside)), on)  # nothing is in it
graph = c_void_p()
nccl("ncclGroupStart")
driver("cuStreamBeginCapture_v2", on, 1)
nccl("ncclAllReduce", c.address, c.address, COUNT, INT32, SUM, comm, on)
driver("cuStreamEndCapture", on, byref(graph))
expect(refused("ncclGroupEnd") == INVALID_USAGE, "a group that ends when the capture is over")
driver("cuStreamBeginCapture_v2", on, 1)
expect(DRIVER.cuStreamSynchronize(c_void_p(on)) != 0, "a wait ends the capture")
code = refused("ncclAllReduce", c.address, c.address, COUNT, INT32, SUM, comm, on)
expect(code == UNHANDLED_CUDA_ERROR, f"a collective in a capture that is invalid: {code}")
expect(DRIVER.cuStreamEndCapture(c_void_p(on), byref(graph)) == 901, "it is invalid")
launch(own, on)
same("afterwards", c, np.full(COUNT, RANKS**3, np.int32))

# --- a communicator that is gone
last = executable(capture(on, lambda: nccl("ncclAllReduce", b.address, b.address, COUNT, INT32, SUM, twin, on)))
launch(last, on)
expect(synchronize(on) == 0, "synchronize")
nccl("ncclCommDestroy", twin)
for one in (last, again):
    code = DRIVER.cuGraphLaunch(one, c_void_p(on))
    expect(code == 400, f"a graph whose communicator was destroyed: {code}")
launch(own, on)
same("of the other one", c, np.full(COUNT, RANKS**4, np.int32))
state = c_int(9)
nccl("ncclCommGetAsyncError", comm, byref(state))
expect(state.value == 0, f"an asynchronous error {state.value}")
for one in (made, again, nested, last, own):
    driver("cuGraphExecDestroy", one)
nccl("ncclCommDestroy", comm)
say("done")
