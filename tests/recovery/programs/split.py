"""A training that is split over two devices: what one computes the other goes on with, there and back.

split.py STEPS
"""

import sys

from calls import RUNTIME, kernel, launch, malloc, read, say, stream

N = 4000
streams, parameters, activations = [], [], []
fill, mix, copy = kernel("fill"), kernel("mix"), kernel("copy_bytes")
for ordinal in range(2):
    RUNTIME.cudaSetDevice(ordinal)
    streams.append(stream())
    parameters.append(malloc(8 * N))
    activations.append(malloc(8 * N))
    launch(fill, 4, 64, parameters[ordinal], ordinal + 1, N, stream=streams[ordinal])
    RUNTIME.cudaStreamSynchronize(streams[ordinal])
for step in range(int(sys.argv[1])):
    for ordinal in (0, 1, 0):
        RUNTIME.cudaSetDevice(ordinal)
        launch(mix, 4, 64, parameters[ordinal], step % 7, N, stream=streams[ordinal])
        launch(copy, 4, 64, activations[ordinal], parameters[ordinal], 8 * N, stream=streams[ordinal])
        RUNTIME.cudaMemcpyPeerAsync(
            parameters[1 - ordinal], 1 - ordinal, activations[ordinal], ordinal, 4 * N, streams[ordinal]
        )
        RUNTIME.cudaStreamSynchronize(streams[ordinal])
    if step % 50 == 49:
        RUNTIME.cudaSetDevice(step // 50 % 2)
        say(step, read(parameters[0], 8 * N), read(parameters[1], 8 * N))
