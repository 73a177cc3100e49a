// A heap of device memory of one ordinal: what a memory pool allocates from, and cuMemAlloc.
//
// Blocks up to kLargestSmall share granules, in units of kUnit; larger ones are whole granules. Granules come from the
// ordinal's Backing and go back to it when they are wholly free and universal.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <mutex>

#include "client/memory/memory_ranges.h"

namespace xmig::client {

inline constexpr uint64_t kUnit = 512;
inline constexpr uint64_t kLargestSmall = 1ull << 20;

constexpr uint64_t round_to_units(uint64_t bytes) { return (bytes + kUnit - 1) & ~(kUnit - 1); }

struct HeapUse {
  uint64_t used = 0, used_high = 0;  // as requested, not rounded: so the driver counts, too
  uint64_t reserved = 0, reserved_high = 0;
};

class Heap {
 public:
  // `limit`: of the bytes reserved, 0 = none.
  explicit Heap(int ordinal, uint64_t limit = 0) : ordinal_(ordinal), limit_(limit) {}

  // A block for work in the order of `stream_key` (0: for any work). Waits for the server only if there is no free
  // memory that this work may use, and for the device only if there is no memory at all.
  CUresult allocate(uint64_t bytes, uint64_t stream_key, FreeRange* block);
  // `bytes`: as it was allocated.
  void free(const FreeRange& block, uint64_t bytes);

  // Give free granules back to the Backing until at most `keep` bytes are reserved. True: more could follow when
  // something has been waited for.
  bool release(uint64_t keep);
  // The free ranges of a stream that is no more wait for the context.
  void orphan(uint64_t stream_key, uint64_t orphans);

  int ordinal() const { return ordinal_; }
  HeapUse use();
  void reset_high(bool used);

 private:
  bool take(uint64_t bytes, uint64_t stream_key, FreeRange* block);
  void settle();
  void sweep();
  void count(uint64_t bytes);

  const int ordinal_;
  const uint64_t limit_;
  std::mutex lock_;
  FreeRanges small_;
  FreeRanges large_;
  HeapUse use_;
};

// Every byte of the ordinal that no live allocation needs goes to the Backing, after waiting for the work that may
// still use it. Defined with the list of pools.
CUresult reclaim(int ordinal);

}  // namespace xmig::client
