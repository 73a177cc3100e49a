"""Ranks that something happens to: `... HOW`. A rank ends well if it met no wrong data."""

import sys
import time

import numpy as np
from nccl import (
    DRIVER,
    FLOAT32,
    FOLDER,
    INT32,
    NCCL,
    RANK,
    RANKS,
    Memory,
    NcclError,
    UniqueId,
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
    there,
    unique_id,
    wait_for_file,
)  # fmt: skip

COUNT = 1 << 12
how = sys.argv[4]
start()


def missing() -> None:
    """Rank 0 waits for one that does not come."""
    if RANK == RANKS - 1:
        return
    began = time.monotonic()
    try:
        join(unique_id())
    except NcclError as error:
        say(error.reason)
        expect(error.code == 2, f"code {error.code}")
        expect(time.monotonic() - began < 30, "soon enough")
        there("ended")
    else:
        expect(False, "a communicator without all of its ranks")
    # The process has lost nothing: it can go on alone.
    expect(holding(np.full(4, 7, np.int32)).read(np.int32, 4).tolist() == [7] * 4, "memory afterwards")
    alone = join(own_id(), 1, 0)
    nccl("ncclCommDestroy", alone)


def own_id() -> UniqueId:
    made = UniqueId()
    nccl("ncclGetUniqueId", byref(made))
    return made


def until_it_fails() -> None:
    """Sums whose results are checked, until a call fails. A wrong sum ends the program."""
    comm, on = join(unique_id()), stream()
    memory = Memory(4 * COUNT)
    there("began")
    for step in range(1_000_000):
        try:
            memory.write(np.full(COUNT, step * RANKS + RANK, np.float32))
            nccl("ncclAllReduce", memory.address, memory.address, COUNT, FLOAT32, 0, comm, on)
        except (SystemExit, NcclError) as error:
            say(f"failed with {error}")
            return
        if code := synchronize(on):
            state = c_int()
            nccl("ncclCommGetAsyncError", comm, byref(state))
            say(f"failed with {code}")
            expect(state.value != 0, "the communicator knows nothing of it")
            NCCL.ncclCommAbort(comm)
            return
        out = np.empty(COUNT, np.float32)
        if code := DRIVER.cuMemcpyDtoH_v2(c_void_p(out.ctypes.data), c_void_p(memory.address), c_void_p(out.nbytes)):
            say(f"failed with {code}")
            return
        total = np.float32(sum(step * RANKS + rank for rank in range(RANKS)))
        expect((out == total).all(), f"the sum of step {step}")


def mismatch() -> None:
    """Ranks that call different things."""
    comm, on = join(unique_id()), stream()
    memory = Memory(8 * COUNT)
    nccl("ncclAllReduce", memory.address, memory.address, COUNT + RANK, FLOAT32, 0, comm, on)
    say(f"failed with {synchronize(on)}")


def late() -> None:
    """The last rank does nothing, for longer than the others wait."""
    comm, on = join(unique_id()), stream()
    memory = Memory(4 * COUNT)
    if RANK == RANKS - 1:
        wait_for_file("ended.0")
        return
    nccl("ncclAllReduce", memory.address, memory.address, COUNT, FLOAT32, 0, comm, on)
    say(f"failed with {synchronize(on)}")
    there("ended")


def abort() -> None:
    """A collective that the last rank does not begin is aborted; the process goes on, in another communicator."""
    comm, on = join(unique_id()), stream()
    memory = holding(np.full(COUNT, RANK, np.int32))
    if RANK != RANKS - 1:
        nccl("ncclAllReduce", memory.address, memory.address, COUNT, INT32, 0, comm, on)
        time.sleep(0.2)
    nccl("ncclCommAbort", comm)
    expect(synchronize(on) == 0, "the stream after an abort")
    other = join(unique_id("other"))
    memory.write(np.full(COUNT, RANK, np.int32))
    nccl("ncclAllReduce", memory.address, memory.address, COUNT, INT32, 0, other, on)
    expect(synchronize(on) == 0, "a sum after it")
    expect((memory.read(np.int32, COUNT) == sum(range(RANKS))).all(), "the sum")
    nccl("ncclCommDestroy", other)
    say("went on")


def ended() -> None:
    """After its communicators have ended and a snapshot was taken, a process can be recovered like any other."""
    comm, on = join(unique_id()), stream()
    memory = holding(np.full(COUNT, 1, np.int32))
    nccl("ncclAllReduce", memory.address, memory.address, COUNT, INT32, 0, comm, on)
    expect(synchronize(on) == 0, "a sum")
    nccl("ncclCommDestroy", comm)
    there("alone")
    other = Memory(64)
    while not (FOLDER / "killed").exists():
        other.write(np.zeros(16, np.int32))  # so that there is something to take a snapshot of
        time.sleep(0.01)
    expect((memory.read(np.int32, COUNT) == RANKS).all(), "the sum, after the recovery")
    say("went on")


