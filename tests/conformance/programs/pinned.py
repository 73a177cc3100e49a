"""Pinned host memory: asynchronous copies, reuse right after they are done, kernels that read and write it."""

import ctypes

from calls import D2H, H2D, RUNTIME, byref, c_uint, c_void_p, expect, kernel, launch, malloc, pattern, read, say

SIZE = 3 << 20
copy, mix = kernel("copy_bytes"), kernel("mix")


def pinned(size: int, flags: int = 0) -> int:
    pointer = c_void_p()
    RUNTIME.cudaHostAlloc(byref(pointer), size, flags)
    return pointer.value or 0


one, two = pinned(SIZE), pinned(SIZE, 3)  # portable, mapped
device = malloc(SIZE)
stream = c_void_p()
RUNTIME.cudaStreamCreateWithFlags(byref(stream), 1)

# The buffer is filled anew as soon as the copy from it is done, as a data loader does.
parts = [malloc(SIZE // 8) for _ in range(8)]
for index, part in enumerate(parts):
    ctypes.memmove(one, pattern(SIZE // 8, index), SIZE // 8)
    RUNTIME.cudaMemcpyAsync(part, one, SIZE // 8, H2D, stream)
    RUNTIME.cudaStreamSynchronize(stream)
ctypes.memset(one, 0, SIZE)
for index, part in enumerate(parts):
    expect(read(part, SIZE // 8) == pattern(SIZE // 8, index), f"part {index}")

# To the host, on a stream; the result counts once the stream is done and is the program's to change.
for index, part in enumerate(parts):
    RUNTIME.cudaMemcpyAsync(two + index * (SIZE // 8), part, SIZE // 8, D2H, stream)
RUNTIME.cudaStreamSynchronize(stream)
say(ctypes.string_at(two, SIZE))
ctypes.memset(two, 0x11, SIZE)
RUNTIME.cudaMemcpy(device, one, 16, H2D)
expect(ctypes.string_at(two, SIZE) == b"\x11" * SIZE, "what the program wrote over a result")

# Kernels read and write it by its own address.
flags, mapped = c_uint(), c_void_p()
RUNTIME.cudaHostGetDevicePointer(byref(mapped), two, 0)
expect(mapped.value == two, "one address on both sides")
RUNTIME.cudaHostGetFlags(byref(flags), two)
ctypes.memmove(one, pattern(SIZE, 99), SIZE)
launch(copy, 16, 256, device, one, SIZE, stream=stream)
launch(copy, 16, 256, two, device, SIZE, stream=stream)
RUNTIME.cudaStreamSynchronize(stream)
expect(ctypes.string_at(two, SIZE) == pattern(SIZE, 99), "kernels on pinned memory")
for step in range(10):
    launch(mix, 8, 64, device, step, SIZE // 8, stream=stream)
RUNTIME.cudaMemcpy2DAsync(two, 256, device, 512, 200, 1000, D2H, stream)
RUNTIME.cudaStreamSynchronize(stream)
say(ctypes.string_at(two, 256 * 1000))
say(read(device, SIZE))

for index in range(40):
    extra = pinned(1000 + index)
    ctypes.memset(extra, index, 1000)
    RUNTIME.cudaMemcpy(device + 1000 * index, extra, 1000, H2D)
    RUNTIME.cudaFreeHost(extra)
say(read(device, 40_000))
RUNTIME.cudaFreeHost(one)
RUNTIME.cudaFreeHost(two)
expect(RUNTIME.code("cudaFreeHost", 0x1000) != 0, "free of what is not pinned")
