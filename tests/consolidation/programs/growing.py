"""One kernel after the other until its input ends. After the first line on it each of them takes far longer."""

import select
import sys
import time

from calls import RUNTIME, byref, c_void_p, kernel, launch, malloc, say

LITTLE, MUCH = 2_000, 3_000_000
fill, mix = kernel("fill"), kernel("mix")
area, stream = malloc(8 * MUCH), c_void_p()
RUNTIME.cudaStreamCreateWithFlags(byref(stream), 1)
launch(fill, 4, 64, area, 1, MUCH, stream=stream)
size = LITTLE
steps = 0
while True:
    if select.select([sys.stdin], [], [], 0)[0]:
        if not sys.stdin.readline():
            break
        size = MUCH
    launch(mix, 4, 64, area, 3, size, stream=stream)
    RUNTIME.cudaStreamSynchronize(stream)
    steps += 1
    time.sleep(0.001)
say(steps)
