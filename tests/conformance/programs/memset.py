"""Memory set to a value: in one and two dimensions, in units of 1, 2 and 4 bytes, on a stream and at once."""

from calls import DRIVER, RUNTIME, byref, c_size_t, c_void_p, expect, expect_error, malloc, pattern, read, say, write

SIZE = 10_000
pointer = malloc(SIZE)
write(pointer, pattern(SIZE))
RUNTIME.cudaMemset(pointer + 10, 0xAB, 1000)
data = read(pointer, SIZE)
expect(data == pattern(SIZE)[:10] + b"\xab" * 1000 + pattern(SIZE)[1010:], "cudaMemset")
say(data)

RUNTIME.cudaMemsetAsync(pointer, 7, SIZE, 0)
RUNTIME.cudaMemset2D(pointer, 100, 1, 30, 50)
data = read(pointer, SIZE)
expect(data == (b"\1" * 30 + b"\7" * 70) * 50 + b"\7" * 5000, "cudaMemset2D")
RUNTIME.cudaMemset2DAsync(pointer, 100, 2, 100, 50, 0)
expect(read(pointer, 5001) == b"\2" * 5000 + b"\7", "cudaMemset2DAsync over whole rows")
say(read(pointer, SIZE))

DRIVER.cuMemsetD16_v2(pointer, 0x1234, 100)
DRIVER.cuMemsetD32Async(pointer + 200, 0xDEADBEEF, 100, 0)
DRIVER.cuMemsetD8_v2(pointer + 600, 0x55, 3)
expect(read(pointer, 603) == b"\x34\x12" * 100 + b"\xef\xbe\xad\xde" * 100 + b"UUU", "units of 2, 4 and 1 bytes")
DRIVER.cuMemsetD2D16_v2(pointer, 64, 0xFFFF, 8, 4)
DRIVER.cuMemsetD2D32_v2(pointer + 32, 64, 0, 8, 4)
expect(read(pointer, 256) == (b"\xff" * 16 + read(pointer + 16, 16) + bytes(32)) * 1 + read(pointer + 64, 192), "rows")
say(read(pointer, 256))

out, pitch = c_void_p(), c_size_t()
RUNTIME.cudaMallocPitch(byref(out), byref(pitch), 300, 20)
RUNTIME.cudaMemset2D(out, pitch, 9, 300, 20)
expect(all(read((out.value or 0) + r * pitch.value, 300) == b"\t" * 300 for r in range(20)), "pitched rows")

RUNTIME.cudaMemset(pointer, 0, 0)
expect_error(DRIVER, 1, "cuMemsetD16_v2", pointer + 1, 0, 4)  # not aligned to its unit
expect_error(RUNTIME, 1, "cudaMemset", pointer, 0, 1 << 40)
