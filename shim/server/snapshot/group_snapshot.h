// A rank's part in a snapshot that all ranks of a group take.
//
// Ranks that share communicators depend on each other: a replay of one alone would compute with what nobody sends any more. So none takes
// a snapshot alone. The daemon has all of them stop between two records, right behind a collective where that is possible
// (docs/decisions/0052), and those that are behind go on until each communicator has seen the same operations on all of its ranks: such
// positions fit, and every collective that was begun before them ends without what comes after them. Then all hold: drained, hashed, with everything prepared that a snapshot needs, so that it cannot fail any more. When the daemon knows
// that all hold, it is decided, and each takes its snapshot; a rank that is lost from then on is at that state in its memory. Until it is
// decided, nothing of the last snapshot was overwritten, and all have that.
//
// The daemon's steps come on the control thread; everything else is the executor's.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>
#include <variant>

#include "server/channel/requests.h"

namespace xmig::server {

class GroupSnapshot {
 public:
  // The daemon is gone: what nobody else relies on is given up.
  struct Alone {};
  using Step = std::variant<GroupStop, GroupHold, GroupTake, GroupContinue, Alone>;
  enum class Stage {
    kNone,
    kStopping,  // executes until it has come as far as the others
    kStopped,   // and has reported how far that is
    kDraining,  // the device finishes what it has
    kHeld,      // everything is prepared
  };

  explicit GroupSnapshot(std::function<void()> wake) : wake_(std::move(wake)) {}

  // The control thread.
  void request(Step step) {
    {
      const std::lock_guard lock(mutex_);
      steps_.push_back(std::move(step));
    }
    wake_();
  }
  // The round in which this rank stands still until it is decided; 0: it does not.
  uint64_t held() const { return held_.load(); }

  // The executor's thread.
  std::optional<Step> next() {
    const std::lock_guard lock(mutex_);
    if (steps_.empty()) return std::nullopt;
    Step step = std::move(steps_.front());
    steps_.pop_front();
    return step;
  }
  Stage stage() const { return stage_; }
  bool under_way() const { return stage_ != Stage::kNone; }
  // Is nothing executed?
  bool stands() const { return stage_ > Stage::kStopping; }
  uint64_t round() const { return stop_.round; }
  const GroupCounts& targets() const { return stop_.counts; }
  // Where it is to stop behind a collective, if others have.
  const std::optional<uint64_t>& behind() const { return stop_.behind; }
  uint64_t since() const { return since_; }        // of the stage
  uint64_t stopped_at() const { return stopped_at_; }

  void stop(GroupStop stop, uint64_t now) {
    stop_ = std::move(stop);
    arrived_at_ = 0;
    enter(Stage::kStopping, now);
  }
  void enter(Stage stage, uint64_t now) {
    if (stage == Stage::kStopped) stopped_at_ = now;
    stage_ = stage;
    since_ = now;
    held_.store(stage == Stage::kHeld ? stop_.round : 0);
  }
  void end() {
    suspends_ = false;
    enter(Stage::kNone, 0);
  }
  // It has come as far as it is to.
  void arrive(uint64_t now) {
    if (arrived_at_ == 0) arrived_at_ = now;
  }
  uint64_t arrived_at() const { return arrived_at_; }
  // All ranks are suspended with this round.
  bool suspends() const { return suspends_; }
  void suspend() { suspends_ = true; }

  // Is it time to say once more that one is wanted?
  bool wanted(uint64_t now) {
    if (now < want_again_at_) return false;
    want_again_at_ = now + kWantEvery;
    return true;
  }

 private:
  static constexpr uint64_t kWantEvery = 20'000'000;  // ns

  const std::function<void()> wake_;
  std::mutex mutex_;
  std::deque<Step> steps_;  // guarded by mutex_
  std::atomic<uint64_t> held_{0};
  Stage stage_ = Stage::kNone;
  GroupStop stop_;
  bool suspends_ = false;
  uint64_t since_ = 0, arrived_at_ = 0, stopped_at_ = 0;
  uint64_t want_again_at_ = 0;
};

}  // namespace xmig::server
