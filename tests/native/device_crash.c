/* A module whose initialiser crashes. */
#include <xmig/kernel.h>
XMIG_KERNEL(nothing) {}
__attribute__((constructor)) static void crash(void) { __builtin_trap(); }
