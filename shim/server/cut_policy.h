// When to take a cut.
//
// Cuts cost time in which nothing is executed; the budget is a share of time. What a cut costs is learnt from the last
// one. Good moments, when the device has nothing to do anyway, are taken as soon as one is due; any moment when one is
// long overdue, or when the journal fills.
#pragma once

#include <algorithm>
#include <cstdint>

namespace xmig::server {

class CutPolicy {
 public:
  explicit CutPolicy(double budget) : budget_(budget) {}

  void start(uint64_t now) { due_ = now + kFirst; }
  void taken(uint64_t now, uint64_t cost) {
    const auto interval = static_cast<uint64_t>(static_cast<double>(cost) / budget_);
    interval_ = std::clamp(interval, kShortest, kLongest);
    due_ = now + interval_;
  }
  // Not possible just now: there is no point in trying again at once.
  void postpone(uint64_t now) { due_ = now + kRetry; }

  bool due(uint64_t now) const { return now >= due_; }
  bool overdue(uint64_t now) const { return now >= due_ + interval_; }
  uint64_t due_at() const { return due_; }

  // The journal decides on its own: `filled` bytes of `ring` could be trimmed if a cut were taken now.
  static bool needs_room(uint64_t filled, uint64_t gained, uint64_t ring, bool waiters, bool caught_up) {
    if (gained == 0) return false;
    return filled >= ring / 4 * 3 || (waiters && (caught_up || gained >= ring / 4));
  }

 private:
  static constexpr uint64_t kFirst = 20'000'000;
  static constexpr uint64_t kShortest = 20'000'000;
  static constexpr uint64_t kLongest = 60'000'000'000;
  static constexpr uint64_t kRetry = 100'000'000;

  double budget_;
  uint64_t interval_ = kShortest;
  uint64_t due_ = 0;
};

}  // namespace xmig::server
