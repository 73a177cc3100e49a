// Where a server that has lost memory with a device may find the same content: the daemon names the ranks of its group that are at the
// same round: those of this node with the files of their snapshots and their shadows; of those of other nodes it brings content, chunk by
// chunk.
//
// The executor's thread waits here; the control thread brings what comes.
#pragma once

#include <condition_variable>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "server/channel/hosted.h"
#include "server/channel/requests.h"

namespace xmig::server {

struct ReplicaSource {
  SnapshotFiles snapshots;
  std::vector<Hosted> shadow;
};

class ReplicaSources {
 public:
  // The control thread: the next rank; memory of the last one that was added; that is all.
  void add(SnapshotFiles snapshots) {
    const std::lock_guard lock(mutex_);
    sources_.push_back({std::move(snapshots), {}});
  }
  void add(Hosted memory) {
    const std::lock_guard lock(mutex_);
    if (!sources_.empty()) sources_.back().shadow.push_back(std::move(memory));
  }
  // `far`: ranks of other nodes.
  void complete(uint32_t far) {
    const std::lock_guard lock(mutex_);
    complete_ = true;
    far_ = far;
    changed_.notify_all();
  }
  void brought(ChunksBrought chunks) {
    const std::lock_guard lock(mutex_);
    brought_ = std::move(chunks);
    changed_.notify_all();
  }
  // Those that were named for something else than a recovery.
  std::vector<ReplicaSource> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(sources_, {});
  }
  // The daemon has gone: there is nobody who could name any, or bring anything.
  void close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }

  struct Named {
    std::vector<ReplicaSource> near;
    uint32_t far = 0;
  };
  // Nothing if the daemon has gone before it has named all.
  std::optional<Named> wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return complete_ || closed_; });
    if (!complete_) return std::nullopt;
    return Named{std::move(sources_), far_};
  }
  // What was requested last. Nothing if the daemon has gone before it has brought it.
  std::optional<ChunksBrought> await_chunks() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return brought_ || closed_; });
    return std::exchange(brought_, std::nullopt);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  bool complete_ = false, closed_ = false;
  uint32_t far_ = 0;
  std::vector<ReplicaSource> sources_;
  std::optional<ChunksBrought> brought_;
};

}  // namespace xmig::server
