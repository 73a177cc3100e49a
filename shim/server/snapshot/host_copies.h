// Copies in host memory of what no other device has: with them the process survives the loss of its own (docs/decisions/0048).
//
// After a snapshot of all ranks, what this one has and no rank on another device has is copied out of the shadow, while the program runs. A copy
// is known by its hash: what the next snapshot still has is not copied again, and whoever looks for content hashes what there is. They
// lie in slots of the shadow that no snapshot uses, so that they outlive the server as the shadow does.
//
// From the first time on, copies from page-locked memory leave what they bring in host memory, too (memory/copy_log.h).
//
// A thread of its own copies. It keeps snapshots waiting for a batch at most; if one comes before it is done, it gives up, and that is reported.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "server/channel/replica_sources.h"
#include "server/channel/requests.h"
#include "server/memory/granules.h"
#include "server/memory/process_memory.h"
#include "server/services.h"
#include "server/snapshot/snapshots.h"
#include "server/snapshot/staging.h"

namespace xmig::server {

class HostCopies {
 public:
  HostCopies(const Services& services, ProcessMemory& memory, Granules& granules, Staging& staging, const Snapshots& snapshots)
      : services_(services), memory_(memory), granules_(granules), staging_(staging), snapshots_(snapshots) {}
  ~HostCopies() { stop(); }
  HostCopies(const HostCopies&) = delete;

  // From the control thread. Of the requested snapshot, what these ranks do not have; nothing, if it is not the last one any more. What was
  // under way is given up.
  void make(std::vector<ReplicaSource> others, CopyUnique request);
  // Nothing is copied any more.
  void stop();

 private:
  using Wanted = std::map<uint64_t, uint64_t>;  // slot by hash

  void run(const std::vector<ReplicaSource>& others, const CopyUnique& request);
  bool look(uint64_t snapshot, const std::unordered_set<uint64_t>& theirs, Wanted& wanted);
  void release_others_than(const Wanted& wanted);
  uint64_t brought_to_device();
  bool copy(const Wanted& wanted, uint64_t snapshot);
  bool copy_batch(Wanted::const_iterator& at, const Wanted& wanted);

  const Services services_;
  ProcessMemory& memory_;
  Granules& granules_;
  Staging& staging_;
  const Snapshots& snapshots_;
  std::unordered_map<uint64_t, uint64_t> copies_;  // slots by hash; the thread's
  std::atomic<bool> stopping_{false};
  std::thread thread_;  // the control thread's
};

}  // namespace xmig::server
