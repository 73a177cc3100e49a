"""Out of memory is reported by the call that ran out; the program frees what it can spare and goes on."""

from calls import RUNTIME, byref, c_size_t, c_void_p, expect, kernel, launch, malloc, read, say

MIB = 1 << 20
fill, mix = kernel("fill"), kernel("mix")
keep = malloc(MIB)
launch(fill, 8, 64, keep, 1, MIB // 8)
free, total = c_size_t(), c_size_t()
RUNTIME.cudaMemGetInfo(byref(free), byref(total))
piece = max(total.value // 16 // MIB, 1) * MIB

pieces: list[int] = []
for _ in range(100):
    pointer = c_void_p()
    code = RUNTIME.code("cudaMalloc", byref(pointer), piece)
    if code:
        break
    pieces.append(pointer.value or 0)
expect(code == 2, f"out of memory, not {code}")
expect(RUNTIME.code("cudaGetLastError") == 2, "the last error")
say("pieces", len(pieces) > 8)
expect(RUNTIME.code("cudaMalloc", byref(c_void_p()), 1 << 45) == 2, "more than there is at all")
expect(RUNTIME.code("cudaMallocAsync", byref(c_void_p()), piece * 2, 0) == 2, "from the pool, too")
RUNTIME.code("cudaGetLastError")
launch(mix, 8, 64, keep, 2, MIB // 8)

RUNTIME.cudaFree(pieces.pop())
RUNTIME.cudaFree(pieces.pop())
again = malloc(piece)
launch(fill, 8, 64, again, 77, 1000)
launch(mix, 8, 64, again, 3, 1000)
say(read(again, 8000), read(keep, MIB))
for pointer_value in pieces:
    RUNTIME.cudaFree(pointer_value)
RUNTIME.cudaFree(again)
say(read(keep, MIB))
