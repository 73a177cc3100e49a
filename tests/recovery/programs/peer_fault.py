"""The second device's kernel touches memory of the first without access, which is the program's own fault: the second
device answers with it, the first goes on. After a reset, and with access, the same kernel works."""

from calls import DRIVER, RUNTIME, byref, c_void_p, expect, kernel, launch, malloc, read, say

N = 1000
contexts, areas = [], []
fill, mix = kernel("fill"), kernel("mix")
for ordinal in range(2):
    RUNTIME.cudaSetDevice(ordinal)
    RUNTIME.cudaFree(0)
    context = c_void_p()
    DRIVER.cuDevicePrimaryCtxRetain(byref(context), ordinal)
    contexts.append(context)
    areas.append(malloc(8 * N))
    launch(fill, 2, 64, areas[ordinal], ordinal, N)
    RUNTIME.cudaDeviceSynchronize()
launch(mix, 2, 64, areas[0], 1, N)
code = RUNTIME.code("cudaDeviceSynchronize")
expect(code == 700, f"the error is {code}, not 700")
expect(RUNTIME.code("cudaDeviceSynchronize") == 700, "it stays")
say("error", code)
RUNTIME.cudaSetDevice(0)
launch(mix, 2, 64, areas[0], 2, N)
say("the other device", read(areas[0], 8 * N))
RUNTIME.cudaSetDevice(1)
expect(RUNTIME.code("cudaDeviceReset") in (0, 700), "the reset")
after = malloc(8 * N)
RUNTIME.cudaMemset(after, 1, 8 * N)
RUNTIME.cudaDeviceEnablePeerAccess(0, 0)
launch(mix, 2, 64, areas[0], 3, N)
RUNTIME.cudaMemcpyPeer(after, 1, areas[0], 0, 4 * N)
say("with access", read(after, 8 * N))
