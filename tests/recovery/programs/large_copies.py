"""Copies, each larger than the journal, both ways; also without any wait between them.

large_copies.py MIB
"""

import ctypes
import sys

from calls import D2H, H2D, RUNTIME, expect, kernel, launch, malloc, pattern, say

size = (int(sys.argv[1]) << 20) + 12345
mix = kernel("mix")
data = pattern(1 << 20, 1) * (size // (1 << 20) + 1)
source, back = ctypes.create_string_buffer(data[:size], size), ctypes.create_string_buffer(size)
device = malloc(size)
RUNTIME.cudaMemcpy(device, source, size, H2D)
RUNTIME.cudaMemcpy(back, device, size, D2H)
expect(back.raw == source.raw, "there and back")
for step in range(3):
    RUNTIME.cudaMemcpyAsync(device + 8 * step, source, size - 8 * step, H2D, 0)
    launch(mix, 16, 128, device, step, 100_000)
RUNTIME.cudaMemcpy(back, device, size, D2H)
say(back.raw)
