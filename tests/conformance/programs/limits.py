"""Limits of a context: what is set is what is read, and a reset takes it back."""

from calls import DRIVER, RUNTIME, byref, c_size_t, c_void_p, expect, expect_error, left_out, say

STACK, PRINTF, HEAP, DEPTH = range(4)
NONE = 99


def limit(which: int) -> int:
    found = c_size_t()
    RUNTIME.cudaDeviceGetLimit(byref(found), which)
    return found.value


RUNTIME.cudaSetDevice(0)
defaults = [limit(which) for which in (STACK, PRINTF, HEAP)]
say(defaults)
for which, value in ((STACK, 16 << 10), (PRINTF, 16 << 20), (HEAP, 32 << 20)):
    RUNTIME.cudaDeviceSetLimit(which, value)
    expect(limit(which) == value, "what is set")
RUNTIME.cudaDeviceSetLimit(STACK, 5000)
expect(limit(STACK) >= 5000, "at least what is set")
say(limit(STACK))

expect_error(DRIVER, 1, "cuCtxSetLimit", STACK, 1 << 30)
if not left_out("the driver takes a heap that is larger than the device, and fails at the next launch"):
    expect_error(DRIVER, 2, "cuCtxSetLimit", HEAP, 1 << 50)
expect_error(DRIVER, 1, "cuCtxSetLimit", NONE, 1)
expect_error(DRIVER, 1, "cuCtxGetLimit", byref(c_size_t()), NONE)
expect_error(DRIVER, 215, "cuCtxSetLimit", DEPTH, 2)
if not left_out("the driver may crash at a null pointer"):
    expect_error(DRIVER, 1, "cuCtxGetLimit", None, STACK)
say(limit(STACK), limit(PRINTF), limit(HEAP))

RUNTIME.cudaDeviceReset()
expect([limit(which) for which in (STACK, PRINTF, HEAP)] == defaults, "the defaults again")

# Those of a context of its own go with it.
own = c_void_p()
if DRIVER.code("cuCtxCreate_v4", byref(own), 0, 0, 0) != 0:
    DRIVER.cuCtxCreate_v2(byref(own), 0, 0)
DRIVER.cuCtxSetLimit(HEAP, 64 << 20)
found = c_size_t()
DRIVER.cuCtxGetLimit(byref(found), HEAP)
expect(found.value == 64 << 20, "what is set in it")
DRIVER.cuCtxDestroy_v2(own)
RUNTIME.cudaSetDevice(0)
expect(limit(HEAP) == defaults[2], "the default again")
