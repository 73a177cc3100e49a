"""Operations that compute nothing, groups with sends and receives, splits, several communicators and streams."""

import ctypes
import mmap

import numpy as np
from model import Array
from nccl import (
    FLOAT32,
    INT32,
    NCCL,
    RANK,
    RANKS,
    Memory,
    NcclError,
    byref,
    c_int,
    c_void_p,
    expect,
    holding,
    join,
    nccl,
    say,
    start,
    stream,
    synchronize,
    unique_id,
)  # fmt: skip

COUNT = 1001


def of(rank: int, count: int = COUNT, seed: int = 0) -> Array:
    return np.random.default_rng(1000 * seed + rank).integers(0, 1 << 30, count, dtype=np.int32)


start()
comm, on = join(unique_id()), stream()
answer = c_int()
for question, expected in (("ncclCommCount", RANKS), ("ncclCommUserRank", RANK), ("ncclCommCuDevice", 0)):
    nccl(question, comm, byref(answer))
    expect(answer.value == expected, f"{question} says {answer.value}")


def same(what: str, memory: Memory, expected: Array) -> None:
    expect(synchronize(on) == 0, f"synchronize after {what}")
    expect(np.array_equal(memory.read(np.int32, len(expected)), expected), what)


# --- one to all, all to one, all to all
for root in range(RANKS):
    mine, all_of_it = holding(of(RANK)), Memory(4 * COUNT * RANKS)
    nccl("ncclBroadcast", mine.address, all_of_it.address, COUNT, INT32, root, comm, on)
    same("broadcast", all_of_it, of(root))
    nccl("ncclBcast", mine.address, COUNT, INT32, root, comm, on)
    same("bcast", mine, of(root))
    mine.write(of(RANK))
    nccl("ncclGather", mine.address, all_of_it.address, COUNT, INT32, root, comm, on)
    if root == RANK:
        same("gather", all_of_it, np.concatenate([of(rank) for rank in range(RANKS)]))
    all_of_it.write(np.concatenate([of(rank, seed=root + 1) for rank in range(RANKS)]))
    nccl("ncclScatter", all_of_it.address, mine.address, COUNT, INT32, root, comm, on)
    same("scatter", mine, of(RANK, seed=root + 1))
mine, all_of_it = holding(of(RANK)), Memory(4 * COUNT * RANKS)
nccl("ncclAllGather", mine.address, all_of_it.address, COUNT, INT32, comm, on)
same("all-gather", all_of_it, np.concatenate([of(rank) for rank in range(RANKS)]))
nccl("ncclAllGather", all_of_it.address + 4 * COUNT * RANK, all_of_it.address, COUNT, INT32, comm, on)
same("all-gather in place", all_of_it, np.concatenate([of(rank) for rank in range(RANKS)]))
out = Memory(4 * COUNT * RANKS)
all_of_it.write(np.concatenate([of(RANK, seed=to + 50) for to in range(RANKS)]))
nccl("ncclAlltoAll", all_of_it.address, out.address, COUNT, INT32, comm, on)
same("all-to-all", out, np.concatenate([of(rank, seed=RANK + 50) for rank in range(RANKS)]))

# --- a ring, larger than what a socket holds; then to itself; several to one rank, in order
BIG = 1 << 20
send, receive = holding(of(RANK, BIG)), Memory(4 * BIG)
nccl("ncclGroupStart")
nccl("ncclSend", send.address, BIG, INT32, (RANK + 1) % RANKS, comm, on)
nccl("ncclRecv", receive.address, BIG, INT32, (RANK - 1) % RANKS, comm, on)
nccl("ncclGroupEnd")
same("ring", receive, of((RANK - 1) % RANKS, BIG))
nccl("ncclGroupStart")
nccl("ncclSend", send.address, COUNT, INT32, RANK, comm, on)
nccl("ncclRecv", receive.address, COUNT, INT32, RANK, comm, on)
nccl("ncclGroupEnd")
same("to itself", receive, of(RANK, BIG)[:COUNT])
nccl("ncclGroupStart")
if RANK == 0:
    for each in range(2):
        for rank in range(1, RANKS):
            nccl("ncclRecv", receive.address + 4 * (each * RANKS + rank) * COUNT, COUNT, INT32, rank, comm, on)
else:
    for each in range(2):
        nccl("ncclSend", send.address + 4 * each * COUNT, COUNT, INT32, 0, comm, on)
nccl("ncclGroupEnd")
expect(synchronize(on) == 0, "synchronize")
if RANK == 0:
    got = receive.read(np.int32, 2 * RANKS * COUNT)
    for each in range(2):
        for rank in range(1, RANKS):
            part = got[(each * RANKS + rank) * COUNT :][:COUNT]
            expect(np.array_equal(part, of(rank, BIG)[each * COUNT :][:COUNT]), f"message {each} of rank {rank}")
# one sends, another receives, alone and not in a group
if RANK < 2:
    call = "ncclSend" if RANK == 0 else "ncclRecv"
    nccl(call, (send if RANK == 0 else receive).address, COUNT, INT32, 1 - RANK, comm, on)
    if RANK == 1:
        same("from rank 0", receive, of(0, BIG)[:COUNT])

# --- a group with collectives in two streams: each waits for both
other = stream()
first, second = holding(np.full(COUNT, 1.0, np.float32)), holding(np.full(COUNT, 2.0, np.float32))
nccl("ncclGroupStart")
nccl("ncclAllReduce", first.address, first.address, COUNT, FLOAT32, 0, comm, on)
nccl("ncclAllReduce", second.address, second.address, COUNT, FLOAT32, 0, comm, other)
nccl("ncclGroupEnd")
expect(synchronize(other) == 0, "synchronize the other stream")
expect((first.read(np.float32, COUNT) == RANKS).all(), "the first of a group")
expect((second.read(np.float32, COUNT) == 2 * RANKS).all(), "the second of a group")
# a hundred without waiting, in turns in both
for i in range(100):
    nccl("ncclAllReduce", first.address, first.address, COUNT, FLOAT32, 2, comm, (on, other)[i % 2])
