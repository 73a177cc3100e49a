// Which bytes of device memory are allocated, and what copies may touch; which of them snapshots preserve.
//
// Invariant: what is discarded is whole granules, each of them allocated to its last byte.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "journal/layout.h"

namespace xmig::server {

struct LiveRange {
  uint64_t address;
  uint64_t bytes;
  uint64_t context;
};

class LiveSet {
 public:
  // False if it overlaps another allocation, is empty, or runs past the end of the address space.
  bool add(const LiveRange& range) {
    if (range.bytes == 0 || range.address + range.bytes < range.address) return false;
    if (overlaps(range.address, range.bytes)) return false;
    ranges_.emplace(range.address, range);
    listed_.reset();
    bytes_ += range.bytes;
    return true;
  }
  bool remove(uint64_t address) {
    const auto found = ranges_.find(address);
    if (found == ranges_.end()) return false;
    erase(found);
    return true;
  }
  // Nobody needs what these whole granules hold. False if not all of it is allocated.
  bool discard(uint64_t address, uint64_t bytes) {
    if (bytes == 0 || !contains(address, bytes)) return false;
    for (uint64_t granule = address; granule < address + bytes; granule += journal::kGranule) discarded_.insert(granule);
    listed_.reset();
    return true;
  }
  // They are preserved again, where they were not.
  void reuse(uint64_t address, uint64_t bytes) {
    const auto first = discarded_.lower_bound(address);
    const auto end = bytes > ~address ? discarded_.end() : discarded_.lower_bound(address + bytes);
    if (first == end) return;
    discarded_.erase(first, end);
    listed_.reset();
  }
  void remove_context(uint64_t context) {
    for (auto it = ranges_.begin(); it != ranges_.end();) {
      it = it->second.context == context ? erase(it) : std::next(it);
    }
  }
  void clear() {
    ranges_.clear();
    discarded_.clear();
    listed_.reset();
    bytes_ = 0;
    last_ = {};
  }

  bool overlaps(uint64_t address, uint64_t bytes) const {
    const auto next = ranges_.lower_bound(address);
    if (next != ranges_.end() && next->first - address < bytes) return true;
    return next != ranges_.begin() && address - std::prev(next)->first < std::prev(next)->second.bytes;
  }
  // Is every byte allocated? Allocations that touch count as one piece: a program may map memory bit by bit.
  bool contains(uint64_t address, uint64_t bytes) const {
    if (bytes == 0) return true;
    if (address - last_.address < last_.bytes && bytes <= last_.bytes - (address - last_.address)) return true;
    while (true) {
      auto it = ranges_.upper_bound(address);
      if (it == ranges_.begin()) return false;
      const LiveRange& range = std::prev(it)->second;
      const uint64_t offset = address - range.address;
      if (offset >= range.bytes) return false;
      last_ = range;
      if (bytes <= range.bytes - offset) return true;
      bytes -= range.bytes - offset;
      address = range.address + range.bytes;
    }
  }

  // The allocation that has this byte; null: none has.
  const LiveRange* around(uint64_t address) const {
    const auto next = ranges_.upper_bound(address);
    if (next == ranges_.begin()) return nullptr;
    const LiveRange& range = std::prev(next)->second;
    return address - range.address < range.bytes ? &range : nullptr;
  }

  // Of what is preserved.
  uint64_t bytes() const { return bytes_ - discarded_.size() * journal::kGranule; }
  // As a snapshot writes them down: in order, and the granules that have anything of them to preserve. Snapshots ask while the device stands
  // still, and mostly nothing has changed since the one before.
  struct Listed {
    std::vector<LiveRange> ranges;
    std::vector<uint64_t> granules;
  };
  const Listed& listed() const {
    if (listed_) return *listed_;
    Listed& now = listed_.emplace();
    auto discarded = discarded_.cbegin();
    for (const auto& [address, range] : ranges_) {
      now.ranges.push_back(range);
      uint64_t granule = address / journal::kGranule * journal::kGranule;
      if (!now.granules.empty() && now.granules.back() == granule) granule += journal::kGranule;
      for (; granule < address + range.bytes; granule += journal::kGranule) {
        while (discarded != discarded_.cend() && *discarded < granule) ++discarded;
        if (discarded == discarded_.cend() || *discarded != granule) now.granules.push_back(granule);
      }
    }
    return now;
  }

 private:
  std::map<uint64_t, LiveRange>::iterator erase(std::map<uint64_t, LiveRange>::iterator it) {
    // Also the granules at its ends, which others may share: what is not allocated to the last byte is not discarded.
    const uint64_t first = it->first / journal::kGranule * journal::kGranule;
    reuse(first, it->first + it->second.bytes - first);
    bytes_ -= it->second.bytes;
    last_ = {};
    listed_.reset();
    return ranges_.erase(it);
  }

  std::map<uint64_t, LiveRange> ranges_;
  std::set<uint64_t> discarded_;  // granules
  uint64_t bytes_ = 0;
  mutable std::optional<Listed> listed_;
  mutable LiveRange last_{};  // of contains(): most copies go where the one before went
};

}  // namespace xmig::server
