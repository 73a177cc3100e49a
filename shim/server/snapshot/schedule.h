// When the executor stops between two records until the device is idle, and for what: to take a snapshot, to pause, or to give the job
// away.
//
// It knows of nothing but what it is sent, and asks nobody. The executor's thread's alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

#include "server/channel/interrupts.h"
#include "server/snapshot/snapshot_policy.h"
#include "server/snapshot/stall.h"

namespace xmig::server {

class Schedule {
 public:
  // Execution has stopped until the device is idle.
  struct Stop {
    const char* reason;
    uint64_t since;
    uint64_t deadline;         // then it goes on without, unless the device has come further since
    Interrupts::What request;  // that it is for
    uint64_t progress = 0;     // of the device, when that was last looked at

    bool for_another() const { return request == Interrupts::kHandover || request == Interrupts::kSuspend; }
  };
  // What a decision is about.
  struct Known {
    uint64_t now;
    bool idle;            // nothing was executed
    uint32_t requests;    // Interrupts
    uint64_t gained;      // bytes of journal that a snapshot would make unnecessary,
    uint64_t filled;      // that could then be trimmed, together with what waits for that already,
    uint64_t ring_bytes;  // of so many
    bool room_is_waited_for, caught_up;
    bool watching;   // a client's thread waits for the device
    bool replaying;  // the journal is the lost server's as long as that takes
    uint64_t live_bytes;
  };

  Schedule(uint64_t stall_bound, double snapshot_cost, uint64_t recovery_ns)
      : stall_bound_(stall_bound), policy_(stall_bound, snapshot_cost), stall_(recovery_ns) {}

  void start(journal::StallWords& words, uint64_t now) {
    policy_.start(now);
    stall_.start(words, stall_bound_, now);
  }
  // Nobody else has the job after all, or what was lost has been done again.
  void start_again(uint64_t now) { policy_.start(now); }
  void start_replay(journal::StallWords& words, uint64_t now, bool something) {
    policy_.start_replay(now);
    stall_.start_replay(words, stall_bound_, now, something);
  }
  void replayed(uint64_t now) {
    stall_.replayed(now);
    policy_.start(now);
  }
  void passed(uint64_t now, bool worked, bool works_on, uint64_t live_bytes) {
    stall_.passed(now, worked, works_on);
    policy_.saw(live_bytes);
  }
  void slept(uint64_t now) { stall_.slept(now); }
  void rested(uint64_t now) { stall_.rested(now); }
  void follow(journal::StallWords& words) { stall_.follow(words); }

  // Before another record: the device has read memory that the program may change.
  bool snapshot_now() const { return snapshot_now_; }
  bool set_snapshot_now(bool on) { return std::exchange(snapshot_now_, on); }
  void postpone(uint64_t until) { policy_.postpone(until); }
  // The earliest moment at which a snapshot can become due while nothing is executed.
  uint64_t due_at(uint64_t now, uint64_t live_bytes) const { return policy_.due_at(policy_now(now, live_bytes)); }

  bool stopping() const { return stop_.has_value(); }
  const Stop& stop() const { return *stop_; }
  void begin(Stop stop) { stop_ = stop; }
  Stop end() { return *std::exchange(stop_, std::nullopt); }

