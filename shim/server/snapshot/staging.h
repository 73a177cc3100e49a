// Where snapshots are to put content, and what has been brought there ahead of them, behind the executor (migration/relocation.h).
//
// A snapshot keeps it still as long as it decides and copies. Lock order: mutex, then ProcessMemory::mutex.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <utility>

#include "server/memory/process_memory.h"
#include "server/snapshot/snapshot_file.h"

namespace xmig::server {

// Any thread may set these; a snapshot acts upon them, and takes back what it has done.
struct ShadowWishes {
  std::atomic<Place> place{Place::kDevice};
  std::atomic<bool> returns{false};      // what is not on the device may go there with the next snapshot
  std::atomic<bool> must_settle{false};  // a snapshot that is requested is taken although nothing was executed
};

class Staging {
 public:
  // A granule's content, on its way out of the shadow to another place of the shadow.
  struct Staged {
    uint64_t hash = 0, slot = 0;
  };

  explicit Staging(ProcessMemory& memory) : memory_(memory) {}

  ShadowWishes wishes;

  // For a snapshot, which changes the slots that are copied from, and takes what is staged.
  std::unique_lock<std::mutex> keep_still() {
    snapshot_waits_ = true;
    std::unique_lock lock(mutex_);
    snapshot_waits_ = false;
    return lock;
  }
  // For who stages: behind a snapshot that waits, unless `stopping`.
  std::unique_lock<std::mutex> begin_batch(const std::atomic<bool>& stopping) {
    while (snapshot_waits_ && !stopping) std::this_thread::sleep_for(std::chrono::microseconds(50));
    return std::unique_lock(mutex_);
  }

  // The same for who may be stopped while a snapshot that is prepared waits for its decision: nothing if `stopping`.
  std::unique_lock<std::mutex> begin_batch_unless(const std::atomic<bool>& stopping) {
    while (!stopping) {
      if (!snapshot_waits_) {
        std::unique_lock lock(mutex_, std::try_to_lock);
        if (lock) return lock;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    return {};
  }

  // While it is kept still, or a batch has begun.
  const Staged* find(uint64_t address) const {
    const auto found = staged_.find(address);
    return found == staged_.end() ? nullptr : &found->second;
  }
  // The place that was prepared for this granule, if it is of that kind, and whether it needs copying still.
  std::optional<uint64_t> prepared(uint64_t address, uint64_t hash, Place place, bool& changed) const {
    const Staged* const staged = find(address);
    if (!staged || memory_.shadow.place(staged->slot) != place) return std::nullopt;
    changed = staged->hash != hash;
    return staged->slot;
  }
  void put(uint64_t address, Staged staged) { staged_[address] = staged; }
  // Committed: the slot is the snapshot's own.
  void consume(const ChunkState& chunk) {
    const auto found = staged_.find(chunk.address);
    if (found != staged_.end() && found->second.slot == chunk.slot) staged_.erase(found);
  }

  // Nothing is staged any more; nobody stages.
  void drop() {
    const std::scoped_lock both(mutex_, memory_.mutex);
    for (const auto& [address, staged] : staged_) memory_.shadow.free(staged.slot);
    staged_.clear();
    memory_.shadow.unhold();  // empty slabs go with the next snapshot
  }

 private:
  ProcessMemory& memory_;
  std::mutex mutex_;
  std::atomic<bool> snapshot_waits_{false};
  std::unordered_map<uint64_t, Staged> staged_;  // by granule; guarded by mutex_
};

}  // namespace xmig::server
