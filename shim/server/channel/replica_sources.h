// Where a server that has lost memory with a device may find the same content: the daemon names the ranks of its group that are at the
// same round, with the files of their snapshots and their shadows.
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
  void complete() { become(State::kComplete); }
  // Those that were named for something else than a recovery.
  std::vector<ReplicaSource> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(sources_, {});
  }
  // The daemon has gone: there is nobody who could name any.
  void close() { become(State::kClosed); }

  // Nothing if the daemon has gone before it has named all.
  std::optional<std::vector<ReplicaSource>> wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return state_ != State::kOpen; });
    if (state_ == State::kClosed) return std::nullopt;
    return std::move(sources_);
  }

 private:
  enum class State { kOpen, kComplete, kClosed };
  void become(State state) {
    const std::lock_guard lock(mutex_);
    if (state_ == State::kOpen) state_ = state;
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::kOpen;          // guarded by mutex_
  std::vector<ReplicaSource> sources_;  // guarded by mutex_
};

}  // namespace xmig::server
