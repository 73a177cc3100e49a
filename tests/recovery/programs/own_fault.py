"""A fault of the program's own: it gets the CUDA error, at once and again, until the context is reset; then it can
work again.

    own_fault.py store|assert|trap|misaligned
"""

import sys

from calls import D2H, RUNTIME, byref, c_void_p, expect, kernel, launch, malloc, read, say, write

which = sys.argv[1]
N = 1000
fill, mix = kernel("fill"), kernel("mix")
before = malloc(8 * N)
launch(fill, 2, 64, before, 1, N)
launch(mix, 2, 64, before, 1, N)
say("before", read(before, 8 * N))

number = malloc(8)
write(number, (1000).to_bytes(8, "little"))
if which == "store":
    expected = 700
    launch(kernel("store"), 1, 1, 0x10)
elif which == "assert":
    expected = 710
    launch(kernel("assert_small"), 1, 1, number)
elif which == "trap":
    expected = 719
    launch(kernel("trap"), 1, 1, 0)
else:
    expected = 716
    launch(kernel("aligned"), 1, 1, number + 1)
code = RUNTIME.code("cudaDeviceSynchronize")
expect(code == expected, f"the error is {code}, not {expected}")
expect(RUNTIME.code("cudaDeviceSynchronize") == expected, "it stays")
expect(RUNTIME.code("cudaMalloc", byref(c_void_p()), 10) == expected, "for every call")
expect(RUNTIME.code("cudaMemcpy", number, before, 8, D2H) == expected, "for copies")
say("error", code)

# libcudart may hand the error out once more, but the reset is done.
expect(RUNTIME.code("cudaDeviceReset") in (0, expected), "the reset")
after = malloc(8 * N)
RUNTIME.cudaMemset(after, 1, 8 * N)
RUNTIME.cudaMemset(after + 8, 0, 80)
say("after a reset", read(after, 8 * N))
