// When the executor gives the device a best-effort job's next kernel, and what it shows of a critical job's work. The executor's
// thread alone.
#pragma once

#include <cstdint>
#include <deque>
#include <unordered_map>

#include "server/sharing/sharing.h"

namespace xmig::server {

class Turns {
 public:
  explicit Turns(Sharing& sharing) : sharing_(sharing) {}
  ~Turns() { show(false, 0); }
  Turns(const Turns&) = delete;

  // Whether something else is wanted, once a turn of the executor's loop. True: the class is another one.
  bool look() {
    if (sharing_.changes() == seen_) [[likely]] return false;
    return take();
  }
  bool shares() const { return wanted_.as != SharingClass::kNormal; }
  bool is_best_effort() const { return wanted_.as == SharingClass::kBestEffort; }
  bool holds() const { return held_since_ != 0; }

  // The job has work, or none. `now`: of CLOCK_MONOTONIC, in ns; here and below.
  void show(bool busy, uint64_t now);

  // May the device have this kernel now? `sequence` is its record's, `kernel` its handle. `done`: what the device has done, as
  // Progress::done(). If it may not, nothing has changed but that it waits.
  bool admits(uint32_t ordinal, uint64_t sequence, uint64_t kernel, uint64_t done, uint64_t now);
  // What is executed is not to wait: of a replay, of a job in communicators.
  void passes() { held_since_ = 0; }

 private:
  struct Given {
    uint64_t sequence, kernel, at, estimate;
  };

  bool take();
  void reap(uint64_t done, uint64_t now);
  uint64_t wait_for(const Sharing::Place& place, uint64_t now, bool& bounded) const;
  bool has_room(uint64_t kernel) const;
  uint64_t estimate(uint64_t kernel) const;

  Sharing& sharing_;
  Sharing::Wanted wanted_;
  uint32_t seen_ = 0;
  uint64_t held_since_ = 0;  // the next kernel; 0: it does not wait
  std::deque<Given> given_;  // and not seen done, oldest first
  uint64_t given_ns_ = 0;    // their estimates
  uint64_t done_at_ = 0;     // when the last one was seen done
  std::unordered_map<uint64_t, uint64_t> durations_;  // ns, by kernel
};

}  // namespace xmig::server
