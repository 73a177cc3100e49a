// When to take a snapshot.
//
// The number that decides is the expected stall (Stall): what the program would wait if the server died now. It is to stay
// below a bound. Snapshots cost time in which nothing is executed: not more than a share of time, the cap. What the next one will
// cost is learnt from the last ones, without what those did for the first time.
//
// Where the two conflict the cap wins, up to a point: a stall of several bounds is no stall of that kind any more. From there on
// up to several caps are spent. And nothing postpones the next snapshot by more than a second: no device that did not finish in
// time, and no single dear snapshot. What one costs beyond the usual is owed: the intervals are a little longer until it is paid.
//
// Good moments, when the device has nothing to do anyway, are taken as soon as one is due: when the replay takes half of what
// it may. A device that never rests is stopped where the program has least live memory, if that differs, for a
// snapshot costs what is live. When a snapshot is overdue the executor stops for a while and lets the device finish, wherever that
// is, but not for long, so that work that takes long holds nobody up. Only a journal that fills has to wait as long as it
// takes.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

namespace xmig::server {

class SnapshotPolicy {
 public:
  // What is known at a moment: replay and constant part of the expected stall, and whether the replay grows with time.
  struct Now {
    uint64_t time = 0;
    uint64_t replay = 0, constant = 0;
    bool working = false;
    uint64_t live = 0;  // bytes
  };

  // Nothing postpones a snapshot by more.
  static constexpr uint64_t kLongestDelay = 1'000'000'000;

  SnapshotPolicy(uint64_t bound, double cap) : bound_(bound), cap_(cap) {}

  void start(uint64_t now) { begin(now, kFirst); }
  // A recovery is to be short; but if it is long, it must get somewhere even if the server is lost again and again.
  void start_replay(uint64_t now) { begin(now, kFirstInReplay); }
  // `cost`: of its time, what the next one is expected to take. `waited`: for the device to finish.
  void taken(uint64_t now, uint64_t cost, uint64_t waited) {
    if (cost != 0) costs_[count_++ % costs_.size()] = cost;  // of a server's first one nothing is known
    pay(now - std::min(now, added(last_, wait_)), 0);        // what the last interval was longer than it had to be
    const uint64_t usual_ns = usual_cost(), base = std::min(cost, usual_ns);
    owed_ += cost - base;
    const uint64_t instalment = std::max(base / kInstalments, owed_ - std::min(owed_, kMostOwed));
    const uint64_t usual = std::max(share_of(usual_ns), kShortest);
    wait_ = std::clamp(share_of(base + std::min(owed_, instalment)), kShortest, added(usual, kLongestDelay));
    pay(wait_, base);
    owed_ = std::min(owed_, kMostOwed);
    drain_ = (3 * drain_ + std::min(waited, kLongestDelay)) / 4;
    grace_ = std::min(std::min(wait_, usual) / 4, kGrace);
    begin_interval(now);
    forced_ = added(now, kLongest);
  }
  // Not possible before then.
  void postpone(uint64_t until) { not_before_ = until; }
  // A snapshot was due, but this was no good moment: the device had work. That makes it no less urgent.
  void busy(uint64_t now) { look_at_ = now + kLookEvery; }
  // The device did not finish within patience().
  void gave_up(uint64_t now, uint64_t waited) {
    gave_up_ = std::min(gave_up_ + 1, kMostPatience);
    not_before_ = now + std::min(4 * std::min(waited, kLongestDelay), kLongestDelay);
  }
  // Between two records. Where live memory is least recurs with every step.
  void saw(uint64_t live) {
    least_ = std::min(least_, live);
    most_ = std::max(most_, live);
  }

  // At a moment at which the device has nothing to do.
  bool due(const Now& now) const { return now.time >= look_at_ && wanted(now) && is_cheap(now.live); }
  // At a moment at which it has: is this a position to stop at?
  bool due_here(const Now& now) const {
    const uint64_t least = least_live();
    return most_ > least + least / 4 + kSmallDifference && wanted(now) && is_cheap(now.live);
  }
  bool overdue(const Now& now) const {
    if (now.time >= added(forced_, grace_) && allowed(now)) return true;
    if (now.replay + std::min(drain_, room(now) / 2) < room(now) || !allowed(now)) return false;
    return unbearable(now) || now.time >= added(added(last_, wait_), grace_);
  }
  // The earliest moment at which one can become due while nothing is executed.
  uint64_t due_at(const Now& now) const {
    const uint64_t half = room(now) / 2;
    const uint64_t grown = now.replay >= half ? now.time : now.working ? now.time + (half - now.replay) : forced_;
    return std::max(std::max(added(last_, wait_), not_before_), std::min(grown, forced_));
  }
  // How long the executor may stop for an overdue snapshot while the device gets no further: the longer there has been none, the longer, and
  // twice as long if that was in vain. As long as it gets further, at most kLongestDelay.
  uint64_t patience(uint64_t now) const {
    return std::min(std::max(kLeastPatience, share_in(now - last_)) << gave_up_, kLongestDelay);
  }

