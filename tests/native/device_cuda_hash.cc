// What the processor computes of content is what the GPU's kernel does: its source, with a thread for each of the GPU's.
#include <algorithm>
#include <barrier>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "device/cuda/hash.h"
#include "device_harness.h"

namespace {
namespace gpu {

struct ulonglong2 {
  unsigned long long x, y;
};
struct Index {
  unsigned x;
};
constexpr size_t kLanes = 32;

struct Block {
  explicit Block(size_t threads) : all(static_cast<std::ptrdiff_t>(threads)) {
    for (size_t warp = 0; warp < threads / kLanes; ++warp) warps.push_back(std::make_unique<std::barrier<>>(kLanes));
    lanes.resize(threads);
  }
  std::barrier<> all;
  std::vector<std::unique_ptr<std::barrier<>>> warps;
  std::vector<unsigned long long> lanes;
};
Block* block = nullptr;
thread_local Index threadIdx, blockIdx;

unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
template <typename T> T __ldcs(const T* at) { return *at; }
template <typename T> void __stcs(T* at, T value) { *at = value; }
void __syncthreads() { block->all.arrive_and_wait(); }
unsigned long long __shfl_down_sync(unsigned, unsigned long long value, int offset) {
  const size_t mine = threadIdx.x, lane = mine % kLanes;
  block->lanes[mine] = value;
  block->warps[mine / kLanes]->arrive_and_wait();
  const unsigned long long other = lane + static_cast<size_t>(offset) < kLanes ? block->lanes[mine + static_cast<size_t>(offset)] : value;
  block->warps[mine / kLanes]->arrive_and_wait();
  return other;
}

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __shared__ static
#include "device/cuda/hash.cu"
#undef __device__
#undef __global__
#undef __forceinline__
#undef __launch_bounds__
#undef __shared__

}  // namespace gpu

uint64_t by_kernel(const std::vector<std::byte>& content, std::vector<std::byte>* copy = nullptr) {
  gpu::Block block(gpu::kThreads);
  gpu::block = &block;
  unsigned long long hash = 0;
  const auto address = [](const void* at) { return static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(at)); };
  const gpu::Chunk chunk{address(content.data()), content.size()};
  const gpu::Move move{copy ? address(copy->data()) : 0, chunk.address, content.size()};
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < gpu::kThreads; ++i) {
    threads.emplace_back([&, i] {
      gpu::threadIdx = {i};
      gpu::blockIdx = {0};
      copy ? gpu::xmig_copy_hash(&move, &hash) : gpu::xmig_hash(&chunk, &hash);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return hash;
}

}  // namespace

TEST(cuda_hash_by_the_processor) {
  uint64_t state = 1;
  for (const size_t bytes : {size_t{16}, size_t{48}, size_t{16} * 511, size_t{16} * 513, size_t{16} * 4 * 512 + 32, size_t{1} << 18}) {
    std::vector<std::byte> content(bytes), copy(bytes);
    CHECK(device::cuda::hash_content(content) == by_kernel(content));  // zeros
    for (std::byte& byte : content) byte = static_cast<std::byte>((state = state * 6364136223846793005 + 1442695040888963407) >> 56);
    const uint64_t hash = device::cuda::hash_content(content);
    CHECK(hash == by_kernel(content));
    CHECK(hash == by_kernel(content, &copy) && copy == content);
    std::swap(content.front(), content.back());
    CHECK(content.front() == content.back() || hash != device::cuda::hash_content(content));
  }
}
