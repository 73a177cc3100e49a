"""A loop like training: launches, copies, an event, now and then a result on the host, and one line at the end.

training.py STEPS [MIB [HOLD]]

MIB 0 is what it has without one. Before step HOLD it waits for a line on standard input, or that input's end: what a
test does to it comes before it is over, however late that is.
"""

import sys
import zlib

from calls import RUNTIME, byref, c_void_p, kernel, launch, malloc, pattern, read, say, write

steps = int(sys.argv[1])
mebibytes, hold = (int(sys.argv[i]) if len(sys.argv) > i else none for i, none in ((2, 0), (3, steps)))
N = (mebibytes << 20) // 8 or 50_000
fill, mix = kernel("fill"), kernel("mix")
weights, batch, scratch = malloc(8 * N), malloc(4096), c_void_p()
stream, event, taken = c_void_p(), c_void_p(), c_void_p()
RUNTIME.cudaStreamCreateWithFlags(byref(stream), 1)
RUNTIME.cudaEventCreateWithFlags(byref(event), 2)
RUNTIME.cudaEventCreateWithFlags(byref(taken), 2)
launch(fill, 16, 128, weights, 1, N)
digest = 0
for step in range(steps):
    if step == hold:
        sys.stdin.readline()
    RUNTIME.cudaStreamWaitEvent(0, taken, 0)
    write(batch, pattern(4096, step % 64))
    RUNTIME.cudaMallocAsync(byref(scratch), 65536, stream)
    launch(mix, 1, 64, batch, 2, 512)
    RUNTIME.cudaEventRecord(event, 0)
    RUNTIME.cudaStreamWaitEvent(stream, event, 0)
    RUNTIME.cudaMemcpyAsync(scratch, batch, 4096, 3, stream)
    RUNTIME.cudaEventRecord(taken, stream)
    launch(mix, 4, 64, scratch, 3, 512, stream=stream)
    RUNTIME.cudaMemcpyAsync(weights, scratch, 4096, 3, stream)
    RUNTIME.cudaFreeAsync(scratch, stream)
    launch(mix, 4, 64, weights, 2, 4096, stream=stream)
    if step % 10 == 9:
        RUNTIME.cudaStreamSynchronize(stream)
        digest = zlib.crc32(read(weights, 32768), digest)
RUNTIME.cudaStreamSynchronize(stream)
say("steps", steps, "losses", digest, "weights", read(weights, 8 * N))
