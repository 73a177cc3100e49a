#include "client/memory/memory_heap.h"

#include <algorithm>
#include <vector>

#include "client/memory/memory_backing.h"
#include "client/memory/memory_progress.h"

namespace xmig::client {

using journal::kGranule;

void Heap::count(uint64_t bytes) {
  use_.used += bytes;
  use_.used_high = std::max(use_.used_high, use_.used);
}

void Heap::settle() {
  const auto covered = [](const FreedBy& freed) { return progress().covers(freed); };
  small_.settle(covered);
  large_.settle(covered);
}

// Granules that small blocks have left are for large ones again.
void Heap::sweep() {
  for (const FreeRange& range : small_.take_whole(kGranule, ~0ull)) large_.add(range);
}

bool Heap::take(uint64_t bytes, uint64_t stream_key, FreeRange* block) {
  if (bytes > kLargestSmall) {
    const auto range = large_.take(bytes, kGranule, stream_key);
    if (range) *block = *range;
    return range.has_value();
  }
  auto range = small_.take(bytes, kUnit, stream_key);
  if (!range) {
    range = large_.take(kGranule, kGranule, stream_key);
    if (!range) return false;
    small_.add({range->address + bytes, range->bytes - bytes, range->freed});
    range->bytes = bytes;
  }
  *block = *range;
  return true;
}

CUresult Heap::allocate(uint64_t bytes, uint64_t stream_key, FreeRange* block) {
  if (bytes > journal::kDeviceSpan) return CUDA_ERROR_OUT_OF_MEMORY;
  const bool is_small = bytes <= kLargestSmall;
  const uint64_t wanted = is_small ? round_to_units(bytes) : round_to_granules(bytes);
  const uint64_t fresh = round_to_granules(wanted);
  for (bool again = false;; again = true) {
    bool full = false;
    {
      const std::lock_guard guard(lock_);
      bool taken = take(wanted, stream_key, block);
      if (!taken) {
        settle();
        sweep();
        taken = take(wanted, stream_key, block);
      }
      if (taken) {
        count(bytes);
        return CUDA_SUCCESS;
      }
      full = limit_ && use_.reserved + fresh > limit_;
    }
    uint64_t address = 0;
    const CUresult result = full ? CUDA_ERROR_OUT_OF_MEMORY : backing(ordinal_).take(fresh, &address);
    if (result == CUDA_SUCCESS) {
      const std::lock_guard guard(lock_);
      if (fresh > wanted) small_.add({address + wanted, fresh - wanted, {}});
      *block = {address, wanted, {}};
      count(bytes);
      use_.reserved += fresh;
      use_.reserved_high = std::max(use_.reserved_high, use_.reserved);
      return CUDA_SUCCESS;
    }
    if (result != CUDA_ERROR_OUT_OF_MEMORY || again) return result;
    if (const CUresult waited = reclaim(ordinal_); waited != CUDA_SUCCESS) return waited;
  }
}

void Heap::free(const FreeRange& block, uint64_t bytes) {
  const std::lock_guard guard(lock_);
  (block.bytes <= kLargestSmall ? small_ : large_).add(block);
  use_.used -= bytes;
}

bool Heap::release(uint64_t keep) {
  std::vector<FreeRange> ranges;
  bool more = false;
  {
    const std::lock_guard guard(lock_);
    if (use_.reserved <= keep) return false;
    settle();
    sweep();
    const uint64_t excess = (use_.reserved - keep) / kGranule * kGranule;
    ranges = large_.take_whole(kGranule, excess);
    for (const FreeRange& range : ranges) use_.reserved -= range.bytes;
    more = use_.reserved > keep && (small_.unsettled() || large_.unsettled());
  }
  for (const FreeRange& range : ranges) backing(ordinal_).give(range.address, range.bytes);
  return more;
}

void Heap::orphan(uint64_t stream_key, uint64_t orphans) {
  const std::lock_guard guard(lock_);
  small_.orphan(stream_key, orphans);
  large_.orphan(stream_key, orphans);
}

HeapUse Heap::use() {
  const std::lock_guard guard(lock_);
  return use_;
}

void Heap::reset_high(bool used) {
  const std::lock_guard guard(lock_);
  if (used) {
    use_.used_high = use_.used;
  } else {
    use_.reserved_high = use_.reserved;
  }
}

}  // namespace xmig::client
