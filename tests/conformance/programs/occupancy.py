"""Occupancy, function attributes."""

from ctypes import create_string_buffer

from calls import DRIVER, RUNTIME, byref, c_int, c_size_t, expect, kernel, launch, malloc, read, say

mix, reverse = kernel("mix"), kernel("reverse")
blocks, size, least = c_int(), c_size_t(), c_int()
for function, threads, shared in ((mix, 32, 0), (mix, 256, 0), (mix, 1024, 0), (reverse, 64, 512), (mix, 128, 40_000)):
    RUNTIME.cudaOccupancyMaxActiveBlocksPerMultiprocessor(byref(blocks), function, threads, shared)
    expect(blocks.value >= 1, "at least one block")
    say(threads, shared, blocks.value)
    RUNTIME.cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(byref(least), function, threads, shared, 1)
    expect(least.value >= 1, "with flags")
DRIVER.cuOccupancyMaxPotentialBlockSize(byref(least), byref(blocks), mix, 0, 0, 0)
say(least.value, blocks.value)
expect(blocks.value >= 32, "block size")
RUNTIME.cudaOccupancyAvailableDynamicSMemPerBlock(byref(size), mix, 1, 128)
say(size.value)

# cudaFuncAttributes: three sizes, then ints; maxThreadsPerBlock is the first of these.
for function, limit, static in ((mix, 1024, 0), (reverse, 64, 1024)):
    raw = create_string_buffer(256)
    RUNTIME.cudaFuncGetAttributes(raw, function)
    expect(int.from_bytes(raw.raw[:8], "little") == static, "static shared memory")
    expect(int.from_bytes(raw.raw[24:28], "little") == limit, "largest block")
    say(raw.raw[:28].hex())
RUNTIME.cudaFuncSetAttribute(mix, 8, 32 << 10)  # most dynamic shared memory
value = c_int()
area = malloc(800)
launch(kernel("fill"), 1, 1, area, 1, 100)
launch(mix, 1, 100, area, 3, 100)
say(read(area, 800))
