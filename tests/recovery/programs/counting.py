"""Kernels that count in variables of their module, for which this program never asks.

As stepwise.py: each line on standard input is a number of launches, each answer what the last of them counted.
"""

import sys

from calls import RUNTIME, byref, c_void_p, kernel, launch, malloc, read, say

count, out, stream = kernel("count"), malloc(8), c_void_p()
RUNTIME.cudaStreamCreateWithFlags(byref(stream), 1)
for line in sys.stdin:
    for _ in range(int(line)):
        launch(count, 1, 1, out, stream=stream)
    RUNTIME.cudaStreamSynchronize(stream)
    say(int.from_bytes(read(out, 8), sys.byteorder))
