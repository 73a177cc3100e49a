"""The driver's own memory mapping: reserve, create, map, access; grown like an expandable segment; unmapped."""

from ctypes import Structure, c_int, c_ubyte, c_ushort

from calls import (
    DRIVER,
    RUNTIME,
    byref,
    c_size_t,
    c_uint,
    c_void_p,
    expect,
    expect_error,
    kernel,
    launch,
    left_out,
    pattern,
    read,
    say,
    write,
)


class Properties(Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handles", c_int),
        ("location", c_int),
        ("ordinal", c_int),
        ("windows", c_void_p),
        ("compression", c_ubyte),
        ("rdma", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class Access(Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", c_int), ("ordinal", c_int), ("flags", c_int))


RUNTIME.cudaFree(0)
properties = Properties(type=1, location=1, ordinal=0)
granularity = c_size_t()
DRIVER.cuMemGetAllocationGranularity(byref(granularity), byref(properties), 0)
step = granularity.value
say("granularity", step)
base = c_void_p()
DRIVER.cuMemAddressReserve(byref(base), 16 * step, 0, 0, 0)
start = base.value or 0
expect(start % step == 0, "alignment")
access = Access(1, 0, 3)
mix = kernel("mix")

handles = []
for index in range(4):
    handle = c_void_p()
    DRIVER.cuMemCreate(byref(handle), step, byref(properties), 0)
    DRIVER.cuMemMap(start + index * step, step, 0, handle, 0)
    DRIVER.cuMemSetAccess(start + index * step, step, byref(access), 1)
    handles.append(handle)
    RUNTIME.cudaMemset(start + index * step, 0, step)
    write(start + index * step, pattern(4096, index))
    launch(mix, 8, 64, start, 5, (index + 1) * step // 8)  # over all that is mapped so far
say(read(start, 4 * step))

# Moved: what a handle holds appears where it is mapped next.
DRIVER.cuMemUnmap(start + step, step)
kept = read(start + 2 * step, step)
DRIVER.cuMemUnmap(start + 2 * step, step)
DRIVER.cuMemMap(start + 8 * step, step, 0, handles[2], 0)
DRIVER.cuMemSetAccess(start + 8 * step, step, byref(access), 1)
expect(read(start + 8 * step, step) == kept, "the same memory at another address")
flags = c_uint()
again = c_void_p()
DRIVER.cuMemRetainAllocationHandle(byref(again), start + 8 * step)
expect(again.value == handles[2].value, "the handle behind an address")
DRIVER.cuMemRelease(again)
expect(RUNTIME.code("cudaMemset", start + step, 0, 64) != 0, "unmapped memory cannot be set")
RUNTIME.code("cudaGetLastError")
launch(mix, 8, 64, start + 8 * step, 9, 1000)
say(read(start + 8 * step, step))

for index in (0, 3, 8):
    DRIVER.cuMemUnmap(start + index * step, step)
for handle in handles:
    DRIVER.cuMemRelease(handle)
DRIVER.cuMemAddressFree(start, 16 * step)

# Addresses come back: a device has fewer of them than this takes in all, used or not.
for index in range(30):
    far, handle = c_void_p(), c_void_p()
    DRIVER.cuMemAddressReserve(byref(far), 1 << 40, 0, 0, 0)
    at = (far.value or 0) + index * step
    if index % 3 == 0:
        DRIVER.cuMemCreate(byref(handle), step, byref(properties), 0)
        DRIVER.cuMemMap(at, step, 0, handle, 0)
        DRIVER.cuMemSetAccess(at, step, byref(access), 1)
        RUNTIME.cudaMemset(at, index, 64)
        expect(read(at, 64) == bytes([index] * 64), "memory at addresses that come and go")
        DRIVER.cuMemUnmap(at, step)
        DRIVER.cuMemRelease(handle)
    DRIVER.cuMemAddressFree(far, 1 << 40)
expect_error(DRIVER, 1, "cuMemCreate", byref(again), step + 1, byref(properties), 0)
if not left_out("the driver crashes at a handle that is none"):
    expect(DRIVER.code("cuMemMap", start, step, 0, 1234, 0) != 0, "a handle that is none")
