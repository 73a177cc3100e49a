/* Kernels that count in variables of their module, for the device that places these by itself (placing_device.cc). */
#include <xmig/kernel.h>

XMIG_GLOBAL(uint64_t, counter, 5);
XMIG_GLOBAL(uint64_t[20000], history);    /* in several pieces */
XMIG_GLOBAL(uint64_t[1 << 17], untouched); /* by any kernel but `read_all` */
XMIG_GLOBAL(uint8_t[3], odd);
/* The device fills the first three words with the address of `counter` as each process has it, as a relocation would. */
XMIG_GLOBAL(uint64_t[6], addresses);

/* out: the counter, how often [4] of `addresses` was written, a sum of what was left in `history`, odd[1]. */
XMIG_KERNEL(count, (uint64_t *, out)) {
  XMIG_ASSERT((*addresses)[0] == (uintptr_t)counter && (*addresses)[1] == (uintptr_t)counter);
  *(uint64_t *)(*addresses)[0] += 1;
  const uint64_t now = *counter;
  (*history)[now * 7919 % 20000] += now;
  (*odd)[1] += 1;
  (*addresses)[4] += 1;
  uint64_t sum = 0;
  for (uint64_t i = 0; i < 20000; ++i) sum += (*history)[i] * (i + 1);
  out[0] = now, out[1] = (*addresses)[4], out[2] = sum, out[3] = (*odd)[1];
}

/* The third of `addresses`: what it was at first, or something else for good. */
XMIG_KERNEL(set_address, (uint64_t, value)) { (*addresses)[2] = value; }
XMIG_KERNEL(get_address, (uint64_t *, out)) { out[0] = (*addresses)[2], out[1] = (uintptr_t)counter; }

/* A lock that is taken once and for all, in a module whose other variables nobody writes. */
XMIG_KERNEL(take, (uint64_t *, out)) {
  out[0] = (*odd)[2];
  (*odd)[2] = 1;
}

/* Writes all of a large variable. */
XMIG_KERNEL(fill, (uint64_t, value)) {
  for (uint64_t i = 0; i < 1 << 17; ++i) (*untouched)[i] = value + i;
}
XMIG_KERNEL(read_all, (uint64_t *, out)) {
  out[0] = 0;
  for (uint64_t i = 0; i < 1 << 17; ++i) out[0] += (*untouched)[i] * (i + 1);
}

/* Overwrites memory that is not the kernel's. */
XMIG_KERNEL(scribble, (uint64_t *, where)) { where[0] = 0x5ca1ab1e; }
XMIG_KERNEL(copy_bytes, (uint8_t *, to), (const uint8_t *, from), (uint64_t, n)) {
  for (uint64_t i = 0; i < n; ++i) to[i] = from[i];
}
