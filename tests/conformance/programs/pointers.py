"""What the driver knows about a pointer."""

from ctypes import addressof, create_string_buffer

from calls import DRIVER, RUNTIME, byref, c_int, c_size_t, c_uint, c_void_p, expect, expect_error, malloc, say

HOST, DEVICE = 1, 2
pinned, ordinary = c_void_p(), create_string_buffer(64)
RUNTIME.cudaHostAlloc(byref(pinned), 10_000, 0)
device = malloc(100_000)


def runtime_attributes(pointer: int) -> tuple[int, int, int, int]:
    raw = create_string_buffer(256)
    RUNTIME.cudaPointerGetAttributes(raw, pointer)
    return tuple(int.from_bytes(raw.raw[a:b], "little") for a, b in ((0, 4), (4, 8), (8, 16), (16, 24)))  # type: ignore[return-value]


expect(runtime_attributes(device + 77)[:3] == (DEVICE, 0, device + 77), "a device pointer")
host = (pinned.value or 0) + 5
expect(runtime_attributes(host) == (HOST, 0, host, host), "a pinned pointer")
expect(runtime_attributes(addressof(ordinary))[0] == 0, "a pointer to ordinary memory")

kind, ordinal, start, size = c_uint(), c_int(), c_void_p(), c_size_t()
DRIVER.cuPointerGetAttribute(byref(kind), 2, device + 5)
expect(kind.value == DEVICE, "memory type")
DRIVER.cuPointerGetAttribute(byref(start), 11, device + 99_999)
DRIVER.cuPointerGetAttribute(byref(size), 12, device + 5)
expect((start.value, size.value) == (device, 100_000), "range of an allocation")
identity, other = c_void_p(), c_void_p()
second = malloc(10)
DRIVER.cuPointerGetAttribute(byref(identity), 7, device)
DRIVER.cuPointerGetAttribute(byref(other), 7, second)
expect(identity.value != other.value, "buffer ids")
attributes = (c_uint * 4)(2, 9, 8, 11)
managed = c_uint(7)
pointers = (c_void_p * 4)(addressof(kind), addressof(ordinal), addressof(managed), addressof(start))
DRIVER.cuPointerGetAttributes(4, attributes, pointers, device + 1000)
expect((kind.value, ordinal.value, managed.value & 0xFF, start.value) == (DEVICE, 0, 0, device), "several at once")
DRIVER.cuMemGetAddressRange_v2(byref(start), byref(size), device + 500)
expect((start.value, size.value) == (device, 100_000), "address range")
RUNTIME.cudaFree(device)
expect_error(DRIVER, 1, "cuPointerGetAttribute", byref(kind), 2, device + 5)
expect_error(DRIVER, 1, "cuPointerGetAttribute", byref(kind), 2, addressof(ordinary))
say("done")
