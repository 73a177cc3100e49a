/* Kernels of the device's tests. */
#include <stdlib.h>
#include <xmig/kernel.h>

XMIG_GLOBAL(uint64_t, steps, 7);
XMIG_GLOBAL(float[16], table);

XMIG_KERNEL(append, (uint64_t *, log), (uint64_t, value)) { log[++log[0]] = value; }
XMIG_KERNEL(add, (uint64_t *, x), (uint64_t, n), (uint64_t, value)) { XMIG_FOR_EACH_INDEX(i, n) x[i] += value; }
XMIG_KERNEL(mark_blocks, (uint32_t *, x)) { x[blockIdx.x] = blockIdx.x + 1; }
XMIG_KERNEL(places, (uint32_t *, out)) {
  const uint32_t block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const uint32_t threads = blockDim.x * blockDim.y * blockDim.z;
  XMIG_FOR_EACH_THREAD {
    const uint32_t thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    out[block * threads + thread] = block * 1000 + thread;
  }
}
XMIG_KERNEL(parameters, (uint8_t, a), (uint16_t, b), (uint32_t, c), (uint64_t, d), (float, e), (double, f),
            (double *, out)) {
  *out = a + b + c + d + e + f;
}
XMIG_KERNEL_LIMITS(shared, 64, 1024, (uint64_t *, out)) {
  uint8_t *bytes = XMIG_SHARED(uint8_t);
  uint64_t sum = 0;
  for (uint32_t i = 0; i < xmig->shared_bytes; ++i) sum += bytes[i]++;
  out[0] += sum; /* only the first block finds zeros */
  out[1] = (uintptr_t)bytes % XMIG_SHARED_ALIGNMENT;
}
XMIG_KERNEL(use_globals, (uint64_t *, out)) {
  *out = ++*steps;
  (*table)[3] += 1.5f;
}
XMIG_KERNEL(nothing) {}

XMIG_KERNEL(store, (volatile uint64_t *, where)) { *where = 1; }
XMIG_KERNEL(store_in_block, (uint32_t, block), (volatile uint64_t *, where)) {
  if (blockIdx.x == block) *where = 1;
}
XMIG_KERNEL(divide, (volatile int32_t *, x)) { x[0] = x[1] / x[2]; }
XMIG_KERNEL(illegal, (uint64_t, unused)) { __builtin_trap(); }
XMIG_KERNEL(assert_small, (const uint64_t *, x)) { XMIG_ASSERT(*x < 100); }
XMIG_KERNEL(trap, (uint64_t, unused)) { XMIG_TRAP(); }
XMIG_KERNEL(aligned, (uint64_t *, x)) {
  XMIG_REQUIRE_ALIGNED(x, 8);
  *x = 1;
}
XMIG_KERNEL(libc_abort, (uint64_t, unused)) { abort(); }
static uint64_t descend(volatile uint64_t depth) {
  volatile uint64_t room[512];
  room[depth % 512] = depth;
  return depth == 0 ? 0 : descend(depth - 1) + room[depth % 512];
}
XMIG_KERNEL(overflow, (uint64_t *, out)) { *out = descend(1ull << 40); }
