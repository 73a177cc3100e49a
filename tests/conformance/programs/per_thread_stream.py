"""Per-thread default streams: every thread has one, they do not wait for each other, and the _ptsz forms mean them."""

import threading

from calls import RUNTIME, Dim3, expect, kernel, malloc, pack, read, say

N = 1000
mix = kernel("mix")
fill = kernel("fill")
areas = [malloc(8 * N) for _ in range(4)]
results: dict[int, bytes] = {}


def work(index: int) -> None:
    RUNTIME.cudaSetDevice(0)
    area = areas[index]
    one, many = Dim3(4, 1, 1), Dim3(32, 1, 1)
    RUNTIME.cudaLaunchKernel_ptsz(fill, one, many, pack(area, index, N), 0, 0)
    for step in range(10):
        RUNTIME.cudaLaunchKernel(mix, one, many, pack(area, step, N), 0, 2)  # cudaStreamPerThread
        RUNTIME.cudaLaunchKernel_ptsz(mix, one, many, pack(area, step + 100, N), 0, 0)
    RUNTIME.cudaStreamSynchronize(2)
    results[index] = read(area, 8 * N)


threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
expect(len(results) == 4, "every thread came to its end")
for index in range(4):
    say(index, results[index])
