"""Host functions and stream callbacks: in stream order, each exactly once, seeing what was copied before them."""

import ctypes
import time

from calls import D2H, RUNTIME, byref, c_void_p, expect, kernel, launch, malloc, say

HostFunction = ctypes.CFUNCTYPE(None, c_void_p)
StreamCallback = ctypes.CFUNCTYPE(None, c_void_p, ctypes.c_int, c_void_p)

fill = kernel("fill")
area = malloc(8)
pointer = c_void_p()
RUNTIME.cudaHostAlloc(byref(pointer), 8, 0)
pinned = ctypes.c_uint64.from_address(pointer.value or 0)
stream = c_void_p()
RUNTIME.cudaStreamCreateWithFlags(byref(stream), 1)
calls: list[tuple[str, int, int]] = []


def function(data: int | None) -> None:
    calls.append(("function", data or 0, pinned.value))


def callback(where: int | None, status: int, data: int | None) -> None:
    expect(where == stream.value, "the callback's stream")
    calls.append(("callback", data or 0, status * 1_000_000 + pinned.value))


host_function, stream_callback = HostFunction(function), StreamCallback(callback)
for index in range(60):
    launch(fill, 1, 1, area, index * 10, 1, stream=stream)
    RUNTIME.cudaMemcpyAsync(pointer, area, 8, D2H, stream)
    if index % 2:
        RUNTIME.cudaLaunchHostFunc(stream, host_function, index)
    else:
        RUNTIME.cudaStreamAddCallback(stream, stream_callback, index, 0)
RUNTIME.cudaStreamSynchronize(stream)
expect(len(calls) == 60, f"60 calls, not {len(calls)}")
expect([c[1] for c in calls] == list(range(60)), "in order")
say(calls)


# What comes after a function in the stream waits for it.
def slow(_: int | None) -> None:
    time.sleep(0.05)
    calls.append(("slow", 0, 0))


slow_function = HostFunction(slow)
RUNTIME.cudaLaunchHostFunc(stream, slow_function, 0)
launch(fill, 1, 1, area, 4321, 1, stream=stream)
expect(RUNTIME.code("cudaStreamQuery", stream) == 600, "the stream is busy while a host function runs")
RUNTIME.cudaMemcpyAsync(pointer, area, 8, D2H, stream)
RUNTIME.cudaStreamSynchronize(stream)
expect(len(calls) == 61 and pinned.value == 4321, "after the slow function")
RUNTIME.cudaStreamDestroy(stream)
say(len(calls))