expect(synchronize(on) == 0 and synchronize(other) == 0, "synchronize both")
expect((first.read(np.float32, COUNT) == RANKS).all(), "a hundred maxima")

# --- parts of it: by the last bit, in the opposite order; and one that takes no part
half = c_void_p()
nccl("ncclCommSplit", comm, RANK % 2, -RANK, byref(half), None)
members = [rank for rank in range(RANKS) if rank % 2 == RANK % 2][::-1]
nccl("ncclCommCount", half, byref(answer))
expect(answer.value == len(members), "members of a part")
nccl("ncclCommUserRank", half, byref(answer))
expect(members[answer.value] == RANK, "the rank in a part")
mine.write(of(RANK))
nccl("ncclAllGather", mine.address, all_of_it.address, COUNT, INT32, half, on)
same("all-gather of a part", all_of_it, np.concatenate([of(rank) for rank in members]))
none = c_void_p(1)
nccl("ncclCommSplit", comm, -1 if RANK == 0 else 5, 0, byref(none), None)
expect((none.value is None) == (RANK == 0), "no colour, no communicator")
if RANK != 0:
    nccl("ncclAllReduce", mine.address, all_of_it.address, COUNT, INT32, 0, none, on)
    same("without rank 0", all_of_it, sum((of(rank) for rank in range(1, RANKS)), np.zeros(COUNT, np.int32)))

# --- a second communicator beside it, and one in a group with operations of both
twin = join(unique_id("twin"))
nccl("ncclGroupStart")
nccl("ncclAllReduce", mine.address, all_of_it.address, COUNT, INT32, 2, comm, on)
nccl("ncclAllReduce", mine.address, out.address, COUNT, INT32, 3, twin, other)
nccl("ncclGroupEnd")
everything = np.array([of(rank) for rank in range(RANKS)])
same("maxima", all_of_it, everything.max(axis=0))
expect(synchronize(other) == 0, "synchronize")
expect(np.array_equal(out.read(np.int32, COUNT), everything.min(axis=0)), "minima in the twin")

# --- a configuration of an older caller: nothing behind its end may be read
PAGE = mmap.PAGESIZE
area = mmap.mmap(-1, 2 * PAGE)
base = ctypes.addressof(ctypes.c_char.from_buffer(area))
expect(ctypes.CDLL(None).mprotect(c_void_p(base + PAGE), PAGE, 0) == 0, "mprotect")
config = np.array([16], np.uint64).tobytes() + np.array([0xCAFEBEEF, 21400], np.uint32).tobytes()
ctypes.memmove(base + PAGE - len(config), config, len(config))
older = c_void_p()
place = c_void_p(base + PAGE - len(config))
code = NCCL.ncclCommInitRankConfig(byref(older), c_int(RANKS), unique_id("older"), c_int(RANK), place)
expect(code == 0, f"a short configuration: {code}")
nccl("ncclCommDestroy", older)
ctypes.memset(base + PAGE - len(config) + 8, 0, 4)
code = NCCL.ncclCommInitRankConfig(byref(older), c_int(RANKS), unique_id("older2"), c_int(RANK), place)
expect(code == 4, f"one that was not initialised: {code}")

# --- memory of NCCL's, registered
pointer, registered, window = c_void_p(), c_void_p(), c_void_p(1)
nccl("ncclMemAlloc", byref(pointer), 4096)
nccl("ncclCommRegister", comm, pointer, 4096, byref(registered))
nccl("ncclAllReduce", pointer, pointer, 1024, INT32, 0, comm, on)
expect(synchronize(on) == 0, "memory of NCCL's")
nccl("ncclCommDeregister", comm, registered)
nccl("ncclCommWindowRegister", comm, pointer, 4096, byref(window), 0)
expect(window.value is None, "a window where there is none")
nccl("ncclMemFree", pointer)

# --- what is wrong is refused, and the rest goes on
for name, arguments in (
    ("ncclAllReduce", (mine.address, out.address, COUNT, 12, 0, comm, on)),
    ("ncclAllReduce", (mine.address, out.address, COUNT, INT32, 99, comm, on)),
    ("ncclBroadcast", (mine.address, out.address, COUNT, INT32, RANKS, comm, on)),
    ("ncclAllReduce", (0, out.address, COUNT, INT32, 0, comm, on)),
    ("ncclAllReduce", (mine.address, out.address, COUNT, INT32, 0, c_void_p(12345), on)),
    ("ncclGroupEnd", ()),
    ("ncclCommRevoke", (comm, 0)),
):
    try:
        nccl(name, *arguments)
        expect(False, f"{name} took what is wrong")
    except NcclError as error:
        expect(error.code in (4, 5), f"{name} returned {error.code}")
nccl("ncclAllReduce", mine.address, out.address, 0, INT32, 0, comm, on)
state = c_int(9)
nccl("ncclCommGetAsyncError", comm, byref(state))
expect(state.value == 0, f"an asynchronous error {state.value}")
version = c_int()
nccl("ncclGetVersion", byref(version))
expect(version.value == 22809, f"version {version.value}")
expect(NCCL.ncclGetErrorString(0) == b"no error", "text of success")
expect(NCCL.pncclAllReduce is not None, "the name for profilers")
for one in (half, twin, none):
    if one.value:
        nccl("ncclCommFinalize", one)
        nccl("ncclCommDestroy", one)
nccl("ncclCommDestroy", comm)
say("done")
