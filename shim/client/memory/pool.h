// Memory pools: a heap, and what the program may ask and say about it. cuMemAlloc's heap is one without a handle.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "client/memory/memory_heap.h"
#include "client/memory/memory_map.h"

namespace xmig::client {

class Pool {
 public:
  Pool(int ordinal, uint64_t handle, uint64_t limit) : heap(ordinal, limit), handle(handle) {}

  // After the program has waited for something: what exceeds the threshold goes back. True: as Heap::release().
  bool synchronized() { return heap.release(release_threshold.load(std::memory_order_relaxed)); }

  Heap heap;
  const uint64_t handle;  // 0: cuMemAlloc's
  std::atomic<uint64_t> release_threshold{0};
  // REUSE_*: kept for the program. The first is honoured by waiting only, the second and the third never needed.
  std::atomic<int> reuse[3] = {1, 1, 1};
  std::atomic<uint32_t> readers{0}, writers{0};  // other devices that may, a bit each
};

// cuMemAlloc's, of an ordinal.
const std::shared_ptr<Pool>& plain_pool(int ordinal);
// Every pool of the ordinal that exists or still has allocations; -1: of all.
std::vector<std::shared_ptr<Pool>> pools_of(int ordinal);

// Whether any pool may hold more than its threshold when the program has next waited for something.
extern std::atomic<bool> pools_may_shrink;

// A live allocation of `bytes` from the pool, reported to the server. `stream_key` 0 with `stream` null: for any work.
CUresult allocate(const std::shared_ptr<Pool>& pool, MemoryKind kind, uint64_t bytes, CUstream stream,
                  uint64_t stream_key, uint64_t* address);
// The opposite of it, for an allocation that was taken out of the map; `freed` by whom. Puts it back on an error.
CUresult release(Allocation allocation, CUstream stream, uint64_t stream_key);

}  // namespace xmig::client
