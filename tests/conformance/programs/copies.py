"""cudaMemcpy of every kind and of many sizes: smaller and larger than what fits a record."""

from ctypes import addressof, create_string_buffer

from calls import D2D, D2H, DEFAULT, H2D, H2H, RUNTIME, expect, expect_error, malloc, pattern, say

MIB = 1 << 20
SIZES = (1, 8, 1000, 16 << 10, (16 << 10) + 1, 1 << 20, (1 << 20) + 5, 4 * MIB, 9 * MIB + 123)

for size in SIZES:
    data = pattern(size, size)
    source, back = create_string_buffer(data, size), create_string_buffer(size)
    one, two = malloc(size), malloc(size)
    RUNTIME.cudaMemcpy(one, source, size, H2D)
    RUNTIME.cudaMemcpy(two, one, size, D2D)
    RUNTIME.cudaMemcpy(back, two, size, D2H)
    expect(back.raw == data, f"{size} bytes there and back")
    say(size, back.raw)

    # The kind can be left to the driver.
    third = create_string_buffer(size)
    RUNTIME.cudaMemcpy(third, source, size, H2H)
    expect(third.raw == data, "host to host")
    fresh = pattern(size, size + 1)
    RUNTIME.cudaMemcpy(one, create_string_buffer(fresh, size), size, DEFAULT)
    RUNTIME.cudaMemcpy(two, one, size, DEFAULT)
    RUNTIME.cudaMemcpy(third, two, size, DEFAULT)
    expect(third.raw == fresh, "default kind")
    RUNTIME.cudaMemcpy(source, third, size, DEFAULT)
    expect(source.raw == fresh, "default kind, host to host")

    # The middle only.
    if size > 100:
        RUNTIME.cudaMemcpy(two + 50, one, size - 100, D2D)
        RUNTIME.cudaMemcpy(back, two, size, D2H)
        expect(back.raw == fresh[:50] + fresh[: size - 100] + fresh[size - 50 :], "a part")
    RUNTIME.cudaFree(one)
    RUNTIME.cudaFree(two)

# The program may change its buffer as soon as the copy has returned.
pointers = [malloc(5000) for _ in range(20)]
buffer = create_string_buffer(5000)
for i, pointer in enumerate(pointers):
    buffer.raw = pattern(5000, i)
    RUNTIME.cudaMemcpyAsync(pointer, buffer, 5000, H2D, 0)
buffer.raw = bytes(5000)
for i, pointer in enumerate(pointers):
    RUNTIME.cudaMemcpy(buffer, pointer, 5000, D2H)
    expect(buffer.raw == pattern(5000, i), "a copy from memory that was changed afterwards")

RUNTIME.cudaMemcpy(pointers[0], buffer, 0, H2D)
expect_error(RUNTIME, 1, "cudaMemcpy", pointers[0], addressof(buffer), 1 << 40, H2D)
expect_error(RUNTIME, 1, "cudaMemcpy", 0, addressof(buffer), 8, H2D)
expect(RUNTIME.code("cudaGetLastError") == 1, "the last error")
expect(RUNTIME.code("cudaGetLastError") == 0, "and only once")
