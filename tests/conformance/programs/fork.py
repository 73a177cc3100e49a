"""fork: the child may not use its parent's driver, and exits as usual; the parent goes on unharmed."""

import os
import sys

from calls import RUNTIME, byref, c_void_p, expect, kernel, launch, malloc, read, say

N = 1000
mix, area = kernel("mix"), malloc(8 * N)
RUNTIME.cudaMemset(area, 0, 8 * N)
for _ in range(3):
    launch(mix, 4, 64, area, 10, N)
    child = os.fork()
    if child == 0:
        pointer = c_void_p()
        failed = RUNTIME.code("cudaMalloc", byref(pointer), 100) != 0
        failed = failed and RUNTIME.code("cudaDeviceSynchronize") != 0
        sys.exit(0 if failed else 1)  # with everything that exit runs
    launch(mix, 4, 64, area, 11, N)
    expect(os.waitpid(child, 0)[1] == 0, "the child's calls fail, and it exits in order")
    launch(mix, 4, 64, area, 12, N)
    say(read(area, 8 * N))
