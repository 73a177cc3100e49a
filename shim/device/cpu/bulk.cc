#include "device/cpu/bulk.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <system_error>
#include <thread>

#include "device/cpu/guard.h"
#include "xxhash.h"

#ifdef __SANITIZE_THREAD__
extern "C" void __tsan_read_range(void* address, unsigned long bytes);
#endif

namespace xmig::device::cpu {
namespace {

constexpr uint64_t kPiece = 2 << 20;
constexpr uint64_t kWorthThreads = 8 << 20;
constexpr unsigned kMaxThreads = 8;  // more do not make memory faster

// do_piece(i) for every i below `count`, on as many threads as are useful.
template <typename DoPiece>
bool in_parallel(size_t count, uint64_t bytes, DoPiece&& do_piece) {
  std::atomic<size_t> next{0};
  std::atomic<bool> good{true};
  auto work = [&] {
    for (size_t i; good && (i = next.fetch_add(1)) < count;) {
      Trap trap;
      if (!guarded(trap, [&] { do_piece(i); })) good = false;
    }
  };
  const unsigned threads =
      bytes < kWorthThreads ? 1 : std::clamp(std::thread::hardware_concurrency(), 1u, kMaxThreads);
  std::vector<std::thread> helpers;
  try {
    while (helpers.size() + 1 < std::min<size_t>(threads, count)) helpers.emplace_back(work);
  } catch (const std::system_error&) {
    // No thread to be had: those that there are do it.
  }
  work();
  for (std::thread& helper : helpers) helper.join();
  return good;
}

}  // namespace

uint64_t hash_content(std::span<const std::byte> content) {
  constexpr uint64_t kSeed = 0x786d6967;  // "xmig"
  return XXH3_64bits_withSeed(content.data(), content.size(), kSeed);
}

bool hash_chunks(std::span<const Chunk> chunks, std::span<uint64_t> hashes) {
  if (hashes.size() < chunks.size()) return false;
  const uint64_t bytes = std::accumulate(chunks.begin(), chunks.end(), uint64_t{0},
                                         [](uint64_t sum, const Chunk& chunk) { return sum + chunk.bytes; });
  return in_parallel(chunks.size(), bytes, [&](size_t i) {
#ifdef __SANITIZE_THREAD__
    __tsan_read_range(reinterpret_cast<void*>(chunks[i].address), chunks[i].bytes);  // this file's own code tells it nothing
#endif
    hashes[i] = hash_content({reinterpret_cast<const std::byte*>(chunks[i].address), chunks[i].bytes});
  });
}

bool copy_bytes(uint64_t destination, uint64_t source, uint64_t bytes) {
  return in_parallel((bytes + kPiece - 1) / kPiece, bytes, [&](size_t i) {
    const uint64_t from = i * kPiece;
    std::memcpy(reinterpret_cast<void*>(destination + from), reinterpret_cast<const void*>(source + from),
                std::min(kPiece, bytes - from));
  });
}

}  // namespace xmig::device::cpu
