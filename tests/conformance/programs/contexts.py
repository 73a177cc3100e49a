"""The context stack: primary contexts, contexts of one's own, limits, flags."""

from ctypes import create_string_buffer

from calls import (
    DRIVER,
    RUNTIME,
    byref,
    c_char_p,
    c_int,
    c_size_t,
    c_uint,
    c_void_p,
    expect,
    expect_error,
    image,
    pack,
    say,
)


def current() -> int:
    handle = c_void_p()
    DRIVER.cuCtxGetCurrent(byref(handle))
    return handle.value or 0


DRIVER.cuInit(0)
expect(current() == 0, "no context at first")
expect_error(DRIVER, 201, "cuCtxSynchronize")
flags, active = c_uint(), c_int(7)
DRIVER.cuDevicePrimaryCtxGetState(0, byref(flags), byref(active))
expect(active.value == 0, "the primary context is not active yet")
primary = c_void_p()
DRIVER.cuDevicePrimaryCtxRetain(byref(primary), 0)
DRIVER.cuDevicePrimaryCtxGetState(0, byref(flags), byref(active))
expect(active.value == 1, "and now it is")
expect(current() == 0, "retaining does not make it current")
DRIVER.cuCtxPushCurrent_v2(primary)
expect(current() == primary.value, "pushed")

# A context of one's own, with memory and a module of its own.
own = c_void_p()
if DRIVER.code("cuCtxCreate_v4", byref(own), 0, 0, 0) != 0:
    DRIVER.cuCtxCreate_v2(byref(own), 0, 0)
expect(current() == own.value != primary.value, "creating makes it current")
pointer, module, function = c_void_p(), c_void_p(), c_void_p()
DRIVER.cuMemAlloc_v2(byref(pointer), 800)
DRIVER.cuModuleLoadData(byref(module), c_char_p(image()))
DRIVER.cuModuleGetFunction(byref(function), module, c_char_p(b"fill"))
DRIVER.cuLaunchKernel(function, 1, 1, 1, 10, 1, 1, 0, 0, pack(pointer, 5, 100), 0)
DRIVER.cuCtxSynchronize()
buffer = create_string_buffer(800)
DRIVER.cuMemcpyDtoH_v2(buffer, pointer, 800)
say(buffer.raw)

popped = c_void_p()
DRIVER.cuCtxPopCurrent_v2(byref(popped))
expect(popped.value == own.value and current() == primary.value, "popped")
DRIVER.cuCtxSetCurrent(own)
expect(current() == own.value, "set replaces the top")
device, version, limit = c_int(-1), c_uint(), c_size_t()
DRIVER.cuCtxGetDevice(byref(device))
DRIVER.cuCtxGetApiVersion(own, byref(version))
expect(device.value == 0 and version.value > 3000, "device and version of the context")
DRIVER.cuCtxSetLimit(0, 4096)
DRIVER.cuCtxGetLimit(byref(limit), 0)
expect(limit.value >= 4096, "stack limit")
DRIVER.cuCtxGetFlags(byref(flags))
DRIVER.cuCtxDestroy_v2(own)
DRIVER.cuCtxSetCurrent(0)
expect(current() == 0, "nothing current")
DRIVER.cuCtxSetCurrent(primary)
DRIVER.cuDevicePrimaryCtxRelease_v2(0)

# The runtime shares the primary context; a reset takes everything in it, and it can be used again.
RUNTIME.cudaSetDevice(0)
RUNTIME.cudaMalloc(byref(pointer), 64)
expect(current() == primary.value, "one primary context")
RUNTIME.cudaDeviceReset()
RUNTIME.cudaMalloc(byref(pointer), 64)
RUNTIME.cudaMemset(pointer, 3, 64)
RUNTIME.cudaMemcpy(buffer, pointer, 64, 2)
say(buffer.raw[:64])
