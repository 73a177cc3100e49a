"""Events: order between streams, queries, elapsed time, flags, reuse, destruction while pending."""

from calls import RUNTIME, byref, c_float, event, expect, expect_error, kernel, launch, malloc, read, say, stream

N = 3000
mix, fill = kernel("mix"), kernel("fill")


start, end, untimed = event(0), event(0), event(2)
one, two = stream(), stream()
area = malloc(8 * N)

# Never recorded: done, and no wait.
expect(RUNTIME.code("cudaEventQuery", start) == 0, "an event that was never recorded")
RUNTIME.cudaEventSynchronize(start)
RUNTIME.cudaStreamWaitEvent(one, start, 0)

# Two streams take turns on one area; only the events keep them apart.
RUNTIME.cudaEventRecord(start, one)
launch(fill, 8, 64, area, 1, N, stream=one)
for step in range(20):
    launch(mix, 8, 64, area, 200 + step, N, stream=one)
    RUNTIME.cudaEventRecord(untimed, one)
    RUNTIME.cudaStreamWaitEvent(two, untimed, 0)
    launch(mix, 8, 64, area, 300 + step, N, stream=two)
    RUNTIME.cudaEventRecord(untimed, two)
    RUNTIME.cudaStreamWaitEvent(one, untimed, 0)
RUNTIME.cudaEventRecord(end, one)
RUNTIME.cudaEventSynchronize(end)
expect(RUNTIME.code("cudaEventQuery", end) == 0, "done after synchronise")
say(read(area, 8 * N))

elapsed = c_float(-1)
RUNTIME.cudaEventElapsedTime(byref(elapsed), start, end)
expect(elapsed.value >= 0, "elapsed time")
expect_error(RUNTIME, 400, "cudaEventElapsedTime", byref(elapsed), start, untimed)
expect(RUNTIME.code("cudaGetLastError") == 400, "the last error")

# Many events, recorded in turn, waited for by query only.
events = [event(2) for _ in range(50)]
for index, handle in enumerate(events):
    launch(mix, 2, 64, area, index, 100, stream=one)
    RUNTIME.cudaEventRecord(handle, one)
while (answer := RUNTIME.code("cudaEventQuery", events[-1])) == 600:
    pass
expect(answer == 0, "the last event")
expect(all(RUNTIME.code("cudaEventQuery", handle) == 0 for handle in events), "those before it")
for handle in events:
    RUNTIME.cudaEventDestroy(handle)

# Destroyed while it is pending.
launch(mix, 2, 64, area, 3000, N, stream=one)
RUNTIME.cudaEventRecord(untimed, one)
RUNTIME.cudaStreamWaitEvent(two, untimed, 0)
RUNTIME.cudaEventDestroy(untimed)
launch(mix, 2, 64, area, 7, N, stream=two)
RUNTIME.cudaDeviceSynchronize()
say(read(area, 8 * N))
