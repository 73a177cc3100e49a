#include "server/memory/hosting.h"

#include <algorithm>

namespace xmig::server {

using journal::kGranule;

Hosting::Map::iterator Hosting::containing(uint64_t address) {
  auto it = backings_.upper_bound(address);
  if (it == backings_.begin()) return backings_.end();
  --it;
  return address - it->first < it->second.memory.bytes ? it : backings_.end();
}

void Hosting::release(Hosted& memory) {
  if (when_ == Physical::When::kNow) {
    physical_.release(memory);
  } else {
    physical_.let_go(memory);
  }
}

Status Hosting::grow(uint32_t ordinal, uint64_t address, uint64_t bytes) {
  if (!whole_granules(address, bytes) || !in_device_range(ordinal, address, bytes)) return Problem::kInvalid;
  const uint64_t end = address + bytes;
  std::vector<uint64_t> made;
  for (uint64_t at = address; at < end;) {
    if (const auto it = containing(at); it != backings_.end()) {
      at = it->first + it->second.memory.bytes;
      continue;
    }
    const auto next = backings_.upper_bound(at);
    const uint64_t stop = next == backings_.end() ? end : std::min(end, next->first);
    Backing backing;
    Result<Hosted> memory = physical_.create(HostedKind::kDevice, ordinal, at, stop - at, when_);
    if (!memory) {
      for (const uint64_t start : made) {
        alive_[ordinal] -= backings_.at(start).dead.size();
        release(backings_.at(start).memory);
        backings_.erase(start);
      }
      return physical_.status(memory.error());
    }
    backing.memory = *std::move(memory);
    backing.dead.assign((stop - at) / kGranule, false);
    alive_[ordinal] += backing.dead.size();
    backings_.emplace(at, std::move(backing));
    made.push_back(at);
    at = stop;
  }
  mark(address, bytes, false);
  return {};
}

void Hosting::mark(uint64_t address, uint64_t bytes, bool dead) {
  const uint64_t end = address + bytes;
  for (uint64_t at = address; at < end;) {
    const auto it = containing(at);
    if (it == backings_.end()) {
      const auto next = backings_.upper_bound(at);
      if (next == backings_.end()) return;
      at = next->first;
      continue;
    }
    Backing& backing = it->second;
    const uint64_t stop = std::min(end, it->first + backing.memory.bytes);
    for (; at < stop; at += kGranule) {
      const size_t granule = (at - it->first) / kGranule;
      if (backing.dead[granule] == dead) continue;
      backing.dead[granule] = dead;
      backing.dead_count += dead ? 1 : -1;
      dead_granules_ += dead ? 1 : -1;
      alive_[static_cast<uint32_t>(backing.memory.ordinal)] += dead ? -1 : 1;
    }
  }
}

void Hosting::shrink(uint64_t address, uint64_t bytes) { mark(address, bytes, true); }

bool Hosting::backed(uint64_t address, uint64_t bytes) const {
  if (bytes == 0 || address + bytes < address) return false;
  const uint64_t end = address + bytes;
  for (uint64_t at = address; at < end;) {
    auto it = backings_.upper_bound(at);
    if (it == backings_.begin()) return false;
    --it;
    const Backing& backing = it->second;
    if (at - it->first >= backing.memory.bytes) return false;
    const uint64_t stop = std::min(end, it->first + backing.memory.bytes);
    if (backing.dead_count != 0) {
      for (uint64_t granule = (at - it->first) / kGranule; granule * kGranule < stop - it->first; ++granule) {
        if (backing.dead[granule]) return false;
      }
    }
    at = stop;
  }
  return true;
}

bool Hosting::exists(uint64_t address, uint64_t bytes) const {
  for (uint64_t at = address; at < address + bytes;) {
    auto it = backings_.upper_bound(at);
    if (it == backings_.begin()) return false;
    --it;
    if (at - it->first >= it->second.memory.bytes) return false;
    at = it->first + it->second.memory.bytes;
  }
  return true;
}

uint64_t Hosting::lacking(uint64_t address, uint64_t bytes) const {
  uint64_t found = 0;
  for (uint64_t at = address; at < address + bytes; at += kGranule) found += backed(at, kGranule) ? 0 : kGranule;
  return found;
}

void Hosting::release_dead() {
  if (dead_granules_ == 0) return;
  for (auto it = backings_.begin(); it != backings_.end();) {
    Backing& backing = it->second;
    if (backing.dead_count == backing.dead.size()) {
      dead_granules_ -= backing.dead_count;
      release(backing.memory);
      it = backings_.erase(it);
    } else {
      ++it;
    }
  }
}

std::vector<Extent> Hosting::extents() const {
  std::vector<Extent> alive;
  for (const auto& [start, backing] : backings_) {
    if (backing.dead_count == 0) {
      alive.push_back({start, backing.memory.bytes});
      continue;
    }
    for (size_t granule = 0; granule < backing.dead.size(); ++granule) {
      if (backing.dead[granule]) continue;
      const uint64_t address = start + granule * kGranule;
      const bool goes_on = granule != 0 && !backing.dead[granule - 1];
      if (goes_on) {
        alive.back().bytes += kGranule;
      } else {
        alive.push_back({address, kGranule});
      }
    }
  }
  return alive;
}

uint64_t Hosting::bytes() const {
  uint64_t sum = 0;
  for (const auto& [start, backing] : backings_) sum += backing.memory.bytes;
  return sum;
}

uint64_t Hosting::dead_bytes(uint32_t ordinal) const {
  uint64_t sum = 0;
  for (auto it = backings_.lower_bound(device_base(ordinal));
       it != backings_.end() && in_device_range(ordinal, it->first, it->second.memory.bytes); ++it) {
    if (it->second.dead_count == it->second.dead.size()) sum += it->second.memory.bytes;
  }
  return sum;
}

Status Hosting::share(uint32_t ordinal, uint32_t device, bool on) {
  if (shares(ordinal, device) == on) return {};
  // Neighbours go in one call: each takes the driver some microseconds.
  std::vector<Extent> ranges;
  for (auto it = backings_.lower_bound(device_base(ordinal));
       it != backings_.end() && in_device_range(ordinal, it->first, it->second.memory.bytes); ++it) {
    if (!ranges.empty() && ranges.back().address + ranges.back().bytes == it->first) {
      ranges.back().bytes += it->second.memory.bytes;
    } else {
      ranges.push_back({it->first, it->second.memory.bytes});
    }
  }
  for (size_t i = 0; i < ranges.size(); ++i) {
    const Status result = physical_.set_access(ranges[i].address, ranges[i].bytes, device, on);
    if (result) continue;
    while (i-- > 0) static_cast<void>(physical_.set_access(ranges[i].address, ranges[i].bytes, device, !on));
    return result;
  }
  physical_.share(ordinal, device, on);
  return {};
}

Status Hosting::adopt(Hosted memory) {
  if (!in_place(HostedKind::kDevice, static_cast<uint32_t>(memory.ordinal), memory.address, memory.bytes)) {
    return Problem::kInvalid;
  }
  const auto next = backings_.lower_bound(memory.address);
  const bool overlapping = (next != backings_.end() && next->first - memory.address < memory.bytes) ||
                           containing(memory.address) != backings_.end();
  if (overlapping) return Problem::kMapped;
  if (const Status result = physical_.adopt(memory); !result) return result;
  Backing backing;
  backing.dead.assign(memory.bytes / kGranule, true);
  backing.dead_count = backing.dead.size();
  dead_granules_ += backing.dead_count;
  const uint64_t address = memory.address;
  backing.memory = std::move(memory);
  backings_.emplace(address, std::move(backing));
  return {};
}

Status Hosting::become(const std::vector<Extent>& alive, const std::function<void(uint32_t ordinal)>& use_ordinal,
                         const std::function<void(uint64_t end)>& made) {
  for (const auto& [start, backing] : backings_) mark(start, backing.memory.bytes, true);
  for (const Extent& extent : alive) {
    if (!whole_granules(extent.address, extent.bytes)) return Problem::kInvalid;
    mark(extent.address, extent.bytes, false);
  }
  release_dead();  // first: what follows may need the room
  for (const Extent& extent : alive) {
    const uint32_t ordinal = ordinal_of_device_address(extent.address);
    if (ordinal >= journal::kMaxDevices) return Problem::kInvalid;
    use_ordinal(ordinal);
    if (const Status result = grow(ordinal, extent.address, extent.bytes); !result) return result;
    made(extent.address + extent.bytes);
  }
  return {};
}

std::vector<Hosted> Hosting::give() {
  std::vector<Hosted> all;
  for (auto& [address, backing] : backings_) all.push_back(std::move(backing.memory));
  backings_.clear();
  dead_granules_ = 0;
  alive_ = {};
  return all;
}

bool Hosting::restore(const std::vector<Extent>& alive, std::vector<Extent>& fresh) {
  for (const Extent& extent : alive) {
    if (!whole_granules(extent.address, extent.bytes)) return false;
    mark(extent.address, extent.bytes, false);
    if (!backed(extent.address, extent.bytes)) return false;
  }
  for (const auto& [start, backing] : backings_) {
    for (size_t granule = 0; granule < backing.dead.size(); ++granule) {
      if (!backing.dead[granule]) continue;
      const uint64_t address = start + granule * kGranule;
      if (!fresh.empty() && fresh.back().address + fresh.back().bytes == address) {
        fresh.back().bytes += kGranule;
      } else {
        fresh.push_back({address, kGranule});
      }
    }
  }
  return true;
}

}  // namespace xmig::server