  // The journal decides on its own: `filled` bytes of `ring` could be trimmed if a snapshot were taken now.
  static bool needs_room(uint64_t filled, uint64_t gained, uint64_t ring, bool waiters, bool caught_up) {
    if (gained == 0) return false;
    return filled >= ring / 4 * 3 || (waiters && (caught_up || gained >= ring / 4));
  }

 private:
  static constexpr uint64_t kFirst = 20'000'000;
  static constexpr uint64_t kFirstInReplay = 200'000'000;
  // Shorter would make a replay shorter that is short already, and cost a program that never lets the device idle.
  static constexpr uint64_t kShortest = 50'000'000;
  // One is due by then in any case, when the device rests: what was done then is safe, and costs no journal.
  static constexpr uint64_t kLongest = 1'000'000'000;
  static constexpr uint64_t kGrace = 100'000'000;  // in which a good moment may come
  static constexpr uint64_t kLookEvery = 100'000;
  // A device that works through what it has been given loses nothing meanwhile.
  static constexpr uint64_t kLeastPatience = 150'000'000;
  static constexpr uint32_t kMostPatience = 1;  // doublings: a kernel that lasts for ever holds up others for a quarter of the time
  static constexpr uint64_t kUnbearable = 5;    // bounds: then more than the cap is spent,
  static constexpr uint64_t kWorthOfIt = 4;     // so many of it
  static constexpr uint64_t kInstalments = 4;   // what is owed makes an interval longer by a part of it
  static constexpr uint64_t kMostOwed = 20'000'000;  // what is beyond it is paid at once
  static constexpr uint64_t kSmallDifference = 64ull << 20;  // bytes: a snapshot of them costs next to nothing
  static constexpr uint64_t kNothing = ~0ull;

  static uint64_t added(uint64_t a, uint64_t b) { return a + b < a ? ~0ull : a + b; }
  // The time of which this is the cap's share.
  uint64_t share_of(uint64_t cost) const {
    const double time = static_cast<double>(cost) / cap_;
    return time < 1e18 ? static_cast<uint64_t>(time) : static_cast<uint64_t>(1e18);
  }
  // What snapshots cost as a rule: the median of the last ones, so that a single dear one changes nothing. A new server's first
  // ones are dear because the next standby starts beside them: until more is known, not more than the cap allows for one
  // in each bound.
  uint64_t usual_cost() const {
    std::array<uint64_t, kRemembered> sorted = costs_;
    const size_t known = std::min<size_t>(count_, sorted.size());
    if (known == 0) return 0;
    std::sort(sorted.begin(), sorted.begin() + known);
    const uint64_t median = sorted[(known - 1) / 2];
    return known < kFew ? std::min(median, share_in(bound_)) : median;
  }
  uint64_t share_in(uint64_t time) const { return static_cast<uint64_t>(static_cast<double>(time) * cap_); }
  // `time` pays for `cost`, and with the rest for what is owed.
  void pay(uint64_t time, uint64_t cost) {
    const uint64_t share = share_in(time);
    owed_ -= std::min(owed_, share - std::min(share, cost));
  }
  // What a replay may take. Where the constant part leaves nothing, it is still not worth taking snapshots all the time.
  uint64_t room(const Now& now) const { return std::max(bound_ - std::min(bound_, now.constant), kShortest); }
  bool unbearable(const Now& now) const { return now.replay + now.constant >= kUnbearable * bound_; }
  bool allowed(const Now& now) const {
    if (now.time < not_before_) return false;
    return now.time >= added(last_, wait_) || (unbearable(now) && now.time >= added(last_, wait_ / kWorthOfIt));
  }
  bool wanted(const Now& now) const { return allowed(now) && (now.replay >= room(now) / 2 || now.time >= forced_); }
  uint64_t least_live() const { return std::min(least_, least_before_); }
  bool is_cheap(uint64_t live) const {
    const uint64_t least = least_live();
    return least == kNothing || live <= least + least / 8 + kSmallDifference / 4;
  }

  void begin(uint64_t now, uint64_t first) {
    wait_ = first;
    grace_ = std::min(first / 4, kGrace);
    begin_interval(now);
    forced_ = now + first;
  }
  void begin_interval(uint64_t now) {
    last_ = now;
    look_at_ = not_before_ = 0;
    gave_up_ = 0;
    least_before_ = least_;
    least_ = kNothing;
    most_ = 0;
  }

  const uint64_t bound_;
  const double cap_;
  uint64_t last_ = 0;        // when the last one was taken
  uint64_t wait_ = kFirst;   // until the next one is worth its cost
  uint64_t grace_ = 0;
  uint64_t forced_ = 0;      // due then, whatever a replay takes
  uint64_t not_before_ = 0;  // impossible until then
  uint64_t look_at_ = 0;     // for a good moment
  uint64_t drain_ = 0;       // what the device needs to finish, as a rule
  uint32_t gave_up_ = 0;     // in a row
  uint64_t owed_ = 0;        // what snapshots have cost beyond the usual, and no time has paid for yet
  static constexpr size_t kRemembered = 5, kFew = 3;
  std::array<uint64_t, kRemembered> costs_{};
  size_t count_ = 0;
  uint64_t least_ = kNothing, most_ = 0, least_before_ = kNothing;  // live bytes since the last one; and before it
};

}  // namespace xmig::server
