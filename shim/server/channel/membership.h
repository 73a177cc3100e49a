// The communicators that this rank is in, as the daemon has to know them: through them, ranks are a group, which is snapshotted and
// recovered together. A daemon that is new to the job is informed of all of them.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "server/channel/daemon.h"

namespace xmig::server {

class Membership {
 public:
  explicit Membership(Daemon& daemon) : daemon_(daemon) {}
  Membership(const Membership&) = delete;

  // Before the rank looks for the others.
  void joined(const std::string& name, uint32_t rank, uint32_t ranks) { is(name, {rank, ranks, "joined"}); }
  // By the program; a recovery from the last snapshot would make it again. False: the rank was not in it any more.
  bool ended(const std::string& name) { return becomes(name, "ended"); }
  // No recovery needs it.
  void past(const std::string& name) {
    becomes(name, "past");
    const std::lock_guard lock(mutex_);
    all_.erase(name);
  }
  // It lacks ranks for good and is not made again. The server before this one may have joined it.
  void left_in(const std::string& name, uint32_t rank, uint32_t ranks) {
    const std::lock_guard lock(mutex_);
    all_.erase(name);
    tell(name, {rank, ranks, "past"});
  }
  // From any thread: to a daemon that is new to the job.
  void tell_all() const {
    const std::lock_guard lock(mutex_);
    for (const auto& [name, one] : all_) tell(name, one);
  }

 private:
  struct One {
    uint32_t rank = 0, ranks = 0;
    const char* state = "";
  };
  void is(const std::string& name, const One& one) {
    const std::lock_guard lock(mutex_);
    all_[name] = one;
    tell(name, one);
  }
  bool becomes(const std::string& name, const char* state) {
    const std::lock_guard lock(mutex_);
    const auto found = all_.find(name);
    if (found == all_.end()) return false;
    found->second.state = state;
    tell(name, found->second);
    return true;
  }
  void tell(const std::string& name, const One& one) const { daemon_.communicator(name, one.rank, one.ranks, one.state); }

  Daemon& daemon_;
  mutable std::mutex mutex_;
  std::map<std::string, One> all_;  // guarded by mutex_
};

}  // namespace xmig::server
