"""Works when it is instructed to: each line on standard input is a number of steps; each answer is what they led to."""

import sys

from calls import RUNTIME, byref, c_void_p, kernel, launch, malloc, read, say

N = 20_000
fill, mix = kernel("fill"), kernel("mix")
area, stream = malloc(8 * N), c_void_p()
RUNTIME.cudaStreamCreateWithFlags(byref(stream), 1)
launch(fill, 4, 64, area, 1, N, stream=stream)
for line in sys.stdin:
    for step in range(int(line)):
        launch(mix, 4, 64, area, step % 7, N, stream=stream)
    RUNTIME.cudaStreamSynchronize(stream)
    say(int(line), read(area, 8 * N))
