// The expected stall: how long the program would stand still if the server died now. Snapshots are taken by it, and the
// daemon shows it.
//
// It has two parts. The constant one passes until the death is known, memory is mapped and the last snapshot's content is
// back. The other one is the replay: executor and device do again what they did since the last snapshot. That takes about as
// long as the time in which one of them had work since then; time in which the program let both rest does not come again.
// What recoveries really took corrects both.
//
// All of it stands in the journal's header, and a server begins with what the one before it has learnt. The program may
// write there, too: nothing is believed that could not be.
#pragma once

#include <algorithm>
#include <cstdint>

#include "journal/layout.h"

namespace xmig::server {

class Stall {
 public:
  // `constant`: what it is before any recovery has been seen.
  explicit Stall(uint64_t constant = 0) : constant_(constant) {}

  // A job that begins.
  void start(journal::StallWords& words, uint64_t bound, uint64_t now) {
    words_ = &words;
    at_ = now;
    words.bound.store(bound, std::memory_order_relaxed);
    words.correction.store(correction_, std::memory_order_relaxed);
    words.constant.store(constant_, std::memory_order_relaxed);
    tell();
  }
  // A job that another server had, whose last snapshot is restored now: the replay begins. `left`: is there anything to do again?
  void start_replay(journal::StallWords& words, uint64_t bound, uint64_t now, bool left = true) {
    correction_ = std::clamp(words.correction.load(std::memory_order_relaxed), kLeastCorrection, kMostCorrection);
    replay_ = left ? std::min(words.replay.load(std::memory_order_relaxed), kLongest) : 0;
    spent_ = std::min(words.spent.load(std::memory_order_relaxed), kAges);
    const uint64_t learnt = words.constant.load(std::memory_order_relaxed);
    if (learnt != 0) constant_ = std::min(learnt, kLongestConstant);
    // Its last sign of life tells when it died, unless it had nothing to do.
    const uint64_t alive = words.reported_at.load(std::memory_order_relaxed);
    if (words.working.load(std::memory_order_relaxed) != 0 && alive != 0 && alive < now) {
      const uint64_t took = std::min(now - alive, kLongestConstant);
      constant_ = words.recoveries.load(std::memory_order_relaxed) == 0 ? took : (constant_ + took) / 2;
      words.recoveries.fetch_add(1, std::memory_order_relaxed);
    }
    to_replay_ = replay_;
    replaying_ = true;
    replay_began_ = now;
    start(words, bound, now);
  }
  // The job has another journal, with what the old one reported.
  void follow(journal::StallWords& words) { words_ = &words; }
  // All of it is done again.
  void replayed(uint64_t now) {
    if (!replaying_) return;
    replaying_ = false;
    const uint64_t took = now - replay_began_ - std::min(now - replay_began_, paused_);
    if (to_replay_ >= kWorthLearning) {
      const uint64_t found = std::clamp(took * 1000 / to_replay_, kLeastCorrection, kMostCorrection);
      correction_ = (correction_ + found) / 2;
      if (words_) words_->correction.store(correction_, std::memory_order_relaxed);
    }
    paused_ = again_ = 0;
    at_ = now;
    tell();
  }

  // Time has gone by. `worked`: the executor has done something in it; `works_on`: the device is not known to be idle.
  void passed(uint64_t now, bool worked, bool works_on) {
    const uint64_t since = now > at_ ? now - at_ : 0;
    if (worked || working_) (replaying_ ? again_ : replay_) += since;
    at_ = now;
    working_ = works_on;
    tell();
  }
  // The executor slept until now. If the device had nothing to do either, nothing of this time would come again.
  void slept(uint64_t now) { passed(now, false, working_); }
  // Nobody executed anything until now, and the device was drained before.
  void rested(uint64_t now) {
    at_ = now;
    working_ = false;
    tell();
  }
  // A snapshot: what came before does not have to be done again. `cost`: how long nothing was executed for it.
  void snapshot(uint64_t now, uint64_t cost) {
    spent_ += cost;
    if (words_) {
      words_->peak.store(expected(), std::memory_order_relaxed);
      words_->spent.store(spent_, std::memory_order_relaxed);
    }
    if (replaying_) paused_ += cost;
    replay_ = replaying_ ? replay_ - std::min(replay_, again_) : 0;
    again_ = 0;
    at_ = now;
    working_ = false;
    tell();
  }

  uint64_t constant() const { return constant_; }
  uint64_t replay() const { return replay_ / 1000 * correction_ + replay_ % 1000 * correction_ / 1000; }
  uint64_t expected() const { return constant_ + replay(); }
  bool working() const { return working_; }

 private:
  static constexpr uint64_t kLeastCorrection = 125, kMostCorrection = 8000;  // thousandths
  static constexpr uint64_t kWorthLearning = 20'000'000;  // ns; of a shorter replay the correction would be noise
  static constexpr uint64_t kLongestConstant = 2'000'000'000;  // longer, and it was no recovery as usual
  static constexpr uint64_t kLongest = 3'600'000'000'000;
  static constexpr uint64_t kAges = 1ull << 60;

  void tell() {
    if (!words_) return;
    words_->replay.store(replay_, std::memory_order_relaxed);
    words_->working.store(working_ && !replaying_, std::memory_order_relaxed);
    words_->reported_at.store(at_, std::memory_order_relaxed);
  }

  journal::StallWords* words_ = nullptr;
  uint64_t constant_;
  uint64_t correction_ = 1000;  // of the replay, in thousandths
  uint64_t replay_ = 0;         // not corrected
  uint64_t spent_ = 0;
  uint64_t at_ = 0;             // up to which time has been counted
  bool working_ = false;
  bool replaying_ = false;
  uint64_t replay_began_ = 0, to_replay_ = 0;
  uint64_t again_ = 0;   // of the replay, since it began or its last snapshot
  uint64_t paused_ = 0;  // for snapshots in it
};

}  // namespace xmig::server
