"""Several threads at once: each its own stream and memory, one shared counter in the order of a lock."""

import threading

from calls import RUNTIME, byref, c_void_p, expect, kernel, launch, malloc, read, say

N, THREADS, STEPS = 500, 6, 30
mix, fill = kernel("mix"), kernel("fill")
shared = malloc(8 * N)
launch(fill, 1, 64, shared, 0, N)
RUNTIME.cudaDeviceSynchronize()
lock = threading.Lock()
results: dict[int, list[bytes]] = {}


def work(index: int) -> None:
    RUNTIME.cudaSetDevice(0)
    stream, event = c_void_p(), c_void_p()
    RUNTIME.cudaStreamCreateWithFlags(byref(stream), 1)
    RUNTIME.cudaEventCreateWithFlags(byref(event), 2)
    area = malloc(8 * N)
    seen = []
    launch(fill, 2, 64, area, index, N, stream=stream)
    for step in range(STEPS):
        launch(mix, 2, 64, area, step + index, N, stream=stream)
        RUNTIME.cudaEventRecord(event, stream)
        if step % 5 == 0:
            RUNTIME.cudaEventSynchronize(event)
            extra = malloc(1000 * (index + 1))
            RUNTIME.cudaMemcpy(extra, area, 1000, 3)
            seen.append(read(extra, 1000))
            RUNTIME.cudaFree(extra)
        with lock:
            launch(mix, 1, 64, shared, 1, N)  # the same step from every thread: the order does not show
    RUNTIME.cudaStreamSynchronize(stream)
    seen.append(read(area, 8 * N))
    results[index] = seen


threads = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
expect(len(results) == THREADS, "every thread came to its end")
for index in range(THREADS):
    say(index, *results[index])
say(read(shared, 8 * N))
