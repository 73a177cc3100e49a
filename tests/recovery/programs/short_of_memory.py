"""Allocates until there is no more, works on with what it has."""

from calls import RUNTIME, byref, c_void_p, expect, say

first = c_void_p()
code = RUNTIME.code("cudaMalloc", byref(first), 64 << 20)
say("out of memory", code)
expect(RUNTIME.code("cudaGetLastError") == code, "the last error")
expect(RUNTIME.code("cudaDeviceSynchronize") == 0, "the device is well")
say("and on")
