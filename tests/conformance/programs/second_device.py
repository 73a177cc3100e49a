"""Two devices in one program: memory, streams and kernels on each, copies between them."""

from calls import DRIVER, RUNTIME, byref, c_int, c_void_p, expect, kernel, launch, left_out, malloc, read, say

N = 2000
count = c_int()
RUNTIME.cudaGetDeviceCount(byref(count))
expect(count.value >= 2, "two devices")
fill, mix = kernel("fill"), kernel("mix")
areas, streams = [], []
for ordinal in range(2):
    RUNTIME.cudaSetDevice(ordinal)
    stream = c_void_p()
    RUNTIME.cudaStreamCreateWithFlags(byref(stream), 1)
    streams.append(stream)
    areas.append(malloc(8 * N))
    launch(fill, 4, 64, areas[ordinal], ordinal * 1000, N, stream=stream)
if not left_out("the driver's devices share a range of addresses"):
    expect(abs(areas[0] - areas[1]) > 1 << 30, "each device has addresses of its own")
expect(abs(areas[0] - areas[1]) >= 8 * N, "no address is two devices'")

for step in range(15):
    for ordinal in range(2):
        RUNTIME.cudaSetDevice(ordinal)
        launch(mix, 4, 64, areas[ordinal], step, N, stream=streams[ordinal])
        RUNTIME.cudaStreamSynchronize(streams[ordinal])
        RUNTIME.cudaMemcpyPeer(areas[1 - ordinal] + 4 * N, 1 - ordinal, areas[ordinal], ordinal, 4 * N)
        RUNTIME.cudaDeviceSynchronize()  # the other device's stream does not wait for this one's copy
# A graph of the second device, launched while the first is current.
graph, executable = c_void_p(), c_void_p()
RUNTIME.cudaSetDevice(1)
DRIVER.cuStreamBeginCapture_v2(streams[1], 0)
launch(mix, 4, 64, areas[1], 3, N, stream=streams[1])
DRIVER.cuStreamEndCapture(streams[1], byref(graph))
DRIVER.cuGraphInstantiateWithFlags(byref(executable), graph, 0)
RUNTIME.cudaSetDevice(0)
for _ in range(100):
    DRIVER.cuGraphLaunch(executable, streams[1])
    RUNTIME.cudaStreamSynchronize(streams[1])
for ordinal in range(2):
    RUNTIME.cudaSetDevice(ordinal)
    RUNTIME.cudaDeviceSynchronize()
    say(read(areas[ordinal], 8 * N))
RUNTIME.cudaMemcpy(areas[0], areas[1], 8 * N, 4)  # between devices, by default kind
say(read(areas[0], 8 * N))
RUNTIME.cudaSetDevice(1)
RUNTIME.cudaFree(areas[1])
RUNTIME.cudaSetDevice(0)
RUNTIME.cudaFree(areas[0])
