"""Launches: parameters by pointer and packed, every size of parameter, three dimensions, shared memory, Ex forms."""

from ctypes import Structure, addressof, c_double, c_uint8, c_uint16, c_uint64, create_string_buffer, sizeof

from calls import (
    DRIVER,
    RUNTIME,
    Dim3,
    byref,
    c_float,
    c_int,
    c_uint,
    c_void_p,
    expect,
    expect_error,
    kernel,
    launch,
    left_out,
    malloc,
    pack,
    read,
    say,
)


class Pair(Structure):
    """As in kernels.c."""

    _fields_ = (("first", c_uint8), ("second", c_double))


class Packed(Structure):
    """The parameters of the kernel `parameters`, packed as the compiler does."""

    _fields_ = (
        ("a", c_uint8),
        ("b", c_uint16),
        ("c", c_uint),
        ("d", c_uint64),
        ("e", c_float),
        ("f", c_double),
        ("g", Pair),
        ("out", c_uint64),
    )


class Config(Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("gridX", c_uint),
        ("gridY", c_uint),
        ("gridZ", c_uint),
        ("blockX", c_uint),
        ("blockY", c_uint),
        ("blockZ", c_uint),
        ("shared", c_uint),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("count", c_uint),
    )


class Attribute(Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", c_uint), ("padding", c_uint), ("value", c_uint * 16))


out = malloc(64)
every = kernel("parameters")


def result() -> list[float]:
    return list((c_double * 8).from_buffer_copy(read(out, 64)))


for n in range(5):
    values = (
        c_uint8(200 + n),
        c_uint16(60000 + n),
        c_uint(2**32 - 1 - n),
        c_uint64(2**52 + n),
        c_float(0.5 + n),
        c_double(1e300 / (n + 1)),
        Pair(7 + n, -0.125 * n),
    )
    expected = [200 + n, 60000 + n, 2**32 - 1 - n, 2**52 + n, 0.5 + n, 1e300 / (n + 1), 7 + n, -0.125 * n]
    DRIVER.cuLaunchKernel(every, 1, 1, 1, 1, 1, 1, 0, 0, pack(*values, out), 0)
    expect(result() == expected, "parameters by pointer")
    packed = Packed(*values, out)
    size = c_uint64(sizeof(packed))
    extra = (c_void_p * 5)(1, addressof(packed), 2, addressof(size), 0)
    RUNTIME.cudaMemset(out, 0, 64)
    DRIVER.cuLaunchKernel(every, 1, 1, 1, 1, 1, 1, 0, 0, 0, extra)
    expect(result() == expected, "parameters in one block")
    RUNTIME.cudaMemset(out, 0, 64)
    attributes = (Attribute * 2)(Attribute(0), Attribute(8))
    config = Config(1, 1, 1, 1, 1, 1, 0, None, addressof(attributes), 2)
    DRIVER.cuLaunchKernelEx(byref(config), every, pack(*values, out), 0)
    expect(result() == expected, "cuLaunchKernelEx")
    # cudaLaunchConfig_t: grid, block, size_t, stream, attributes, count.
    raw = create_string_buffer(bytes(Dim3(1, 1, 1)) * 2, 56)
    RUNTIME.cudaMemset(out, 0, 64)
    RUNTIME.cudaLaunchKernelExC(raw, every, pack(*values, out))
    expect(result() == expected, "cudaLaunchKernelExC")
    say(expected)

places = kernel("places")
total = 4 * 3 * 2 * 5 * 2 * 3
area = malloc(4 * total)
RUNTIME.cudaLaunchKernel(places, Dim3(4, 3, 2), Dim3(5, 2, 3), pack(area), 0, 0)
found = list((c_uint * total).from_buffer_copy(read(area, 4 * total)))
expect(found == [i // 30 << 16 | i % 30 for i in range(total)], "places of threads in three dimensions")
cooperative = c_int()
RUNTIME.cudaDeviceGetAttribute(byref(cooperative), 95, 0)
answer = RUNTIME.code("cudaLaunchCooperativeKernel", places, Dim3(2, 1, 1), Dim3(60, 2, 1), pack(area), 0, 0)
expect(answer == (0 if cooperative.value else 801), "a cooperative launch, where the device offers it")
say(read(area, 4 * 240))

data = malloc(8 * 256)
launch(kernel("fill"), 1, 256, data, 1000, 256)
reverse = kernel("reverse")
RUNTIME.cudaLaunchKernel(reverse, Dim3(4, 1, 1), Dim3(64, 1, 1), pack(data), 512, 0)
numbers = list((c_uint64 * 256).from_buffer_copy(read(data, 2048)))
expect(numbers == [1000 + b * 64 + 63 - t for b in range(4) for t in range(64)], "reversed by way of shared memory")
launch(kernel("nothing"), 1, 1)

# Packed parameters of another size than the kernel takes.
if not left_out("packed parameters of the wrong size, or none, are undefined"):
    packed = Packed(*values, out)
    size = c_uint64(sizeof(packed) - 8)
    extra = (c_void_p * 5)(1, addressof(packed), 2, addressof(size), 0)
    expect_error(DRIVER, 1, "cuLaunchKernel", every, 1, 1, 1, 1, 1, 1, 0, 0, 0, extra)
    size = c_uint64(sizeof(packed))
    extra = (c_void_p * 5)(1, None, 2, addressof(size), 0)
    expect_error(DRIVER, 1, "cuLaunchKernel", every, 1, 1, 1, 1, 1, 1, 0, 0, 0, extra)

# What cannot be launched, says so at the call, and nothing else is harmed.
one, row = Dim3(1, 1, 1), Dim3(65, 1, 1)
version = c_int()
RUNTIME.cudaRuntimeGetVersion(byref(version))
shape = 9 if version.value < 13000 else 1  # newer runtimes pass on what the driver says; measured on an H200
expect_error(RUNTIME, 1, "cudaLaunchKernel", reverse, one, row, pack(data), 520, 0)  # more than its 64 threads
expect_error(RUNTIME, shape, "cudaLaunchKernel", places, one, Dim3(2000, 1, 1), pack(area), 0, 0)
expect_error(RUNTIME, shape, "cudaLaunchKernel", places, Dim3(0, 1, 1), one, pack(area), 0, 0)
expect_error(RUNTIME, 1, "cudaLaunchKernel", reverse, one, one, pack(data), 1 << 30, 0)
expect_error(DRIVER, 1, "cuLaunchKernel", places, 1, 1, 1, 1, 0, 1, 0, 0, pack(area), 0)
if not left_out("the driver crashes at a handle that is none"):
    expect_error(DRIVER, 400, "cuLaunchKernel", 99, 1, 1, 1, 1, 1, 1, 0, 0, pack(area), 0)
    expect_error(DRIVER, 400, "cuLaunchKernel", places, 1, 1, 1, 1, 1, 1, 0, 4711, pack(area), 0)
RUNTIME.code("cudaGetLastError")
RUNTIME.cudaDeviceSynchronize()
say(read(data, 2048))