  // What there is to stop for. Nothing has happened yet if work of the device waits for the program (`Known` does not say that,
  // for it takes long to ask): then only a stop that is for another server begins, and only when its time is up.
  std::optional<Stop> wanted(const Known& known) {
    const uint64_t now = known.now;
    const SnapshotPolicy::Now policy_now = this->policy_now(now, known.live_bytes);
    const bool possible = now >= blocked_until_;
    Stop stop{nullptr, now, ~0ull, Interrupts::kSnapshot};
    if (known.requests & Interrupts::kPause) {
      stop.request = Interrupts::kPause;
    } else if (known.requests & (Interrupts::kHandover | Interrupts::kSuspend)) {
      stop.request = known.requests & Interrupts::kHandover ? Interrupts::kHandover : Interrupts::kSuspend;
      if (handover_by_ == 0) handover_by_ = now + kHandoverPatience;
      stop.deadline = handover_by_;
      if (known.replaying && now < stop.deadline) return std::nullopt;
    } else if (known.requests & Interrupts::kSnapshot) {
      stop.reason = "requested";
    } else if (snapshot_now_ && possible) {
      stop.reason = "the device reads memory of the program";
      stop.deadline = now + policy_.patience(now);  // its work may wait for what a later record does
    } else if (possible && SnapshotPolicy::needs_room(known.filled, known.gained, known.ring_bytes, known.room_is_waited_for,
                                                 known.caught_up)) {
      stop.reason = "the journal fills";
    } else if (possible && policy_.overdue(policy_now)) {
      stop.reason = "time";
      // In a replay everything is enqueued already, and has to be done in any case.
      if (!known.replaying) stop.deadline = now + policy_.patience(now);
    } else if (possible && known.idle && policy_.due(policy_now) && !known.watching) {
      stop.reason = "idle";
      stop.deadline = now;
    } else if (possible && !known.idle && !known.replaying && policy_.due_here(policy_now)) {
      stop.reason = "little is live";
      stop.deadline = now + policy_.patience(now);
    } else {
      return std::nullopt;
    }
    return stop;
  }
  // It begins: who requested it has been heard.
  void given_away() { handover_by_ = 0; }

  // The device has not come to its end in time. True: execution goes on without.
  bool give_up(uint64_t now, uint64_t progress) {
    const bool stops = stop_->deadline != stop_->since;
    if (stops && progress != stop_->progress && now - stop_->since < SnapshotPolicy::kLongestDelay) {
      stop_->progress = progress;  // it works its queue off
      stop_->deadline = now + policy_.patience(now);
      return false;
    }
    if (!stops) {
      policy_.busy(now);
    } else {
      policy_.gave_up(now, now - stop_->since);
    }
    if (snapshot_now_) blocked_until_ = now + (now - stop_->since);
    stop_.reset();
    return true;
  }

  // A snapshot was taken: it began and was over then, `once` of that it did for the first time. `waited`: for the device to finish.
  void snapshot_taken(uint64_t began, uint64_t end, uint64_t once, uint64_t waited) {
    retry_ = 0;
    snapshot_now_ = false;
    // A server's first snapshot tells nothing of the next: code, pages and buffers are touched for the first time, too.
    if (!std::exchange(has_snapshot_, true)) once = end - began;
    policy_.taken(end, end - began - std::min(end - began, once), waited);
    stall_.snapshot(end, end - began);
  }
  // It was not possible: hashing everything again at once would not make it possible.
  void snapshot_failed(uint64_t now) {
    retry_ = std::clamp(retry_ * 2, kFirstRetry, kLastRetry);
    blocked_until_ = now + retry_;
    policy_.postpone(blocked_until_);
  }

 private:
  static constexpr uint64_t kFirstRetry = 50'000'000;
  static constexpr uint64_t kLastRetry = 1'000'000'000;
  // How long a job may stand still, or wait for the program, so that it can be given to another server.
  static constexpr uint64_t kHandoverPatience = 10'000'000'000;

  SnapshotPolicy::Now policy_now(uint64_t now, uint64_t live_bytes) const {
    return {now, stall_.replay(), stall_.constant(), stall_.working(), live_bytes};
  }

  const uint64_t stall_bound_;  // ns
  SnapshotPolicy policy_;
  Stall stall_;
  std::optional<Stop> stop_;
  bool snapshot_now_ = false;
  bool has_snapshot_ = false;        // this server
  uint64_t blocked_until_ = 0;  // after a snapshot that was not possible
  uint64_t retry_ = 0;
  uint64_t handover_by_ = 0;
};

}  // namespace xmig::server
