#include "client/memory/memory_ranges.h"

#include <algorithm>

namespace xmig::client {

namespace {

constexpr uint64_t align_up(uint64_t n, uint64_t to) { return (n + to - 1) & ~(to - 1); }
constexpr uint64_t align_down(uint64_t n, uint64_t to) { return n & ~(to - 1); }

bool same_rule(const FreedBy& a, const FreedBy& b) { return a.stream == b.stream && a.context == b.context; }

}  // namespace

void FreeRanges::insert(const FreeRange& range) {
  if (!range.bytes) return;
  by_address_.emplace(range.address, range);
  by_size_[range.freed.stream].emplace(range.bytes, range.address);
  bytes_ += range.bytes;
}

void FreeRanges::erase(Iterator it) {
  const FreeRange& range = it->second;
  const auto sizes = by_size_.find(range.freed.stream);
  sizes->second.erase({range.bytes, range.address});
  if (sizes->second.empty() && range.freed.stream) by_size_.erase(sizes);
  bytes_ -= range.bytes;
  by_address_.erase(it);
}

void FreeRanges::add(const FreeRange& range) {
  FreeRange merged = range;
  auto next = by_address_.lower_bound(range.address);
  if (next != by_address_.end() && next->first == range.end() && same_rule(next->second.freed, range.freed)) {
    merged.bytes += next->second.bytes;
    merged.freed.sequence = std::max(merged.freed.sequence, next->second.freed.sequence);
    const auto after = std::next(next);
    erase(next);
    next = after;
  }
  if (next != by_address_.begin()) {
    const auto before = std::prev(next);
    if (before->second.end() == range.address && same_rule(before->second.freed, range.freed)) {
      merged.address = before->second.address;
      merged.bytes += before->second.bytes;
      merged.freed.sequence = std::max(merged.freed.sequence, before->second.freed.sequence);
      erase(before);
    }
  }
  insert(merged);
}

std::optional<FreeRange> FreeRanges::take_of(uint64_t bytes, uint64_t alignment, uint64_t stream) {
  const auto sizes = by_size_.find(stream);
  if (sizes == by_size_.end()) return std::nullopt;
  for (auto it = sizes->second.lower_bound({bytes, 0}); it != sizes->second.end(); ++it) {
    const uint64_t start = align_up(it->second, alignment);
    if (start + bytes > it->second + it->first) continue;
    const auto found = by_address_.find(it->second);
    const FreeRange whole = found->second;
    erase(found);
    insert({whole.address, start - whole.address, whole.freed});
    insert({start + bytes, whole.end() - start - bytes, whole.freed});
    return FreeRange{start, bytes, whole.freed};
  }
  return std::nullopt;
}

std::optional<FreeRange> FreeRanges::take(uint64_t bytes, uint64_t alignment, uint64_t stream) {
  if (stream) {
    if (auto own = take_of(bytes, alignment, stream)) return own;
  }
  return take_of(bytes, alignment, 0);
}

bool FreeRanges::take_at(uint64_t address, uint64_t bytes) {
  auto it = by_address_.upper_bound(address);
  if (it == by_address_.begin()) return false;
  --it;
  const FreeRange whole = it->second;
  if (whole.freed.stream || address + bytes < address || address + bytes > whole.end()) return false;
  erase(it);
  insert({whole.address, address - whole.address, whole.freed});
  insert({address + bytes, whole.end() - address - bytes, whole.freed});
  return true;
}

std::vector<FreeRange> FreeRanges::take_whole(uint64_t granule, uint64_t bytes) {
  std::vector<FreeRange> taken;
  const auto sizes = by_size_.find(0);
  if (sizes == by_size_.end()) return taken;
  std::vector<FreeRange> candidates;
  for (auto it = sizes->second.rbegin(); it != sizes->second.rend() && it->first >= granule; ++it) {
    const uint64_t start = align_up(it->second, granule);
    const uint64_t end = align_down(it->second + it->first, granule);
    if (start < end) candidates.push_back({start, end - start, {}});
  }
  uint64_t total = 0;
  for (FreeRange& range : candidates) {
    if (total >= bytes) break;
    range.bytes = std::min(range.bytes, align_up(std::min(bytes - total, range.bytes), granule));
    take_at(range.address, range.bytes);
    total += range.bytes;
    taken.push_back(range);
  }
  return taken;
}

void FreeRanges::settle(const std::function<bool(const FreedBy&)>& covered) {
  if (!unsettled()) return;
  std::vector<FreeRange> settled;
  for (const auto& [address, range] : by_address_)
    if (range.freed.stream && covered(range.freed)) settled.push_back(range);
  for (FreeRange& range : settled) {
    erase(by_address_.find(range.address));
    range.freed = {};
    add(range);
  }
}

void FreeRanges::orphan(uint64_t stream, uint64_t orphans) {
  const auto sizes = by_size_.find(stream);
  if (sizes == by_size_.end()) return;
  std::vector<FreeRange> own;
  for (const auto& [bytes, address] : sizes->second) own.push_back(by_address_.at(address));
  for (FreeRange& range : own) {
    erase(by_address_.find(range.address));
    range.freed.stream = orphans;
    add(range);
  }
}

std::optional<FreeRange> FreeRanges::find(uint64_t address) const {
  auto it = by_address_.upper_bound(address);
  if (it == by_address_.begin()) return std::nullopt;
  --it;
  if (address >= it->second.end()) return std::nullopt;
  return it->second;
}

std::optional<FreeRange> FreeRanges::starting_at(uint64_t address) const {
  const auto it = by_address_.find(address);
  if (it == by_address_.end()) return std::nullopt;
  return it->second;
}

}  // namespace xmig::client
