/* The kernels of the differential test, for the cpu device; kernels.cu has them for GPUs, kernels.py in Python.
 *
 * Words are unsigned 32-bit integers and wrap. `n`: words that are written, unless it says bytes. */
#include <xmig/kernel.h>

#include "mixing.h"

XMIG_GLOBAL(uint32_t[8], variable);

/* out[i] out of itself, and of words of a and b that lie elsewhere: na, nb words long, apart from out */
XMIG_KERNEL(mix, (uint32_t *, out), (uint32_t, n), (const uint32_t *, a), (uint32_t, na), (const uint32_t *, b),
            (uint32_t, nb), (uint32_t, salt)) {
  XMIG_FOR_EACH_INDEX(i, n) {
    const uint32_t k = (uint32_t)i;
    out[k] = scramble((out[k] ^ a[(k * 5u + salt) % na]) + b[(k * 3u + (salt >> 7)) % nb]) + k;
  }
}

/* every out[j] depends on all words of a */
XMIG_KERNEL(fold, (uint32_t *, out), (uint32_t, n), (const uint32_t *, a), (uint32_t, na), (uint32_t, salt)) {
  XMIG_FOR_EACH_INDEX(j, n) {
    uint32_t sum = 0;
    for (uint32_t k = 0; k < na; ++k) sum += term(a[k], k, (uint32_t)j, salt);
    out[j] = scramble(sum);
  }
}

/* out[a[i] % n] += … for each word of a; on a GPU with atomics, whose order does not matter to a sum */
XMIG_KERNEL(scatter, (uint32_t *, out), (uint32_t, n), (const uint32_t *, a), (uint32_t, na), (uint32_t, salt)) {
  XMIG_FOR_EACH_INDEX(i, na) out[a[i] % n] += (a[i] >> 8) ^ salt ^ (uint32_t)i;
}

/* each block's part the other way round, by way of dynamic shared memory; n is blocks times threads */
XMIG_KERNEL(reverse, (uint32_t *, out), (uint32_t, n), (uint32_t, salt)) {
  uint32_t *part = out + (uint64_t)blockIdx.x * blockDim.x, *shared = XMIG_SHARED(uint32_t);
  for (uint32_t i = 0; i < blockDim.x; ++i) shared[i] = part[i];
  for (uint32_t i = 0; i < blockDim.x; ++i) part[i] = shared[blockDim.x - 1 - i] + salt * (i + 1) + n;
}

/* two outputs: the first written, the second added to */
XMIG_KERNEL(split, (uint32_t *, one), (uint32_t *, two), (uint32_t, n), (const uint32_t *, a), (uint32_t, na),
            (uint32_t, salt)) {
  XMIG_FOR_EACH_INDEX(i, n) {
    const uint32_t x = scramble(a[i % na] + salt + (uint32_t)i);
    one[i] = x, two[i] += x ^ salt;
  }
}

/* n bytes at any address */
XMIG_KERNEL(bytes, (uint8_t *, out), (uint32_t, n), (const uint8_t *, a), (uint32_t, salt)) {
  XMIG_FOR_EACH_INDEX(i, n) out[i] = (uint8_t)(out[i] * 31u + a[n - 1 - i] + salt);
}

/* parameters of every size and alignment */
struct given { uint8_t one; uint32_t four; uint64_t eight; };
XMIG_KERNEL(given, (uint8_t, a), (uint32_t *, out), (uint16_t, b), (uint32_t, c), (uint64_t, d), (struct given, e)) {
  if (blockIdx.x) return;
  out[0] = a, out[1] = b, out[2] = c, out[3] = (uint32_t)d, out[4] = (uint32_t)(d >> 32);
  out[5] = e.one, out[6] = e.four, out[7] = (uint32_t)e.eight ^ (uint32_t)(e.eight >> 32);
}

/* counts in a variable of the module; one thread */
XMIG_KERNEL(count, (uint32_t *, out), (uint32_t, salt)) {
  for (uint32_t i = 0; i < 8; ++i) (*variable)[i] += scramble(salt + i);
  *out = (*variable)[salt % 8];
}
