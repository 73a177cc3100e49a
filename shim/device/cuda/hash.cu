// The kernels that a server runs on a GPU for itself: hashing and copying of content.
//
// xmig_hash: a 64-bit hash of each chunk of device memory, at memory speed, one block per chunk.
// xmig_copy_hash: the same of chunks that it copies meanwhile. Nothing is read twice, and chunks that lie apart cost no more
// than neighbours.
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

struct Move {
  u64 to;
  u64 from;
  u64 bytes;  // a multiple of 16
};

constexpr int kThreads = 512;
constexpr int kAtOnce = 4;  // words that a thread has in flight

__device__ __forceinline__ u64 fold(u64 a, u64 b) { return (a * b) ^ __umul64hi(a, b); }

__device__ __forceinline__ u64 mix(ulonglong2 word, u64 index) {
  const u64 key = index * 0x9e3779b97f4a7c15ull;
  return fold(word.x ^ (key + 0xa0761d6478bd642full), word.y ^ (key ^ 0xe7037ed1a0b428dbull));
}

template <bool kCopies>
__device__ __forceinline__ void hash_one(u64 from, u64 to, u64 bytes, u64* hash) {
  const ulonglong2* words = reinterpret_cast<const ulonglong2*>(from);
  ulonglong2* copies = reinterpret_cast<ulonglong2*>(to);
  const u64 count = bytes / 16;
  u64 sum = 0;
  u64 i = threadIdx.x;
  for (; i + (kAtOnce - 1) * kThreads < count; i += kAtOnce * kThreads) {
    ulonglong2 read[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) read[k] = __ldcs(words + i + k * kThreads);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (kCopies) __stcs(copies + i + k * kThreads, read[k]);
      sum += mix(read[k], i + k * kThreads);
    }
  }
  for (; i < count; i += kThreads) {
    const ulonglong2 read = __ldcs(words + i);
    if (kCopies) __stcs(copies + i, read);
    sum += mix(read, i);
  }

  for (int offset = 16; offset; offset /= 2) sum += __shfl_down_sync(0xffffffff, sum, offset);
  __shared__ u64 partial[kThreads / 32];
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    u64 total = 0;
    for (int warp = 0; warp < kThreads / 32; ++warp) total += partial[warp];
    *hash = fold(total ^ 0x8ebc6af09c88c6e3ull, bytes ^ 0x589965cc75374cc3ull);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) xmig_hash(const Chunk* chunks, u64* hashes) {
  const Chunk chunk = chunks[blockIdx.x];
  hash_one<false>(chunk.address, 0, chunk.bytes, hashes + blockIdx.x);
}

extern "C" __global__ void __launch_bounds__(kThreads) xmig_copy_hash(const Move* moves, u64* hashes) {
  const Move move = moves[blockIdx.x];
  hash_one<true>(move.from, move.to, move.bytes, hashes + blockIdx.x);
}
