"""fork: the child may not use its parent's driver, and exits as usual; the parent goes on unharmed. Page-locked memory
is the same in both, as with the driver: a loader's worker fills its parent's buffers."""

import ctypes
import os
import sys

from calls import H2D, RUNTIME, byref, c_void_p, expect, kernel, launch, malloc, read, say

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

host = c_void_p()
RUNTIME.cudaHostAlloc(byref(host), 1 << 20, 0)
address = host.value or 0
ctypes.memset(address, 1, 1 << 20)
child = os.fork()
if child == 0:
    seen = ctypes.string_at(address, 1 << 20) == b"\x01" * (1 << 20)
    ctypes.memset(address + 4096, 2, 4096)
    os._exit(0 if seen else 1)
expect(os.waitpid(child, 0)[1] == 0, "the child reads what its parent has written")
expect(ctypes.string_at(address + 4096, 4096) == b"\x02" * 4096, "and the parent what the child has")
RUNTIME.cudaMemcpy(area, address, 8 * N, H2D)
launch(mix, 4, 64, area, 13, N)
say(read(area, 8 * N))
ctypes.memset(address, 3, 8 * N)
RUNTIME.cudaFreeHost(host)
say(read(area, 8 * N))
