// The physical memory behind the program's device addresses.
//
// The unit of mapping is what one xmGrow made; the unit of xmShrink is the granule. A granule that was given back is
// dead at once for the program, but stays until the next snapshot: a replay may pass through the time when it was in use.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <vector>

#include "server/memory/physical.h"

namespace xmig::server {

class Hosting {
 public:
  // kBeforehand: there is no job yet, and the daemon hears of nothing.
  explicit Hosting(Physical& physical, Physical::When when = Physical::When::kNow) : physical_(physical), when_(when) {}
  ~Hosting() {
    for (auto& [address, backing] : backings_) release(backing.memory);
  }
  Hosting(const Hosting&) = delete;

  // Back these granules. Those that are dead come back to life, those that exist stay as they are.
  Status grow(uint32_t ordinal, uint64_t address, uint64_t bytes);
  void shrink(uint64_t address, uint64_t bytes);
  bool backed(uint64_t address, uint64_t bytes) const;
  // Is there memory, also where the program has given it back?
  bool exists(uint64_t address, uint64_t bytes) const;
  // Is there memory that a snapshot would give back?
  bool has_dead() const { return dead_granules_ != 0; }
  // How much it would give back.
  uint64_t dead_bytes(uint32_t ordinal) const;
  // A snapshot was committed: nothing needs the dead any more.
  void release_dead();

  // The granules that are alive, for the snapshot. Each extent lies in one piece of memory: whoever makes the memory again makes
  // it in such pieces that it can be given back as here.
  std::vector<Extent> extents() const;
  uint64_t bytes() const;
  // What of these granules the program does not have, and what it has of an ordinal.
  uint64_t lacking(uint64_t address, uint64_t bytes) const;
  uint64_t alive_bytes(uint32_t ordinal) const { return alive_[ordinal] * journal::kGranule; }

  // Recovery: take over what the daemon held; then make exactly `alive` of it alive. Whatever else is mapped was grown
  // since the snapshot, and is returned: the replay must find it as new.
  Status adopt(Hosted memory);
  // For a job that comes without its memory: back exactly these granules, with memory of this server's devices; what is
  // backed already keeps its content. `made` hears of the end of each extent that is backed.
  Status become(const std::vector<Extent>& alive, const std::function<void(uint32_t ordinal)>& use_ordinal,
                  const std::function<void(uint64_t end)>& made = [](uint64_t) {});
  bool restore(const std::vector<Extent>& alive, std::vector<Extent>& fresh);
  // All of it, for another one; it stays mapped.
  std::vector<Hosted> give();

  // Does `device` reach the program's memory of this ordinal? And from now on it does, or no longer.
  bool shares(uint32_t ordinal, uint32_t device) const { return physical_.shares(ordinal, device); }
  Status share(uint32_t ordinal, uint32_t device, bool on);

  template <typename F>
  void for_each(F&& f) const {
    for (const auto& [address, backing] : backings_) f(backing.memory);
  }

 private:
  struct Backing {
    Hosted memory;
    std::vector<bool> dead;  // per granule
    size_t dead_count = 0;
  };
  using Map = std::map<uint64_t, Backing>;

  Map::iterator containing(uint64_t address);
  void release(Hosted& memory);
  void mark(uint64_t address, uint64_t bytes, bool dead);

  Physical& physical_;
  const Physical::When when_;
  Map backings_;
  uint64_t dead_granules_ = 0;
  std::array<uint64_t, journal::kMaxDevices> alive_{};  // granules, by ordinal
};

}  // namespace xmig::server
