// The kernel that a server runs on a GPU for itself: hashing of content.
//
// xmig_hash: a 64-bit hash of each chunk of device memory, at memory speed, one block per chunk.
// Every 16-byte word is mixed with keys that depend on its position (so that moved content differs), by a folded
// 64x64->128-bit product; the products are added up, so the order in which threads work does not matter. The word count
// is mixed in last. Not cryptographic: it tells content that changed from content that did not.
//
// Built to hash.ptx by hand: build.sh; tests/test_kernels.py compares.

typedef unsigned long long u64;

struct Chunk {
  u64 address;
  u64 bytes;  // a multiple of 16
};

__device__ __forceinline__ u64 fold(u64 a, u64 b) { return (a * b) ^ __umul64hi(a, b); }

__device__ __forceinline__ u64 mix(ulonglong2 word, u64 index) {
  const u64 key = index * 0x9e3779b97f4a7c15ull;
  return fold(word.x ^ (key + 0xa0761d6478bd642full), word.y ^ (key ^ 0xe7037ed1a0b428dbull));
}

extern "C" __global__ void __launch_bounds__(512) xmig_hash(const Chunk* chunks, u64* hashes) {
  const Chunk chunk = chunks[blockIdx.x];
  const ulonglong2* words = reinterpret_cast<const ulonglong2*>(chunk.address);
  const u64 count = chunk.bytes / 16;
  u64 sum = 0;
  u64 i = threadIdx.x;
  for (; i + 3 * 512 < count; i += 4 * 512) {
    const ulonglong2 a = __ldcs(words + i);
    const ulonglong2 b = __ldcs(words + i + 512);
    const ulonglong2 c = __ldcs(words + i + 1024);
    const ulonglong2 d = __ldcs(words + i + 1536);
    sum += mix(a, i) + mix(b, i + 512) + mix(c, i + 1024) + mix(d, i + 1536);
  }
  for (; i < count; i += 512) sum += mix(__ldcs(words + i), i);

  for (int offset = 16; offset; offset /= 2) sum += __shfl_down_sync(0xffffffff, sum, offset);
  __shared__ u64 partial[16];
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    u64 total = 0;
    for (int warp = 0; warp < 16; ++warp) total += partial[warp];
    hashes[blockIdx.x] = fold(total ^ 0x8ebc6af09c88c6e3ull, chunk.bytes ^ 0x589965cc75374cc3ull);
  }
}
