"""Works when it is instructed to: each line on standard input is a number of kernels; each answer what they led to.
`steps.py [MIB]`: it holds so much memory beside."""

import sys

from calls import RUNTIME, kernel, launch, malloc, read, say

N = 1 << 12
area, fill, mix = malloc(8 * N), kernel("fill"), kernel("mix")
held = malloc(int(sys.argv[1]) << 20) if len(sys.argv) > 1 else 0
launch(fill, 4, 64, area, 1, N)
RUNTIME.cudaDeviceSynchronize()
say("ready to work")
for line in sys.stdin:
    for step in range(int(line)):
        launch(mix, 4, 64, area, step % 7, N)
    RUNTIME.cudaDeviceSynchronize()
    say(int(line), read(area, 8 * N))
