"""Reductions of every type and operator, in place and not, of many lengths: equal to the model's to the last bit."""

from typing import Any

import numpy as np
from model import SCALED, Array, reduced, some, storage
from nccl import (
    AVERAGE,
    NAMES,
    RANK,
    RANKS,
    Memory,
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

COUNTS = (1, 3, 257, 5000)


def inputs(kind: int, count: int, seed: int) -> list[Array]:
    return [some(kind, count, seed * 100 + rank) for rank in range(RANKS)]


start()
comm, on = join(unique_id()), stream()
checks = 0


def check(what: str, memory: Memory, expected: Array, offset: int = 0) -> None:
    global checks
    got = memory.read(np.uint8, offset + expected.nbytes)[offset:]
    if not np.array_equal(got, expected.view(np.uint8)):
        bad = np.flatnonzero(got.view(expected.dtype) != expected)
        first = f"[{bad[0]}]: {got.view(expected.dtype)[bad[0]]} not {expected[bad[0]]}"
        expect(False, f"{what}: {len(bad)} differ, first {first}")
    checks += 1


def operator(kind: int, op: int, by_device: bool = False) -> tuple[int, list[Array], Any]:
    """Its number for NCCL, each rank's scalar, and what has to live as long."""
    if op != SCALED:
        return op, [], None
    scalars = [some(kind, 1, 7000 + kind * 10 + rank) for rank in range(RANKS)]
    mine, made = scalars[RANK].copy(), c_int()
    memory = holding(mine) if by_device else None
    where = c_void_p(memory.address) if memory else c_void_p(mine.ctypes.data)
    nccl("ncclRedOpCreatePreMulSum", byref(made), where, kind, 0 if by_device else 1, comm)
    return made.value, scalars, (mine, memory)


for kind, name in enumerate(NAMES):
    for op in range(SCALED + 1):
        for at, count in enumerate(COUNTS if op in (0, AVERAGE) else COUNTS[1:3]):
            data = inputs(kind, count, kind * 31 + op * 7 + at)
            number, scalars, alive = operator(kind, op, by_device=at == 1)
            expected = reduced(kind, op, data, scalars)
            what = f"{name} operator {op} of {count}"
            send, receive = holding(data[RANK]), Memory(expected.nbytes)
            nccl("ncclAllReduce", send.address, receive.address, count, kind, number, comm, on)
            expect(synchronize(on) == 0, f"synchronize after {what}")
            check(f"all-reduce, {what}", receive, expected)
            check(f"input of all-reduce, {what}", send, data[RANK])
            nccl("ncclAllReduce", send.address, send.address, count, kind, number, comm, on)
            synchronize(on)
            check(f"all-reduce in place, {what}", send, expected)
            root = (kind + op) % RANKS
            send.write(data[RANK])
            nccl("ncclReduce", send.address, receive.address, count, kind, number, root, comm, on)
            synchronize(on)
            if root == RANK:
                check(f"reduce, {what}", receive, expected)
            whole = [some(kind, count * RANKS, kind * 37 + op * 5 + at + 1000 * rank) for rank in range(RANKS)]
            parts = holding(whole[RANK])
            nccl("ncclReduceScatter", parts.address, receive.address, count, kind, number, comm, on)
            synchronize(on)
            mine = slice(RANK * count, (RANK + 1) * count)
            check(f"reduce-scatter, {what}", receive, reduced(kind, op, [one[mine] for one in whole], scalars))
            size = np.dtype(storage(kind)).itemsize
            nccl("ncclReduceScatter", parts.address, parts.address + RANK * count * size, count, kind, number, comm, on)
            synchronize(on)
            check(
                f"reduce-scatter in place, {what}",
                parts,
                reduced(kind, op, [one[mine] for one in whole], scalars),
                RANK * count * size,
            )
            if alive is not None:
                nccl("ncclRedOpDestroy", number, comm)
            for memory in (send, receive, parts):
                memory.free()
nccl("ncclCommDestroy", comm)
say(f"{checks} checks")
