"""Streams: made, ordered, queried, destroyed with work in them; priorities; the three default streams."""

from calls import (
    DRIVER,
    RUNTIME,
    byref,
    c_int,
    c_uint,
    c_void_p,
    expect,
    expect_error,
    kernel,
    launch,
    left_out,
    malloc,
    read,
    say,
)

N = 2000
mix, fill = kernel("mix"), kernel("fill")
low, high = c_int(), c_int()
RUNTIME.cudaDeviceGetStreamPriorityRange(byref(low), byref(high))
handles = []
for index in range(6):
    handle = c_void_p()
    if index % 3 == 0:
        RUNTIME.cudaStreamCreate(byref(handle))
    elif index % 3 == 1:
        RUNTIME.cudaStreamCreateWithFlags(byref(handle), 1)
    else:
        RUNTIME.cudaStreamCreateWithPriority(byref(handle), 1, high.value)
        priority, flags = c_int(), c_uint()
        RUNTIME.cudaStreamGetPriority(handle, byref(priority))
        RUNTIME.cudaStreamGetFlags(handle, byref(flags))
        expect((priority.value, flags.value) == (high.value, 1), "priority and flags")
    handles.append(handle)

expect(all((handle.value or 1) % 2 == 0 for handle in handles), "a handle is even, as an address is")

# Each stream keeps its own order.
areas = [malloc(8 * N) for _ in handles]
for step in range(12):
    for index, (handle, area) in enumerate(zip(handles, areas, strict=True)):
        if step == 0:
            launch(fill, 8, 64, area, index, N, stream=handle)
        launch(mix, 8, 64, area, step + 1, N, stream=handle)
for handle, area in zip(handles, areas, strict=True):
    RUNTIME.cudaStreamSynchronize(handle)
    expect(RUNTIME.code("cudaStreamQuery", handle) == 0, "done after synchronise")
    say(read(area, 8 * N))

# Work in a stream that is destroyed is finished all the same.
for handle, area in zip(handles, areas, strict=True):
    launch(mix, 8, 64, area, 500, N, stream=handle)
    RUNTIME.cudaStreamDestroy(handle)
RUNTIME.cudaDeviceSynchronize()
for area in areas:
    say(read(area, 8 * N))

# The null stream waits for blocking streams and they for it, without a word.
blocking = c_void_p()
RUNTIME.cudaStreamCreate(byref(blocking))
area = areas[0]
for _ in range(10):
    launch(mix, 4, 64, area, 300, N, stream=blocking)
    launch(mix, 4, 64, area, 301, N, stream=0)
    launch(mix, 4, 64, area, 303, N, stream=2)  # cudaStreamPerThread
    launch(mix, 4, 64, area, 302, N, stream=1)  # cudaStreamLegacy
say(read(area, 8 * N))
answer = RUNTIME.code("cudaStreamQuery", 2)
expect(answer in (0, 600), "query of the per-thread stream")

one, two = c_void_p(), c_void_p()
RUNTIME.cudaStreamCreate(byref(one))
RUNTIME.cudaStreamDestroy(one)
if not left_out("the driver crashes at a handle that is none; with a destroyed stream it does anything"):
    expect_error(DRIVER, 400, "cuStreamSynchronize", one)
    expect_error(DRIVER, 400, "cuStreamQuery", 12345678)
expect(RUNTIME.code("cudaStreamSynchronize", blocking) == 0, "the others go on")
identifier, same = c_void_p(), c_void_p()
RUNTIME.cudaStreamGetId(blocking, byref(identifier))
RUNTIME.cudaStreamGetId(blocking, byref(same))
expect(identifier.value == same.value, "a stream's id")
