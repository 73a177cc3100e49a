"""Keeps its device at work until its standard input ends. It rests for a moment after some kernels only, so that who
looks finds it at work also where this program gets no processor for a while."""

import select
import sys

from calls import RUNTIME, kernel, launch, malloc, say

N, KERNELS = 1 << 16, 32
area, mix = malloc(8 * N), kernel("mix")
launch(mix, 4, 64, area, 1, N)
RUNTIME.cudaDeviceSynchronize()
say("busy")
while not select.select([sys.stdin], [], [], 0)[0]:
    for _ in range(KERNELS):
        launch(mix, 4, 64, area, 20, N)
    RUNTIME.cudaDeviceSynchronize()
