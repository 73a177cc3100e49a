"""Kernels that count in variables of their module for which the program never asks: what they have must be exact.

A counter by way of a pointer that has its address, a generator's state, a table, a lock that is taken once and for all.
What they have after so many launches is computed beside them.
"""

from __future__ import annotations

import workload

parser = workload.arguments(__doc__, steps=10_000_000, warmup=0, block=1)
parser.add_argument("--launches", type=int, default=20, help="of a step")
options = parser.parse_args()

import cupy  # noqa: E402  (after the arguments: --help needs no GPU)
import numpy  # noqa: E402

WORDS = 1 << 16
FACTOR, SUMMAND = 6364136223846793005, 1442695040888963407
SOURCE = """
typedef unsigned long long u64;
static __device__ u64 calls = 3;
static __device__ u64* where = &calls;
static __device__ u64 state = 1;
static __device__ unsigned int table[WORDS];
__device__ int lock;

extern "C" __global__ void count() {
  const unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < WORDS) table[i] += i + 1;
  if (i != 0) return;
  *where += 1;
  state = state * FACTOR + SUMMAND;
}
extern "C" __global__ void take(u64* out) { *out = atomicExch(&lock, 1); }
extern "C" __global__ void look(u64* out, unsigned int* words) {
  const unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < WORDS) words[i] = table[i];
  if (i != 0) return;
  out[0] = calls, out[1] = state, out[2] = lock, out[3] = where == &calls;
}
"""


def state_after(launches: int) -> int:
    """Of the generator, in as many steps as the number has bits."""
    factor, summand, state = FACTOR, SUMMAND, 1
    while launches:
        if launches & 1:
            state = (state * factor + summand) % 2**64
        factor, summand = factor * factor % 2**64, summand * (factor + 1) % 2**64
        launches >>= 1
    return state


for name, value in (("WORDS", WORDS), ("FACTOR", f"{FACTOR}ull"), ("SUMMAND", f"{SUMMAND}ull")):
    SOURCE = SOURCE.replace(name, str(value))
module = cupy.RawModule(code=SOURCE)
count, take, look = (module.get_function(name) for name in ("count", "take", "look"))
seen, words = cupy.zeros(4, cupy.uint64), cupy.zeros(WORDS, cupy.uint32)
grid, block = (WORDS // 256,), (256,)
ramp = numpy.arange(1, WORDS + 1, dtype=numpy.uint32)
take((1,), (1,), (seen,))
wrong: list[str] = []
launches = 0


def check() -> None:
    """That everything is as it has to be after so many launches."""
    look(grid, block, (seen, words))
    calls, state, lock, points = (int(word) for word in cupy.asnumpy(seen))
    if points == 0 and calls == 0:
        return  # a device that executes nothing
    expected = (3 + launches, state_after(launches), 1, 1)
    for what, is_now, wanted in zip(
        ("calls", "state", "lock", "pointer"), (calls, state, lock, points), expected, strict=True
    ):
        if is_now != wanted:
            wrong.append(f"{what} {is_now} instead of {wanted} after {launches} launches")
    differing = int((cupy.asnumpy(words) != ramp * numpy.uint32(launches % 2**32)).sum())
    if differing:
        wrong.append(f"{differing} words of the table after {launches} launches")


steps = workload.Steps(options, cupy.cuda.Device().synchronize)
for number in steps:
    steps.status.phase("forward")
    for _ in range(options.launches):
        count(grid, block, ())
    launches += options.launches
    if number % 20 == 0:
        steps.status.phase("copy")
        check()
    if len(wrong) > 20:
        break
check()
calls = int(cupy.asnumpy(seen)[0])
workload.report(options, wrong=len(wrong), first=wrong[:3], launches=launches, calls=calls)
