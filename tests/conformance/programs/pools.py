"""Stream-ordered allocation: the default pool and pools of one's own, with statistics, threshold and trim."""

import threading
from ctypes import Structure, c_int, c_ubyte, c_uint64, c_ushort

from calls import DRIVER, RUNTIME, byref, c_size_t, c_void_p, expect, expect_error, kernel, launch, malloc, read, say

N = 4096
MIB = 1 << 20
RELEASE_THRESHOLD, RESERVED, USED, USED_HIGH = 4, 5, 7, 8
fill, mix = kernel("fill"), kernel("mix")
stream, pool = c_void_p(), c_void_p()
RUNTIME.cudaStreamCreateWithFlags(byref(stream), 1)


def get(which: c_void_p, attribute: int) -> int:
    value = c_uint64()
    RUNTIME.cudaMemPoolGetAttribute(which, attribute, byref(value))
    return value.value


def from_pool(size: int) -> int:
    pointer = c_void_p()
    RUNTIME.cudaMallocAsync(byref(pointer), size, stream)
    return pointer.value or 0


# Allocate, use, free, all in the order of a stream, as a training step does; the same memory again and again.
kept = malloc(8 * N)
RUNTIME.cudaMemsetAsync(kept, 0, 8 * N, stream)  # the legacy stream's would be in no order with what follows
for step in range(40):
    a, b = from_pool(8 * N), from_pool(3 * MIB + step)
    launch(fill, 8, 64, a, step, N, stream=stream)
    RUNTIME.cudaMemcpyAsync(b, a, 8 * N, 3, stream)
    RUNTIME.cudaFreeAsync(a, stream)
    launch(mix, 8, 64, b, step, N, stream=stream)
    RUNTIME.cudaMemcpyAsync(kept, b, 8 * N, 3, stream)
    launch(mix, 8, 64, kept, step, N, stream=stream)
    RUNTIME.cudaFreeAsync(b, stream)
RUNTIME.cudaStreamSynchronize(stream)
say(read(kept, 8 * N))

RUNTIME.cudaDeviceGetDefaultMemPool(byref(pool), 0)
expect(get(pool, USED) == 0, "everything was freed")
expect(get(pool, USED_HIGH) == 8 * N + 3 * MIB + 39, "high-water mark of what was requested, not rounded")
say("high", get(pool, USED_HIGH))


class Properties(Structure):
    """cudaMemPoolProps."""

    _fields_ = (
        ("allocType", c_int),
        ("handleTypes", c_int),
        ("locationType", c_int),
        ("locationId", c_int),
        ("security", c_void_p),
        ("maxSize", c_size_t),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 54),
    )


own = c_void_p()
RUNTIME.cudaMemPoolCreate(byref(own), byref(Properties(allocType=1, locationType=1)))
threshold = c_uint64(2**64 - 1)
RUNTIME.cudaMemPoolSetAttribute(own, RELEASE_THRESHOLD, byref(threshold))
expect(get(own, RELEASE_THRESHOLD) == 2**64 - 1, "threshold")
pointers = []
for index in range(5):
    pointer = c_void_p()
    RUNTIME.cudaMallocFromPoolAsync(byref(pointer), MIB, own, stream)
    pointers.append(pointer.value or 0)
    launch(fill, 8, 64, pointers[-1], index, MIB // 8, stream=stream)
expect(get(own, USED) >= 5 * MIB, "in use")
for pointer_value in pointers[1:]:
    RUNTIME.cudaFreeAsync(pointer_value, stream)
RUNTIME.cudaStreamSynchronize(stream)
expect(get(own, RESERVED) >= 5 * MIB, "kept below the threshold")
RUNTIME.cudaMemPoolTrimTo(own, 0)
expect(get(own, RESERVED) >= get(own, USED) >= MIB, "after a trim, what is in use")
say(read(pointers[0], MIB))
RUNTIME.cudaFree(pointers[0])
RUNTIME.cudaMemPoolDestroy(own)

# Memory of a pool may be freed by cudaFree, and memory of cudaMalloc by cudaFreeAsync.
RUNTIME.cudaFree(from_pool(1000))
RUNTIME.cudaFreeAsync(kept, stream)
RUNTIME.cudaDeviceSynchronize()
expect_error(RUNTIME, 1, "cudaFreeAsync", 4242, stream)

# A thread without a context may free in a stream, which has one; not in a default stream.
last = from_pool(1000)
answers: list[int | None] = []


def free() -> None:
    current = c_void_p()
    DRIVER.cuCtxGetCurrent(byref(current))
    answers.append(current.value)
    answers.append(DRIVER.code("cuMemFreeAsync", c_uint64(last), None))
    answers.append(DRIVER.code("cuMemFreeAsync", c_uint64(last), stream))


thread = threading.Thread(target=free)
thread.start()
thread.join()
expect(answers == [None, 201, 0], f"a free without a context: {answers}")
RUNTIME.cudaDeviceSynchronize()
