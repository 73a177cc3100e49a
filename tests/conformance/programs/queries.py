"""A stream that was waited for has nothing to do, whatever other streams have, and however long one looks."""

import threading
import time
from ctypes import CFUNCTYPE

from calls import DRIVER, byref, c_void_p, expect, malloc, say

area, beside = malloc(4096), c_void_p()
DRIVER.cuStreamCreate(byref(beside), 1)
released = threading.Event()
waits = CFUNCTYPE(None, c_void_p)(lambda _: released.wait(60) and None)
DRIVER.cuLaunchHostFunc(beside, waits, None)
busy = 0
for _ in range(20):
    DRIVER.cuMemsetD8Async(area, 1, 4096, None)
    DRIVER.cuStreamSynchronize(None)
    until = time.monotonic() + 0.025  # work of other streams is looked at every 10 ms
    while time.monotonic() < until:
        busy += DRIVER.code("cuStreamQuery", None) != 0
released.set()
DRIVER.cuStreamSynchronize(beside)
expect(busy == 0, f"the default stream had work {busy} times")
say("nothing to do")
