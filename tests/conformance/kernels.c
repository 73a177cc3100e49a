/* Kernels of the conformance and recovery programs, for the cpu device. Integers are 64 bits wide throughout, as the
 * programs pass them. */
#include <xmig/kernel.h>

XMIG_GLOBAL(uint64_t, launches, 5);
XMIG_GLOBAL(uint32_t[4], table);

/* x[i] = value + i */
XMIG_KERNEL(fill, (uint64_t *, x), (uint64_t, value), (uint64_t, n)) {
  XMIG_FOR_EACH_INDEX(i, n) x[i] = value + i;
}

/* y[i] += a * x[i], in single precision: repeats to the bit */
XMIG_KERNEL(saxpy, (float, a), (const float *, x), (float *, y), (uint64_t, n)) {
  XMIG_FOR_EACH_INDEX(i, n) y[i] += a * x[i];
}

/* Every element goes through `rounds` steps of a generator: any launch that is lost, repeated or out of order shows. */
XMIG_KERNEL(mix, (uint64_t *, x), (uint64_t, rounds), (uint64_t, n)) {
  XMIG_FOR_EACH_INDEX(i, n) {
    uint64_t v = x[i] + i;
    for (uint64_t r = 0; r < rounds; ++r) v = (v ^ (v >> 29)) * 0xbf58476d1ce4e5b9u + r;
    x[i] = v;
  }
}

XMIG_KERNEL(copy_bytes, (uint8_t *, to), (const uint8_t *, from), (uint64_t, n)) {
  XMIG_FOR_EACH_INDEX(i, n) to[i] = from[i];
}

/* Counts in a global variable of the module. */
XMIG_KERNEL(count, (uint64_t *, out)) {
  *launches += 1;
  (*table)[*launches % 4] += 1;
  *out = *launches;
}

/* Parameters of every size and alignment. */
struct pair { uint8_t first; double second; };
XMIG_KERNEL(parameters, (uint8_t, a), (uint16_t, b), (uint32_t, c), (uint64_t, d), (float, e), (double, f),
            (struct pair, g), (double *, out)) {
  out[0] = a, out[1] = b, out[2] = c, out[3] = (double)d, out[4] = (double)e, out[5] = f, out[6] = g.first;
  out[7] = g.second;
}

/* Where each thread is, in three dimensions. */
XMIG_KERNEL(places, (uint32_t *, out)) {
  XMIG_FOR_EACH_THREAD {
    const uint64_t block = ((uint64_t)blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const uint64_t thread = ((uint64_t)threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    out[block * blockDim.x * blockDim.y * blockDim.z + thread] = (uint32_t)(block << 16 | thread);
  }
}

/* Reverses each block's part by way of shared memory; at most 64 threads. */
XMIG_KERNEL_LIMITS(reverse, 64, 1024, (uint64_t *, x)) {
  uint64_t *part = x + (uint64_t)blockIdx.x * blockDim.x, *shared = XMIG_SHARED(uint64_t);
  XMIG_ASSERT(xmig->shared_bytes >= blockDim.x * sizeof(uint64_t));
  for (uint32_t i = 0; i < blockDim.x; ++i) shared[i] = part[i];
  for (uint32_t i = 0; i < blockDim.x; ++i) part[i] = shared[blockDim.x - 1 - i];
}

XMIG_KERNEL(nothing) {}

XMIG_KERNEL(add, (uint64_t *, x), (uint64_t, value), (uint64_t, n)) { XMIG_FOR_EACH_INDEX(i, n) x[i] += value; }

/* What a conditional node does: whether, or which one. */
XMIG_KERNEL(choose, (uint64_t, condition), (const uint64_t *, x)) { XMIG_SET_CONDITIONAL(condition, (uint32_t)*x); }
/* And how often. */
XMIG_KERNEL(count_down, (uint64_t, condition), (uint64_t *, x)) {
  *x -= 1;
  XMIG_SET_CONDITIONAL(condition, *x != 0);
}
/* Several in one structure, beside what is none. */
struct conditions { uint32_t count; uint64_t all[4]; };
XMIG_KERNEL(choose_one, (uint8_t, unused), (struct conditions, conditions), (const uint64_t *, x)) {
  for (uint32_t i = 0; i < conditions.count; ++i) XMIG_SET_CONDITIONAL(conditions.all[i], *x == i);
}

/* Until somebody else has written to it. */
XMIG_KERNEL(wait_for, (const volatile uint64_t *, x)) {
  while (*x == 0) continue;
}

/* Eight parameters, no work: what a launch itself costs. */
XMIG_KERNEL(eight, (uint64_t, a), (uint64_t, b), (uint64_t, c), (uint64_t, d), (uint64_t, e), (uint64_t, f),
            (uint64_t, g), (uint64_t, h)) {}

/* --- programs' own faults --- */
XMIG_KERNEL(store, (uint64_t *, where)) { *(volatile uint64_t *)where = 1; }
XMIG_KERNEL(assert_small, (const uint64_t *, x)) { XMIG_ASSERT(*x < 100); }
XMIG_KERNEL(trap, (uint64_t, unused)) { XMIG_TRAP(); }
XMIG_KERNEL(aligned, (uint64_t *, x)) {
  XMIG_REQUIRE_ALIGNED(x, 8);
  *x = 1;
}
XMIG_KERNEL(endless, (const volatile uint64_t *, x)) {
  while (*x == *x) continue;
}
