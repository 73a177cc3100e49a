// When to take a cut.
//
// Cuts cost time in which nothing is executed; the budget is a share of time. What a cut will cost is learnt from the last
// one, without what that did for the first time. What they gain is a short redo, which is as long as the work since the last
// cut: a redo that is short enough for nobody to notice is worth four times the budget, and no more than that. One that is
// noticed anyway may as well be longer: faults are rare, and cuts are not.
//
// Good moments, when the device has nothing to do anyway, are taken as soon as one is due. When one is overdue the
// executor stops for a while and lets the device finish: not for longer than the budget allows, so that work that takes
// long holds nobody up. Only a journal that fills has to wait as long as it takes.
#pragma once

#include <algorithm>
#include <cstdint>

namespace xmig::server {

class CutPolicy {
 public:
  explicit CutPolicy(double budget) : budget_(budget) {}

  void start(uint64_t now) {
    last_ = now;
    due_ = now + kFirst;
  }
  // A recovery is to be short; but if it is long, it must get somewhere even if the server is lost again and again.
  void start_redo(uint64_t now) {
    last_ = now;
    due_ = now + kFirstInRedo;
  }
  // `cost`: what the next one is expected to take.
  void taken(uint64_t now, uint64_t cost) {
    interval_ = std::clamp(share_of(cost), kShortest, kLongest);
    const uint64_t shorter = share_of(cost) / kWorthOfShort;
    if (interval_ > kGoodRedo && shorter <= kFairRedo) interval_ = std::max(kGoodRedo, shorter);
    last_ = now;
    look_at_ = 0;
    due_ = now + interval_;
  }
  // Not possible before then.
  void postpone(uint64_t until) { due_ = until; }
  // A cut was due, but this was no good moment: the device had work. That makes it no less urgent.
  void busy(uint64_t now) { look_at_ = now + kLookEvery; }
  // The device did not finish within patience().
  void gave_up(uint64_t now, uint64_t waited) { due_ = now + share_of(waited); }

  bool due(uint64_t now) const { return now >= due_ && now >= look_at_; }
  bool overdue(uint64_t now) const { return now >= due_ + std::min(interval_ / 4, kGrace); }
  uint64_t due_at() const { return due_; }
  // How long the executor may stop for an overdue cut: the longer there has been none, the longer.
  uint64_t patience(uint64_t now) const {
    return std::max(kLeastPatience, static_cast<uint64_t>(static_cast<double>(now - last_) * budget_));
  }

  // The journal decides on its own: `filled` bytes of `ring` could be trimmed if a cut were taken now.
  static bool needs_room(uint64_t filled, uint64_t gained, uint64_t ring, bool waiters, bool caught_up) {
    if (gained == 0) return false;
    return filled >= ring / 4 * 3 || (waiters && (caught_up || gained >= ring / 4));
  }

 private:
  static constexpr uint64_t kFirst = 20'000'000;
  static constexpr uint64_t kFirstInRedo = 200'000'000;
  // Shorter would make a redo shorter that is short already, and cost a program that never lets the device idle.
  static constexpr uint64_t kShortest = 150'000'000;
  // With the grace, a quarter of it, and a cut's own time: at most 250 ms of work to be done again.
  static constexpr uint64_t kGoodRedo = 200'000'000;
  static constexpr uint64_t kFairRedo = 275'000'000;  // the longest that more than the budget is spent for
  static constexpr uint64_t kWorthOfShort = 4;        // budgets
  static constexpr uint64_t kGrace = 100'000'000;  // in which a good moment may come
  static constexpr uint64_t kLookEvery = 100'000;
  static constexpr uint64_t kLongest = 60'000'000'000;
  // A device that works through what it has been given loses nothing meanwhile.
  static constexpr uint64_t kLeastPatience = 100'000'000;

  // The time of which this is the budget's share.
  uint64_t share_of(uint64_t cost) const { return static_cast<uint64_t>(static_cast<double>(cost) / budget_); }

  double budget_;
  uint64_t interval_ = kFirst;
  uint64_t due_ = 0;
  uint64_t last_ = 0;
  uint64_t look_at_ = 0;  // for a good moment
};

}  // namespace xmig::server
