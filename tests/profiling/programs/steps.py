"""Steps that are alike, until standard input ends: a copy to the device, five kernels of three shapes in two streams, a
copy on the device, a memset, and every step a result on the host."""

import sys
import threading

from calls import RUNTIME, byref, c_void_p, kernel, launch, malloc, pattern, read, say, write

N = 4096
ended = threading.Event()


def wait_for_the_end() -> None:
    sys.stdin.readline()
    ended.set()


threading.Thread(target=wait_for_the_end, daemon=True).start()
fill, mix = kernel("fill"), kernel("mix")
weights, batch, stream = malloc(8 * N), malloc(4096), c_void_p()
RUNTIME.cudaStreamCreateWithFlags(byref(stream), 0)
launch(fill, 4, 64, weights, 1, N)
step = 0
while not ended.is_set():
    write(batch, pattern(4096, step % 64))
    launch(mix, 1, 64, batch, 2, 512)
    for _ in range(3):
        launch(mix, 4, 64, weights, 1, N, stream=stream)
    launch(mix, 8, 32, weights, 1, N, stream=stream)
    RUNTIME.cudaMemcpyAsync(weights, batch, 4096, 3, stream)
    RUNTIME.cudaMemsetAsync(batch, 0, 64, stream)
    RUNTIME.cudaStreamSynchronize(stream)
    read(weights, 64)
    step += 1
say("steps", step >= 0)
