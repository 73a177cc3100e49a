/* Kernels of the stepwise program, one of which prints, as device code can. */
#include <stdio.h>
#include <xmig/kernel.h>

XMIG_KERNEL(fill, (uint64_t *, x), (uint64_t, value), (uint64_t, n)) {
  printf("a kernel prints %lu\n", (unsigned long)value);
  XMIG_FOR_EACH_INDEX(i, n) x[i] = value + i;
}

XMIG_KERNEL(mix, (uint64_t *, x), (uint64_t, rounds), (uint64_t, n)) {
  XMIG_FOR_EACH_INDEX(i, n) x[i] += rounds;
}
