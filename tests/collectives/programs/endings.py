"""Ranks that end a communicator at moments far apart. Rank 1 does so first and leaves `began.1`; the others do
once there is `end`, and leave `ended.RANK`. All go on in the other communicator until there is `enough`."""

import numpy as np
from nccl import (
    FOLDER,
    NCCL,
    RANK,
    RANKS,
    byref,
    c_int,
    c_void_p,
    expect,
    holding,
    join,
    nccl,
    say,
    start,
    steps,
    stream,
    synchronize,
    there,
    unique_id,
)

UINT32, SUM, COUNT, READ_EVERY = 3, 0, 1 << 10, 8


def main() -> None:
    start()
    comm, on, second = join(unique_id()), stream(), c_void_p()
    nccl("ncclCommSplit", comm, c_int(0), c_int(RANK), byref(second), None)
    numbers = np.arange(COUNT, dtype=np.uint32)
    memory = holding(numbers + RANK)
    total = RANKS * numbers + RANKS * (RANKS - 1) // 2
    ended = False

    def end() -> None:
        nonlocal ended
        if NCCL.ncclCommDestroy(second):
            raise SystemExit("it cannot be ended")
        ended = True

    for step in steps(0, READ_EVERY):
        summed = holding(np.zeros(COUNT, np.uint32))
        nccl("ncclAllReduce", memory.address, summed.address, COUNT, UINT32, SUM, comm, on)
        if step == 0:
            nccl("ncclAllReduce", memory.address, summed.address, COUNT, UINT32, SUM, second, on)
        if step % READ_EVERY == 0:
            expect(synchronize(on) == 0 and bool((summed.read(np.uint32, COUNT) == total).all()), f"step {step}")
            if step == 0 and RANK == 1:
                end()
            there("began")
            if not ended and (FOLDER / "end").exists():
                end()
                there("ended")
        else:
            synchronize(on)
        summed.free()
    say("done")


if __name__ == "__main__":
    main()
