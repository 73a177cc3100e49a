#include "server/memory/copy_log.h"

#include <algorithm>
#include <utility>

namespace xmig::server {

using journal::kGranule;

namespace {

constexpr uint64_t kAlignment = 256;  // so that copies are as fast as they can be

uint64_t granule_of(uint64_t address) { return address / kGranule * kGranule; }

}  // namespace

void CopyLog::keep_on_host() {
  if (std::exchange(on_host_, true)) return;
  for (Space& space : spaces_) {
    space.granule = 0;
    for (const uint64_t granule : space.empty) shadow_.free(granule);
    space.count -= space.empty.size();
    space.empty.clear();
  }
}

uint64_t CopyLog::bytes_on_device() const {
  const auto on_device = [&](const auto& used) { return shadow_.on_device(used.first); };
  return static_cast<uint64_t>(std::ranges::count_if(last_, on_device)) * kGranule;
}

std::optional<uint64_t> CopyLog::take(uint32_t ordinal, uint64_t bytes, uint64_t position) {
  if (bytes > kGranule) return std::nullopt;
  Space& space = spaces_[ordinal];
  if (!space.granule || kGranule - space.used < bytes) {
    if (!space.empty.empty()) {
      space.granule = space.empty.back();
      space.empty.pop_back();
    } else {
      if (space.count >= space.most) return std::nullopt;
      const std::optional<uint64_t> slot =
          on_host_ ? shadow_.allocate_in_reach(ordinal) : shadow_.allocate(ordinal, Place::kDevice);
      if (!slot) return std::nullopt;
      ++space.count;
      space.granule = *slot;
    }
    space.used = 0;
  }
  const uint64_t address = space.granule + space.used;
  space.used = std::min(kGranule, (space.used + bytes + kAlignment - 1) / kAlignment * kAlignment);
  last_[space.granule] = position;
  return address;
}

bool CopyLog::keep(uint64_t address, uint64_t bytes, uint64_t position) {
  const uint64_t granule = granule_of(address);
  if (bytes > kGranule || address - granule > kGranule - bytes) return false;
  if (const auto known = last_.find(granule); known != last_.end()) {
    known->second = std::max(known->second, position);
    return true;
  }
  if (!shadow_.take(granule)) return false;
  ++spaces_[ordinal_of_slot(granule)].count;
  last_.emplace(granule, position);
  return true;
}

bool CopyLog::holds(uint64_t address, uint64_t bytes) const {
  const uint64_t granule = granule_of(address);
  return last_.contains(granule) && bytes <= kGranule && address - granule <= kGranule - bytes;
}

void CopyLog::release(uint64_t position, bool all) {
  for (auto it = last_.begin(); it != last_.end();) {
    if (it->second >= position) {
      ++it;
      continue;
    }
    Space& space = spaces_[ordinal_of_slot(it->first)];
    if (space.granule == it->first) space.granule = 0;
    if (shadow_.is_foreign(it->first) || (on_host_ && shadow_.on_device(it->first))) {
      shadow_.free(it->first);
      --space.count;
    } else {
      space.empty.push_back(it->first);
    }
    it = last_.erase(it);
  }
  for (Space& space : spaces_) {
    // As much as was in use at once stays; of a burst half goes with every snapshot.
    const size_t keep = all ? 0 : space.empty.size() - space.empty.size() / 2;
    const size_t least = all ? 0 : 8;
    while (space.empty.size() > std::max(keep, least)) {
      shadow_.free(space.empty.back());
      space.empty.pop_back();
      --space.count;
    }
  }
}

}  // namespace xmig::server
