"""Work that takes long, or never ends.

hanging.py endless         a kernel of the program's own that never ends: it gets the error, and can go on
hanging.py waits SECONDS   work that waits so long for the program itself, and kernels that just take their time
"""

import ctypes
import sys
import time

from calls import DRIVER, RUNTIME, byref, c_void_p, expect, kernel, launch, malloc, read, say, write

N = 1000
fill, mix = kernel("fill"), kernel("mix")
area, word = malloc(8 * N), malloc(8)
stream, other = c_void_p(), c_void_p()
RUNTIME.cudaStreamCreateWithFlags(byref(stream), 1)
RUNTIME.cudaStreamCreateWithFlags(byref(other), 1)
launch(fill, 2, 64, area, 1, N, stream=stream)
write(word, bytes(8))

if sys.argv[1] == "endless":
    for step in range(10):
        launch(mix, 2, 64, area, step, N, stream=stream)
    launch(kernel("endless"), 1, 1, word, stream=stream)
    launch(mix, 2, 64, area, 1, N, stream=stream)
    code = RUNTIME.code("cudaStreamSynchronize", stream)
    expect(code == 702, f"the error is {code}, not 702")
    expect(RUNTIME.code("cudaMalloc", byref(c_void_p()), 10) == 702, "it stays")
    RUNTIME.code("cudaDeviceReset")
    after = malloc(8 * N)
    RUNTIME.cudaMemset(after, 1, 8 * N)
    say("after a reset", read(after, 8 * N))
else:
    seconds = float(sys.argv[2])
    slow = ctypes.CFUNCTYPE(None, c_void_p)(lambda _: time.sleep(seconds))
    RUNTIME.cudaLaunchHostFunc(stream, slow, 0)
    launch(mix, 2, 64, area, 3, N, stream=stream)
    RUNTIME.cudaStreamSynchronize(stream)
    say("after a host function", read(area, 8 * N))

    DRIVER.cuStreamWaitValue32_v2(stream, word, 7, 0)
    launch(mix, 2, 64, area, 5, N, stream=stream)
    time.sleep(seconds)
    DRIVER.cuStreamWriteValue32_v2(other, word, 7, 0)
    RUNTIME.cudaStreamSynchronize(stream)
    say("after a value", read(area, 8 * N))

    rounds = 1000
    while True:  # so that one takes long, but not too long
        RUNTIME.cudaStreamSynchronize(stream)
        began = time.monotonic()
        launch(mix, 1, 1, area, rounds, 1, stream=stream)
        RUNTIME.cudaStreamSynchronize(stream)
        if time.monotonic() - began > seconds / 40:
            break
        rounds *= 2
    write(area, bytes(8 * N))
    for step in range(20):
        launch(mix, 1, 1, area, step + 3, 1, stream=stream)
        launch(mix, 1, 1, word, rounds, 1, stream=stream)
        RUNTIME.cudaStreamSynchronize(stream)
    say("after slow kernels", read(area, 8 * N))
