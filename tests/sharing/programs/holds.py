"""One of a job's processes (several.py). At each line on standard input it takes device memory, gives some back, or
looks at what is left; and says what came of it. What it holds goes through a kernel."""

import sys
from ctypes import byref, c_size_t, c_void_p

from calls import DRIVER, RUNTIME, kernel, launch, malloc, read

MIB = 1 << 20
mix = kernel("mix")
kept, n = malloc(2 * MIB), 2 * MIB // 8
RUNTIME.cudaMemset(kept, 1, 2 * MIB)
pieces: list[int] = []


def take(size: int) -> int:
    where = c_void_p()
    code = RUNTIME.code("cudaMalloc", byref(where), size * MIB)
    if code == 0:
        pieces.append(where.value or 0)
    return int(code)


def left() -> tuple[int, int]:
    free, total = c_size_t(), c_size_t()
    DRIVER.cuMemGetInfo_v2(byref(free), byref(total))
    return free.value // MIB, total.value // MIB


print("ready", flush=True)
for line in sys.stdin:
    words = line.split()
    if words[0] == "take":
        reply: object = take(int(words[1]))
    elif words[0] == "fill":  # in pieces of so many MiB, until there is no more
        count = 0
        while take(int(words[1])) == 0:
            count += 1
        reply = count
    elif words[0] == "give":  # all
        for piece in pieces:
            RUNTIME.cudaFree(piece)
        reply = len(pieces)
        pieces.clear()
    elif words[0] == "left":
        free, total = left()
        reply = f"{free} of {total}"
    else:
        launch(mix, 4, 64, kept, 1, n)
        reply = read(kept, 4096)
    print(reply, flush=True)
