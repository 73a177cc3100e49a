"""A stream that was waited for has nothing to do, whatever other streams have, and however long one looks."""

import time
from ctypes import CFUNCTYPE

from calls import DRIVER, byref, c_void_p, expect, malloc, say

LOOKS = 0.025  # s: work of other streams is looked at every 10 ms

area, beside = malloc(4096), c_void_p()
DRIVER.cuStreamCreate(byref(beside), 1)
# It ends by itself, so that the process can be moved meanwhile.
lasts = CFUNCTYPE(None, c_void_p)(lambda _: time.sleep(2 * LOOKS))
busy = 0
for _ in range(20):
    DRIVER.cuLaunchHostFunc(beside, lasts, None)
    DRIVER.cuMemsetD8Async(area, 1, 4096, None)
    DRIVER.cuStreamSynchronize(None)
    until = time.monotonic() + LOOKS
    while time.monotonic() < until:
        busy += DRIVER.code("cuStreamQuery", None) != 0
    DRIVER.cuStreamSynchronize(beside)
expect(busy == 0, f"the default stream had work {busy} times")
say("nothing to do")
