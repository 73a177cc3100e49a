/* The kernels of kernels.c, for a GPU: the same names and parameters (test_kernels.py), the same results. Compiled by
 * NVRTC on the machine that has it (compiled.py): no header is included here. */
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;

extern "C" __device__ __cudart_builtin__ void CUDARTAPI cudaGraphSetConditional(cudaGraphConditionalHandle, unsigned);

#define FOR_EACH_INDEX(i, n) \
  for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < (n); i += (uint64_t)gridDim.x * blockDim.x)
/* On the cpu device a kernel of one thread; programs launch some of these with a whole block. */
#define ONCE if (blockIdx.x == 0 && threadIdx.x == 0)

struct pair { uint8_t first; double second; };
struct conditions { uint32_t count; uint64_t all[4]; };

extern "C" {

__device__ uint64_t launches = 5;
__device__ uint32_t table[4];

__global__ void fill(uint64_t *x, uint64_t value, uint64_t n) { FOR_EACH_INDEX(i, n) x[i] = value + i; }

/* Never fused: the cpu device has no such instruction. */
__global__ void saxpy(float a, const float *x, float *y, uint64_t n) {
  FOR_EACH_INDEX(i, n) y[i] = __fadd_rn(y[i], __fmul_rn(a, x[i]));
}

__global__ void mix(uint64_t *x, uint64_t rounds, uint64_t n) {
  FOR_EACH_INDEX(i, n) {
    uint64_t v = x[i] + i;
    for (uint64_t r = 0; r < rounds; ++r) v = (v ^ (v >> 29)) * 0xbf58476d1ce4e5b9u + r;
    x[i] = v;
  }
}

__global__ void copy_bytes(uint8_t *to, const uint8_t *from, uint64_t n) { FOR_EACH_INDEX(i, n) to[i] = from[i]; }

__global__ void count(uint64_t *out) {
  ONCE {
    launches += 1;
    table[launches % 4] += 1;
    *out = launches;
  }
}

__global__ void parameters(uint8_t a, uint16_t b, uint32_t c, uint64_t d, float e, double f, struct pair g, double *out) {
  ONCE {
    out[0] = a, out[1] = b, out[2] = c, out[3] = (double)d, out[4] = (double)e, out[5] = f, out[6] = g.first;
    out[7] = g.second;
  }
}

__global__ void places(uint32_t *out) {
  const uint64_t block = ((uint64_t)blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const uint64_t thread = ((uint64_t)threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  out[block * blockDim.x * blockDim.y * blockDim.z + thread] = (uint32_t)(block << 16 | thread);
}

/* By way of both: 1024 bytes of its own, and what the launch asks for. */
__global__ void __launch_bounds__(64) reverse(uint64_t *x) {
  __shared__ uint64_t own[128];
  extern __shared__ uint64_t requested_for[];
  uint64_t *const part = x + (uint64_t)blockIdx.x * blockDim.x;
  own[threadIdx.x] = part[threadIdx.x];
  own[64 + threadIdx.x] = threadIdx.x;
  __syncthreads();
  requested_for[blockDim.x - 1 - own[64 + threadIdx.x]] = own[threadIdx.x];
  __syncthreads();
  part[threadIdx.x] = requested_for[threadIdx.x];
}

__global__ void nothing() {}

__global__ void add(uint64_t *x, uint64_t value, uint64_t n) { FOR_EACH_INDEX(i, n) x[i] += value; }

__global__ void choose(uint64_t condition, const uint64_t *x) { ONCE cudaGraphSetConditional(condition, (uint32_t)*x); }

__global__ void count_down(uint64_t condition, uint64_t *x) {
  ONCE {
    *x -= 1;
    cudaGraphSetConditional(condition, *x != 0);
  }
}

__global__ void choose_one(uint8_t unused, struct conditions conditions, const uint64_t *x) {
  ONCE for (uint32_t i = 0; i < conditions.count; ++i) cudaGraphSetConditional(conditions.all[i], *x == i);
}

__global__ void wait_for(const volatile uint64_t *x) {
  while (*x == 0) continue;
}

__global__ void eight(uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e, uint64_t f, uint64_t g, uint64_t h) {}

/* --- programs' own faults --- */
__global__ void store(uint64_t *where) { *(volatile uint64_t *)where = 1; }
__global__ void assert_small(const uint64_t *x) {
  if (*x >= 100) __trap();
}
__global__ void trap(uint64_t unused) { __trap(); }
__global__ void aligned(uint64_t *x) { *x = 1; }
__global__ void endless(const volatile uint64_t *x) {
  while (*x == *x) continue;
}

}
