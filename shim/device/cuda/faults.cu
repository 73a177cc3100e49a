// Kernels that fault, for injections. Apart from the other one, because a module with an assertion in it costs every
// context 96 MB of the device (measured on an H200): it is loaded when there is something to inject.
//
// Built to faults.ptx by hand: build.sh; tests/test_kernels.py compares.

#include <cassert>

typedef unsigned long long u64;

// What a program's bugs look like. Each gets the address of a word of ours.

extern "C" __global__ void xmig_illegal_address(u64) { *reinterpret_cast<volatile u64*>(16) = 1; }

extern "C" __global__ void xmig_misaligned_address(u64 word) { *reinterpret_cast<volatile u64*>(word + 1) = 1; }

extern "C" __global__ void xmig_assert(u64 word) { assert(word == 0 && "an injected fault"); }

extern "C" __global__ void xmig_trap(u64) { asm volatile("trap;"); }

// A kernel without end: it stays until its process is killed, and leaves the other multiprocessors to everybody else.
extern "C" __global__ void xmig_hang(const volatile u64* word) {
  while (*word != ~0ull) __nanosleep(1000);
}
