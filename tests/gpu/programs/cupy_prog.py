"""CuPy: elementwise and raw kernels, reductions, cuBLAS, cuFFT, streams, memory pools."""

from __future__ import annotations

import workload

parser = workload.arguments(__doc__, steps=50)
parser.add_argument("--size", type=int, default=512)
options = parser.parse_args()

import cupy  # noqa: E402  (after the arguments: --help needs no GPU)

size = options.size
saxpy = cupy.RawKernel(
    'extern "C" __global__ void saxpy(float a, const float* x, float* y, int n) {'
    " int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) y[i] += a * x[i]; }",
    "saxpy",
)
squares = cupy.ElementwiseKernel("float32 x, float32 y", "float32 z", "z = (x - y) * (x - y)", "squares")
longest = cupy.ReductionKernel("float32 x", "float32 y", "x * x", "a + b", "y = sqrt(a)", "0", "longest")
random = cupy.random.RandomState(options.seed)
x = random.standard_normal((size, size), dtype=cupy.float32)
y = cupy.zeros_like(x)
stream = cupy.cuda.Stream(non_blocking=True)
steps = workload.Steps(options, cupy.cuda.Device().synchronize)
for _ in steps:
    saxpy(((x.size + 255) // 256,), (256,), (cupy.float32(0.5), x, y, cupy.int32(x.size)))
    z = squares(x, y)
    length = longest(z, axis=1)
    product = x @ y / size
    spectrum = cupy.fft.rfft(product, axis=0)
    cupy.cuda.Device().synchronize()
    with stream:
        ordered = cupy.sort(length)
    stream.synchronize()
pool = cupy.get_default_memory_pool()
workload.report(
    options, sha256=workload.digest(cupy.asnumpy(a) for a in (y, z, length, product, spectrum, ordered)),
    pool_bytes=pool.total_bytes(), **steps.figures(),
)  # fmt: skip
