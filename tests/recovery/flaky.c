/* Kernels of the stepwise program on a device that fails: whenever somebody has made the file FLAKY, once. */
#include <unistd.h>
#include <xmig/kernel.h>

XMIG_KERNEL(fill, (uint64_t *, x), (uint64_t, value), (uint64_t, n)) {
  XMIG_FOR_EACH_INDEX(i, n) x[i] = value + i;
}

XMIG_KERNEL(mix, (uint64_t *, x), (uint64_t, rounds), (uint64_t, n)) {
  if (unlink(FLAKY) == 0) *(volatile int *)0 = 0;
  XMIG_FOR_EACH_INDEX(i, n) {
    uint64_t v = x[i] + i;
    for (uint64_t r = 0; r < rounds; ++r) v = (v ^ (v >> 29)) * 0xbf58476d1ce4e5b9u + r;
    x[i] = v;
  }
}
