"""A program's mistakes: reported by the call that made them, harmless to everything else."""

from calls import (
    DRIVER,
    RUNTIME,
    byref,
    c_char_p,
    c_int,
    c_void_p,
    expect,
    expect_error,
    kernel,
    launch,
    left_out,
    malloc,
    read,
    say,
)

N = 512
area = malloc(8 * N)
fill, mix = kernel("fill"), kernel("mix")
launch(fill, 2, 64, area, 3, N)

pointer, handle = c_void_p(), c_void_p()
expect_error(RUNTIME, 1, "cudaMalloc", 0, 10)
expect_error(RUNTIME, 21, "cudaMemcpy", area, area, 8, 77)
expect(RUNTIME.code("cudaGetLastError") != 0, "kept as the last error")
expect(RUNTIME.code("cudaGetLastError") == 0, "and cleared")
if not left_out("the driver crashes at a handle that is none"):
    for call, arguments in (
        ("cuStreamSynchronize", (0x1234,)),
        ("cuEventSynchronize", (0x1234,)),
        ("cuEventRecord", (0x1234, 0)),
        ("cuModuleUnload", (0x1234,)),
        ("cuStreamDestroy_v2", (0x1234,)),
        ("cuEventDestroy_v2", (0x1234,)),
    ):
        expect_error(DRIVER, 400, call, *arguments)
expect_error(DRIVER, 101, "cuDeviceGet", byref(c_int()), 99)
expect_error(DRIVER, 1, "cuMemFree_v2", area + 8)
expect_error(DRIVER, 1, "cuMemFree_v2", 0x7000)
stream = c_void_p()
DRIVER.cuStreamCreate(byref(stream), 0)
DRIVER.cuStreamDestroy_v2(stream)
if not left_out("what the driver does with a destroyed handle is undefined"):
    expect_error(DRIVER, 400, "cuStreamDestroy_v2", stream)
    expect_error(DRIVER, 400, "cuEventRecord", stream, 0)

text = c_char_p()
DRIVER.cuGetErrorName(700, byref(text))
say(text.value)
DRIVER.cuGetErrorString(2, byref(text))
say(text.value)
expect_error(DRIVER, 1, "cuGetErrorName", 12345, byref(text))

# An interface that is not offered says so, every time.
if not left_out("the driver offers managed memory and handles for other processes"):
    expect_error(DRIVER, 801, "cuMemAllocManaged", byref(pointer), 100, 1)
    expect_error(DRIVER, 801, "cuIpcGetMemHandle", byref(handle), area)

launch(mix, 2, 64, area, 4, N)
say(read(area, 8 * N))
