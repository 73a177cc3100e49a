// The kernels of the differential test, for GPUs; kernels.c says what each does. Built to kernels.ptx by hand: build.sh.
#define MIXING static __device__ __forceinline__
#include "mixing.h"

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned u32;
typedef unsigned long long u64;

#define EACH(i, n) for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += gridDim.x * blockDim.x)

extern "C" {

__device__ u32 variable[8];

__global__ void mix(u32* out, u32 n, const u32* a, u32 na, const u32* b, u32 nb, u32 salt) {
  EACH(k, n) out[k] = scramble((out[k] ^ a[(k * 5u + salt) % na]) + b[(k * 3u + (salt >> 7)) % nb]) + k;
}

__global__ void fold(u32* out, u32 n, const u32* a, u32 na, u32 salt) {
  EACH(j, n) {
    u32 sum = 0;
    for (u32 k = 0; k < na; ++k) sum += term(a[k], k, j, salt);
    out[j] = scramble(sum);
  }
}

__global__ void scatter(u32* out, u32 n, const u32* a, u32 na, u32 salt) {
  EACH(i, na) atomicAdd(out + a[i] % n, (a[i] >> 8) ^ salt ^ i);
}

__global__ void reverse(u32* out, u32 n, u32 salt) {
  extern __shared__ u32 shared[];
  u32* const part = out + (u64)blockIdx.x * blockDim.x;
  shared[threadIdx.x] = part[threadIdx.x];
  __syncthreads();
  part[threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x] + salt * (threadIdx.x + 1) + n;
}

__global__ void split(u32* one, u32* two, u32 n, const u32* a, u32 na, u32 salt) {
  EACH(i, n) {
    const u32 x = scramble(a[i % na] + salt + i);
    one[i] = x, two[i] += x ^ salt;
  }
}

__global__ void bytes(u8* out, u32 n, const u8* a, u32 salt) {
  EACH(i, n) out[i] = (u8)(out[i] * 31u + a[n - 1 - i] + salt);
}

struct Given {
  u8 one;
  u32 four;
  u64 eight;
};
__global__ void given(u8 a, u32* out, u16 b, u32 c, u64 d, Given e) {
  if (blockIdx.x || threadIdx.x) return;
  out[0] = a, out[1] = b, out[2] = c, out[3] = (u32)d, out[4] = (u32)(d >> 32);
  out[5] = e.one, out[6] = e.four, out[7] = (u32)e.eight ^ (u32)(e.eight >> 32);
}

__global__ void count(u32* out, u32 salt) {
  if (blockIdx.x || threadIdx.x) return;
  for (u32 i = 0; i < 8; ++i) variable[i] += scramble(salt + i);
  *out = variable[salt % 8];
}

}  // extern "C"
