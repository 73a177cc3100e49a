"""Which call is informed of a kernel's fault: its launch, with CUDA_LAUNCH_BLOCKING=1, otherwise one that waits for
it."""

from calls import RUNTIME, Dim3, kernel, launch, malloc, pack, read, say

N = 100
x = malloc(8 * N)
launch(kernel("fill"), 2, 64, x, 3, N)
launch(kernel("mix"), 2, 64, x, 4, N)
say(read(x, 8 * N))
one = Dim3(1, 1, 1)
say("launch", RUNTIME.code("cudaLaunchKernel", kernel("trap"), one, one, pack(0), 0, 0))
say("synchronize", RUNTIME.code("cudaDeviceSynchronize"))
