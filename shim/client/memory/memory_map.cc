#include "client/memory/memory_map.h"

#include <utility>

#include "client/memory/memory_backing.h"
#include "journal/layout.h"

namespace xmig::client {

namespace {

bool in_pinned_range(uint64_t address) { return address - journal::kPinnedBase < journal::kPinnedBytes; }

}  // namespace

const Allocation* MemoryMap::containing(uint64_t address) const {
  auto it = map_.upper_bound(address);
  if (it == map_.begin()) return nullptr;
  --it;
  return address < it->second.end() ? &it->second : nullptr;
}

bool MemoryMap::insert(Allocation allocation) {
  const std::unique_lock guard(lock_);
  const auto next = map_.lower_bound(allocation.address);
  if (next != map_.end() && next->first < allocation.end()) return false;
  if (containing(allocation.address)) return false;
  allocation.id = next_id_++;
  map_.emplace(allocation.address, std::move(allocation));
  return true;
}

std::optional<Allocation> MemoryMap::find(uint64_t address) const {
  const std::shared_lock guard(lock_);
  const Allocation* const found = containing(address);
  if (!found) return std::nullopt;
  return *found;
}

void MemoryMap::restore(Allocation allocation) {
  const std::unique_lock guard(lock_);
  map_.emplace(allocation.address, std::move(allocation));
}

std::vector<Allocation> MemoryMap::remove_context(uint64_t context) {
  const std::unique_lock guard(lock_);
  std::vector<Allocation> removed;
  for (auto it = map_.begin(); it != map_.end();) {
    if (it->second.context == context && it->second.kind != MemoryKind::kMapped) {
      removed.push_back(std::move(it->second));
      it = map_.erase(it);
    } else {
      ++it;
    }
  }
  return removed;
}

std::vector<Allocation> MemoryMap::mapped_in(uint64_t context) const {
  const std::shared_lock guard(lock_);
  std::vector<Allocation> mapped;
  for (const auto& [address, allocation] : map_) {
    if (allocation.context == context && allocation.kind == MemoryKind::kMapped) mapped.push_back(allocation);
  }
  return mapped;
}

void MemoryMap::set_flags(uint64_t address, uint32_t flags) {
  const std::unique_lock guard(lock_);
  if (const auto it = map_.find(address); it != map_.end()) it->second.flags = flags;
}

Place MemoryMap::place(uint64_t address, uint64_t bytes) const {
  if (!address || address + bytes < address) return Place::kInvalid;
  const uint64_t end = address + bytes;
  const bool device = ordinal_of(address) >= 0;
  const bool pinned = in_pinned_range(address);
  if (!device && !pinned) return Place::kPageable;
  const std::shared_lock guard(lock_);
  for (uint64_t at = address;;) {
    const Allocation* const found = containing(at);
    if (!found) return Place::kInvalid;
    at = found->end();
    if (at >= end) return device ? Place::kDevice : Place::kPinned;
  }
}

Place MemoryMap::place(uint64_t address, uint64_t pitch, uint64_t width, uint64_t height) const {
  uint64_t span = 0;
  if (height && __builtin_mul_overflow(height - 1, pitch, &span)) return Place::kInvalid;
  if (__builtin_add_overflow(span, width, &span)) return Place::kInvalid;
  return place(address, span);
}

MemoryMap& memory_map() {
  static auto& map = *new MemoryMap;
  return map;
}

}  // namespace xmig::client
