"""cudaMalloc, cudaFree, cudaMemGetInfo: addresses are distinct and stay, content stays, memory comes back."""

import random

from calls import (
    RUNTIME,
    byref,
    c_size_t,
    c_void_p,
    expect,
    expect_error,
    left_out,
    malloc,
    pattern,
    read,
    say,
    write,
)

KIB, MIB = 1 << 10, 1 << 20


def free_and_total() -> tuple[int, int]:
    free, total = c_size_t(), c_size_t()
    RUNTIME.cudaMemGetInfo(byref(free), byref(total))
    return free.value, total.value


chance = random.Random(1)
first_free, total = free_and_total()
expect(0 < first_free <= total, "free memory")

# Many sizes, in and out in no order, every one with its own content.
live: dict[int, tuple[int, int]] = {}
for step in range(160):
    if live and chance.random() < 0.4:
        pointer = chance.choice(sorted(live))
        size, seed = live.pop(pointer)
        expect(read(pointer, size) == pattern(size, seed), f"content before free {step}")
        RUNTIME.cudaFree(pointer)
    else:
        size = chance.choice([1, 7, 256, 4 * KIB, 100 * KIB, MIB, 5 * MIB + 3])
        pointer = malloc(size)
        expect(pointer % 256 == 0, "alignment")
        expect(all(pointer + size <= p or p + s <= pointer for p, (s, _) in live.items()), "overlap")
        write(pointer, pattern(size, step))
        live[pointer] = (size, step)
say("live", len(live))
if not left_out("addresses are the driver's own"):
    say("at", *sorted(live))

big = malloc(64 * MIB)
if not left_out("what is free on a GPU depends on everybody there"):
    expect(free_and_total()[0] <= first_free - 64 * MIB, "64 MiB less free memory")
RUNTIME.cudaFree(big)
for pointer, (size, seed) in live.items():
    expect(read(pointer, size) == pattern(size, seed), "content at the end")
    RUNTIME.cudaFree(pointer)

nothing = c_void_p(1)
RUNTIME.cudaMalloc(byref(nothing), 0)
expect(not nothing.value, "no memory for no bytes")
RUNTIME.cudaFree(0)
expect_error(RUNTIME, 1, "cudaFree", 12345)

pitch = c_size_t()
RUNTIME.cudaMallocPitch(byref(nothing), byref(pitch), 1000, 50)
expect(pitch.value >= 1000 and pitch.value % 256 == 0, "pitch")
say("pitch", pitch.value)
RUNTIME.cudaFree(nothing)

# Everything freed can be had again, in one piece.
again = malloc(int(first_free * 0.5) // MIB * MIB if first_free < 256 * MIB else 128 * MIB)
write(again, b"end")
expect(read(again, 3) == b"end", "after all that")