def meets() -> None:
    """The last rank comes when it may; what happened meanwhile nobody notices."""
    memory = holding(np.full(COUNT, RANK, np.int32))
    there("began")
    if RANK == RANKS - 1:
        wait_for_file("come")
    comm, on = join(unique_id()), stream()
    nccl("ncclAllReduce", memory.address, memory.address, COUNT, INT32, 0, comm, on)
    expect(synchronize(on) == 0, "a sum")
    expect((memory.read(np.int32, COUNT) == sum(range(RANKS))).all(), "the sum")
    say("went on")


def loads() -> None:
    """Rank 0 copies more than its journal holds, while the others wait for it in a collective: at first before any, and
    then between two, so that no snapshot of all ranks is possible."""
    comm, on = join(unique_id()), stream()
    memory, large = Memory(4 * COUNT), Memory(64 << 20)
    data = np.random.default_rng(RANK).integers(0, 255, 64 << 20, np.uint8)
    there("began")
    for step in range(3):
        if RANK == 0:
            large.write(data)
        memory.write(np.full(COUNT, step + RANK, np.int32))
        for again in range(4):  # in place
            nccl("ncclAllReduce", memory.address, memory.address, COUNT, INT32, 0, comm, on)
            if RANK == 0 and again == 1 and step == 1:
                large.write(data)
        expect(synchronize(on) == 0, "the sums")
        total = sum(step + rank for rank in range(RANKS)) * RANKS**3
        expect((memory.read(np.int32, COUNT) == total).all(), f"the sum of step {step}")
        if RANK == 0:
            expect((large.read(np.uint8, data.size) == data).all(), "what was copied")
    say("went on")


def sleeps() -> None:
    """The last rank is slow on its host, while the others wait for it: one in a collective with it, two for that one.
    After that all go on, and the last one, whose device is busy now, is slow again."""
    comm, on, beside = join(unique_id()), stream(), stream()
    pair = c_void_p()
    nccl("ncclCommSplit", comm, RANK // 2, 0, byref(pair), None)
    memory, other = holding(np.full(COUNT, 1, np.int32)), holding(np.full(COUNT, 1, np.int32))
    slow = float(sys.argv[5])
    if RANK == RANKS - 1:
        time.sleep(slow)
    nccl("ncclAllReduce", memory.address, memory.address, COUNT, INT32, 0, pair, on)
    expect(synchronize(on) == 0, "the sum of a pair")
    nccl("ncclAllReduce", memory.address, memory.address, COUNT, INT32, 0, comm, on)
    expect(synchronize(on) == 0, "the sum of all")
    expect((memory.read(np.int32, COUNT) == 2 * RANKS).all(), "the sums")
    # Every device waits for another rank, and none can go on before a program does something.
    if RANK == RANKS - 1:
        nccl("ncclAllReduce", other.address, other.address, COUNT, INT32, 0, comm, beside)
        time.sleep(slow)
        nccl("ncclAllReduce", memory.address, memory.address, COUNT, INT32, 0, pair, on)
    else:
        if RANK == RANKS - 2:
            nccl("ncclAllReduce", memory.address, memory.address, COUNT, INT32, 0, pair, on)
            expect(synchronize(on) == 0, "the sum of the last pair")
        nccl("ncclAllReduce", other.address, other.address, COUNT, INT32, 0, comm, beside)
    expect(synchronize(beside) == 0, "the last sum")
    expect((other.read(np.int32, COUNT) == RANKS).all(), "the last sum")
    say("went on")


def deadlock() -> None:
    """Each waits for another: natively for ever."""
    first, second, on = join(unique_id("first")), join(unique_id("second")), stream()
    memory = holding(np.full(COUNT, 1, np.int32))
    there("began")
    for comm in (first, second) if RANK else (second, first):
        nccl("ncclAllReduce", memory.address, memory.address, COUNT, INT32, 0, comm, on)
        if code := synchronize(on):
            say(f"failed with {code}")
            return
    say("went on")


def leaves() -> None:
    """A rank that ends first, without a word, does not disturb the others, which need it no more."""
    comm, on = join(unique_id()), stream()
    memory = holding(np.full(COUNT, 1, np.int32))
    nccl("ncclAllReduce", memory.address, memory.address, COUNT, INT32, 0, comm, on)
    if RANK == 0:
        expect(synchronize(on) == 0, "a sum")
        time.sleep(1)
        expect((memory.read(np.int32, COUNT) == RANKS).all(), "the sum")
    else:
        expect(synchronize(on) == 0, "a sum")
    say("went on")


{
    "missing": missing, "kill": until_it_fails, "mismatch": mismatch, "late": late, "abort": abort, "ended": ended,
    "leaves": leaves, "loads": loads, "meets": meets,
    "sleeps": sleeps, "deadlock": deadlock,
}[how]()  # fmt: skip
