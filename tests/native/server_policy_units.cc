// When to take a snapshot, from times that are given: no clock, and no device.
#include <algorithm>
#include <random>

#include "check.h"
#include "device/device.h"
#include "server/migration/pace.h"
#include "server/snapshot/snapshot_policy.h"
#include "server/snapshot/stall.h"

namespace {

using namespace xmig;
using namespace xmig::server;

constexpr uint64_t kMs = 1'000'000;

// A device that works all the time, so that the replay grows with time; no memory, and nothing constant.
SnapshotPolicy::Now working(uint64_t time, uint64_t since) { return {time, time - since, 0, true, 0}; }

// It has taken many that cost as much, one after the other: nothing is owed any more.
SnapshotPolicy settled(uint64_t cost) {
  SnapshotPolicy policy(200 * kMs, 0.01);
  policy.start(0);
  for (int i = 0; i < 40; ++i) policy.taken(0, cost, 0);
  return policy;
}

void policy() {
  SnapshotPolicy first(200 * kMs, 0.01);
  first.start(1000 * kMs);
  CHECK(!first.due(working(1000 * kMs, 1000 * kMs)) && first.due(working(1020 * kMs, 1000 * kMs)));
  CHECK(first.overdue(working(1025 * kMs, 1000 * kMs)));
  const SnapshotPolicy dear = settled(6 * kMs);  // 6 ms at 1 %: every 600 ms, although the stall is beyond its bound by then
  CHECK(!dear.due(working(599 * kMs, 0)) && dear.due(working(600 * kMs, 0)));
  CHECK(!dear.overdue(working(699 * kMs, 0)) && dear.overdue(working(700 * kMs, 0)));
  // But not beyond five bounds, for which four times the cap may be spent.
  const SnapshotPolicy dearer = settled(20 * kMs), dearest = settled(100 * kMs);
  CHECK(!dearer.overdue(working(999 * kMs, 0)) && dearer.overdue(working(1000 * kMs, 0)));
  CHECK(!dearest.overdue(working(2'499 * kMs, 0)) && dearest.overdue(working(2'500 * kMs, 0)));
  SnapshotPolicy policy = settled(kMs);  // every 100 ms, as far as the cap goes: the bound decides
  CHECK(!policy.due(working(99 * kMs, 0)) && policy.due(working(100 * kMs, 0)));
  CHECK(!policy.overdue(working(199 * kMs, 0)) && policy.overdue(working(200 * kMs, 0)));
  // What was done while the device rested for most of the time is replayed quickly.
  CHECK(!policy.due({900 * kMs, 99 * kMs, 0, false, 0}) && policy.due({900 * kMs, 100 * kMs, 0, false, 0}));
  CHECK(policy.due({1'000 * kMs, 1, 0, false, 0}));  // once a second in any case
  // The constant part of a recovery belongs to the stall.
  CHECK(policy.due({300 * kMs, 60 * kMs, 80 * kMs, true, 0}) && !policy.due({300 * kMs, 59 * kMs, 80 * kMs, true, 0}));
  CHECK(policy.overdue({300 * kMs, 120 * kMs, 80 * kMs, true, 0}) && !policy.overdue({300 * kMs, 119 * kMs, 80 * kMs, true, 0}));
  CHECK(!policy.overdue({300 * kMs, 49 * kMs, 999 * kMs, true, 0}));  // where nothing is left of the bound
  for (uint64_t now = 100 * kMs; now < 200 * kMs; now += kMs) {      // no good moment comes
    CHECK(policy.due(working(now, 0)) && !policy.overdue(working(now, 0)));
    policy.busy(now);
    CHECK(!policy.due(working(now + 1000, 0)));
  }
  CHECK(policy.overdue(working(200 * kMs, 0)));
  policy.taken(0, 10, 0);  // never more often than this
  CHECK(!policy.due({49 * kMs, 300 * kMs, 0, true, 0}) && policy.due({50 * kMs, 300 * kMs, 0, true, 0}));
  // Whoever sleeps is woken in time.
  CHECK(policy.due_at({60 * kMs, 40 * kMs, 0, true, 0}) == 120 * kMs);
  CHECK(policy.due_at({60 * kMs, 40 * kMs, 0, false, 0}) == 1'000 * kMs && policy.due_at({10, 0, 300 * kMs, true, 0}) >= 50 * kMs);
  CHECK(SnapshotPolicy::needs_room(75, 1, 100, false, false) && !SnapshotPolicy::needs_room(74, 74, 100, false, false));
  CHECK(SnapshotPolicy::needs_room(50, 25, 100, true, false) && SnapshotPolicy::needs_room(50, 1, 100, true, true));
  CHECK(!SnapshotPolicy::needs_room(100, 0, 100, true, true));
}

// A single dear one is paid for bit by bit: the next comes a quarter later than it would have, and so do those after it.
void policy_owes() {
  const auto due_after = [](const SnapshotPolicy& policy, uint64_t since) {
    uint64_t ms = 0;
    while (!policy.due(working(since + ms * kMs, since))) ++ms;
    return ms;
  };
  SnapshotPolicy policy = settled(2 * kMs);
  CHECK(due_after(policy, 0) == 200);
  uint64_t now = 1'000 * kMs;
  policy.taken(now, 2 * kMs, 0);
  policy.taken(now, 12 * kMs, 0);  // 10 more than usual: 20 intervals of 250 ms
  for (int i = 0; i < 20; ++i) {
    CHECK(due_after(policy, now) == 250);
    now += 250 * kMs;
    policy.taken(now, 2 * kMs, 0);
  }
  CHECK(due_after(policy, now) == 200);
  // Time in which there was none pays, too.
  policy.taken(now, 12 * kMs, 0);
  CHECK(due_after(policy, now) == 250);
  now += 1'250 * kMs;
  policy.taken(now, 2 * kMs, 0);
  CHECK(due_after(policy, now) == 200);
  // More than 20 ms is paid at once, but not for longer than a second.
  policy.taken(now, 28 * kMs, 0);
  CHECK(due_after(policy, now) == 800);
  SnapshotPolicy patient = settled(2 * kMs);
  patient.taken(0, 500 * kMs, 0);
  CHECK(due_after(patient, 0) == 1'000);
  // Those of a new server, beside which the next standby starts, say little of the usual.
  SnapshotPolicy fresh(200 * kMs, 0.01);
  fresh.start(0);
  fresh.taken(0, 0, 0);  // of the first one nothing is known
  CHECK(due_after(fresh, 0) == 100);
  fresh.taken(0, 6 * kMs, 0);
  CHECK(due_after(fresh, 0) == 250);
  fresh.taken(0, 6 * kMs, 0);
  CHECK(due_after(fresh, 0) == 250);
  fresh.taken(0, 6 * kMs, 0);
  CHECK(due_after(fresh, 0) == 750);
}

// A program that needs its memory within a step gets its snapshots where it does not.
void cheap_positions() {
  SnapshotPolicy policy(200 * kMs, 0.01);
  policy.start(0);
  policy.taken(0, kMs, 0);
  const auto live_at = [](uint64_t ms) { return ms % 30 < 2 ? 2ull << 30 : 8ull << 30; };
  uint64_t taken_at = 0;
  for (uint64_t ms = 1; ms < 200 && taken_at == 0; ++ms) {
    policy.saw(live_at(ms));
    const SnapshotPolicy::Now now{ms * kMs, ms * kMs, 0, true, live_at(ms)};
    CHECK(!policy.overdue(now));
    if (policy.due_here(now)) taken_at = ms;
  }
  CHECK(taken_at == 120);  // half of the bound, and then the end of a step
  // Idle moments are no better.
  CHECK(!policy.due({140 * kMs, 140 * kMs, 0, true, 8ull << 30}) && policy.due({140 * kMs, 140 * kMs, 0, true, 2ull << 30}));
  // Where memory does not differ there is nothing to wait for, and no reason to stop a device that works.
  SnapshotPolicy level(200 * kMs, 0.01);
  level.start(0);
  level.taken(0, kMs, 0);
  level.saw(8ull << 30);
  CHECK(!level.due_here({150 * kMs, 150 * kMs, 0, true, 8ull << 30}) && level.due({150 * kMs, 150 * kMs, 0, true, 8ull << 30}));
}

// Whatever costs what, and whatever fails: nothing postpones the next snapshot by more than a second, and where the cap allows it
// the expected stall stays below the bound.
void policy_holds() {
  std::mt19937_64 chance(7);
  const auto between = [&](uint64_t low, uint64_t high) { return low + chance() % (high - low + 1); };
  for (int run = 0; run < 300; ++run) {
    const uint64_t bound = between(100, 1000) * kMs;
    const double cap = static_cast<double>(between(2, 40)) / 1000;
    const uint64_t constant = between(0, 60) * kMs, usual = between(50, 5'000) * 1000;
    const bool rests = run % 3 == 0, gives_up = run % 2 == 0;
    SnapshotPolicy policy(bound, cap);
    uint64_t now = 1000 * kMs, replay = 0, stopped = 0, spent = 0, snapshots = 0;
    policy.start(now);
    const uint64_t share = std::max(static_cast<uint64_t>(static_cast<double>(usual) / cap), 50 * kMs);
    const uint64_t room = std::max(bound - constant, 50 * kMs);
    uint64_t latest = now + 1'000 * kMs;   // for the next one to be overdue
    uint64_t excused = now + 2'000 * kMs;  // until then a dear snapshot, a give-up or the beginning explains a long stall
    const uint64_t began = now, end = now + 30'000 * kMs;
    uint64_t dear = 0, patience = 0;
    while (now < end) {
      now += kMs;
      replay += kMs;
      const SnapshotPolicy::Now known{now, replay, constant, true, 0};
      if (stopped == 0) {
        const bool idle = rests && chance() % 10 == 0;
        const bool overdue = policy.overdue(known);
        if (!overdue) CHECK(now <= latest);
        if (!(idle && policy.due(known)) && !overdue) continue;
        stopped = now;
        patience = policy.patience(now);
        CHECK(patience >= 150 * kMs && patience <= 1'000 * kMs);
      }
      if (gives_up && chance() % 100 != 0) {
        if (now - stopped < patience) continue;
        policy.gave_up(now, now - stopped);
        stopped = 0;
        latest = now + 1'000 * kMs;
        excused = now + 2'000 * kMs;
        continue;
      }
      const bool at_once = stopped == now;  // what the device needs to finish comes on top, until it is known
      if (at_once && now > excused && share + share / 4 < room / 2) CHECK(replay <= room);
      const bool outlier = ++snapshots % 17 == 0;
      const uint64_t cost = outlier ? between(20, 400) * kMs : usual;
      now += cost;
      if (outlier) {
        excused = now + 2'000 * kMs;
        dear += cost;
      } else {
        spent += cost;
      }
      policy.taken(now, cost, now - stopped - cost);
      // As the cap or the bound alone would have it, a quarter more for what is owed, and a second for one that was dear.
      latest = now + std::max(share + share / 4 + std::min(share / 4, 100 * kMs), room) + (outlier ? 1'000 * kMs : kMs);
      replay = 0;
      stopped = 0;
    }
    // What snapshots cost as a rule stays within the cap.
    CHECK(static_cast<double>(spent) <= 1.1 * cap * static_cast<double>(now - began) + 2.0 * static_cast<double>(usual) ||
          share * 4 > 5 * bound);
    CHECK(snapshots > 5 && dear < now);
  }
}

// The expected stall: what is counted, what is learnt, and what a program that writes into the header can do.
void stall() {
  journal::StallWords words{};
  Stall one(40 * kMs);
  one.start(words, 200 * kMs, 1'000 * kMs);
  CHECK(one.expected() == 40 * kMs && words.bound == 200 * kMs && words.reported_at == 1'000 * kMs && words.working == 0);
  one.passed(1'010 * kMs, true, true);  // the executor has worked
  one.passed(1'050 * kMs, false, true);  // the device has
  one.slept(1'060 * kMs);                // still
  CHECK(one.replay() == 60 * kMs && words.working == 1 && words.replay == 60 * kMs);
  one.passed(1'061 * kMs, false, false);  // it is found idle
  one.passed(1'500 * kMs, false, false);
  one.slept(3'000 * kMs);
  CHECK(one.replay() == 61 * kMs && words.working == 0 && words.reported_at == 3'000 * kMs);
  one.passed(3'001 * kMs, true, true);
  CHECK(one.expected() == 102 * kMs);
  one.snapshot(3'010 * kMs, 5 * kMs);
  CHECK(one.expected() == 40 * kMs && words.peak == 102 * kMs && words.spent == 5 * kMs && words.working == 0);
  one.passed(3'110 * kMs, true, true);
  CHECK(words.replay == 100 * kMs && words.working == 1);

  // It dies. 80 ms later its memory is back, and the replay takes half as long as the work did.
  Stall two(40 * kMs);
  two.start_replay(words, 200 * kMs, 3'190 * kMs);
  CHECK(two.constant() == 80 * kMs && two.replay() == 100 * kMs && words.spent == 5 * kMs);
  two.passed(3'240 * kMs, true, true);
  CHECK(two.replay() == 100 * kMs && words.working == 0);  // a server that dies now leaves all of it to do
  two.replayed(3'240 * kMs);
  CHECK(words.correction == 750 && two.replay() == 75 * kMs);
  two.passed(3'280 * kMs, true, true);
  CHECK(two.replay() == 105 * kMs && two.expected() == 185 * kMs);
  // Once more, after 40 ms: the mean of both.
  Stall three(40 * kMs);
  three.start_replay(words, 200 * kMs, 3'320 * kMs);
  CHECK(three.constant() == 60 * kMs);
  three.passed(3'380 * kMs, true, true);
  three.snapshot(3'390 * kMs, 10 * kMs);  // in the replay: what is left of it
  CHECK(words.replay == 80 * kMs && words.spent == 15 * kMs);
  three.passed(3'440 * kMs, true, true);
  three.replayed(3'440 * kMs);
  CHECK(words.correction == (750 + 110'000 / 140) / 2);

  // It was drained and stood still: no time that comes again.
  three.passed(3'450 * kMs, true, true);
  const uint64_t before = three.replay();
  three.rested(4'000 * kMs);
  CHECK(three.replay() == before && words.working == 0);
  // It dies while nothing happens: nobody knows when, and nothing is learnt from it.
  three.passed(4'500 * kMs, false, false);
  Stall four(40 * kMs);
  four.start_replay(words, 200 * kMs, 9'000 * kMs);
  CHECK(four.constant() == 60 * kMs && four.replay() > 0);
  // It dies in a snapshot, and the device's memory is its content: nothing is to be done again.
  Stall in_snapshot(40 * kMs);
  in_snapshot.start_replay(words, 200 * kMs, 9'000 * kMs, false);
  CHECK(in_snapshot.replay() == 0 && words.replay == 0);

  // The program has written there.
  for (auto* word : {&words.reported_at, &words.working, &words.replay, &words.correction, &words.constant, &words.spent,
                     &words.recoveries}) {
    *word = ~0ull;
  }
  Stall five(40 * kMs);
  five.start_replay(words, 200 * kMs, 9'000 * kMs);
  five.passed(9'001 * kMs, true, true);
  five.replayed(9'002 * kMs);
  CHECK(five.constant() <= 2'000 * kMs && five.replay() <= 8 * 3'600'000 * kMs && five.expected() >= five.replay());
}

// Pieces are as large as fits into their time, and get there from a small one.
void pace() {
  const auto settled = [](uint64_t ns_each) {
    Pace pace(10'000'000, 256);
    for (int i = 0; i < 10; ++i) pace.took(pace.size(), pace.size() * ns_each);
    return pace.size();
  };
  CHECK(settled(100'000) == 100);
  CHECK(settled(1'000'000) == 10);
  CHECK(settled(0) == 256 && settled(1) == 256);
  CHECK(settled(1'000'000'000) == 4);
  Pace pace(10'000'000, 256);
  const size_t first = pace.size();
  CHECK(first < 256);
  pace.took(first - 1, 1'000'000'000);
  CHECK(pace.size() == first);
  pace.took(first, 0);
  CHECK(pace.size() == 2 * first);
}

}  // namespace

int main() {
  policy();
  cheap_positions();
  policy_owes();
  policy_holds();
  stall();
  pace();
  return 0;
}
