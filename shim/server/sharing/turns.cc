#include "server/sharing/turns.h"

#include <algorithm>

namespace xmig::server {
namespace {

using sharing::Page;
using sharing::Slot;

constexpr uint64_t kUnknown = 100'000;       // ns, of a kernel that was never seen
constexpr uint64_t kLongest = 1'000'000'000;  // ns, that is believed
constexpr size_t kMostKernels = 4096;        // whose durations are known
constexpr uint64_t kContends = 5'000'000;    // ns in which a best-effort job that has shown no work still has its turn

// A moment that lies ahead is no moment: whoever wrote it would hold others up for ever.
bool recent(const Slot& slot, uint64_t now, uint64_t within) {
  const uint64_t at = slot.busy_at.load(std::memory_order_relaxed);
  return at != 0 && slot.present.load(std::memory_order_relaxed) != 0 && at <= now + within && now <= at + within;
}

uint32_t used(const Page& page) { return std::min(page.header.used.load(std::memory_order_relaxed), sharing::kSlots); }

void add(std::atomic<uint64_t>& count, uint64_t more) {
  count.store(count.load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
}

}  // namespace

bool Turns::take() {
  seen_ = sharing_.changes();
  const SharingClass before = wanted_.as;
  show(false, 0);
  wanted_ = sharing_.wanted();
  held_since_ = 0;
  return wanted_.as != before;
}

void Turns::show(bool busy, uint64_t now) {
  for (const Sharing::Place& place : wanted_.places) {
    if (Slot* const mine = place.mine()) mine->busy_at.store(busy ? now : 0, std::memory_order_relaxed);
  }
}

// The device was observed now and then: a kernel took no longer than it seems, so that the shortest time counts. It grows slowly,
// for kernels whose work grows.
void Turns::reap(uint64_t done, uint64_t now) {
  while (!given_.empty() && given_.front().sequence <= done) {
    const Given& first = given_.front();
    const uint64_t began = std::max(first.at, done_at_);
    const uint64_t took = std::min(now > began ? now - began : 0, kLongest);
    if (durations_.size() >= kMostKernels) durations_.clear();
    const auto [known, fresh] = durations_.try_emplace(first.kernel, took);
    if (!fresh) known->second = std::min(took, known->second + known->second / 16 + 1);
    given_ns_ -= first.estimate;
    given_.pop_front();
    done_at_ = now;
  }
}

uint64_t Turns::estimate(uint64_t kernel) const {
  const auto found = durations_.find(kernel);
  return found == durations_.end() ? kUnknown : found->second;
}

// One kernel is always given, however long it takes.
bool Turns::has_room(uint64_t kernel) const {
  if (given_.empty()) return true;
  return given_.size() < wanted_.backlog && given_ns_ + estimate(kernel) <= wanted_.backlog_ns;
}

// How long a kernel may wait for the others, ns; 0: not at all. `bounded`: there are others.
uint64_t Turns::wait_for(const Sharing::Place& place, uint64_t now, bool& bounded) const {
  const Page& critical = Sharing::Place::page(*place.critical);
  bool busy = false;
  for (uint32_t i = 0; i < used(critical); ++i) {
    bounded |= critical.slots[i].present.load(std::memory_order_relaxed) != 0;
    busy |= recent(critical.slots[i], now, sharing::kStale);
  }
  if (busy) return wanted_.longest_wait;
  const Page& all = Sharing::Place::page(*place.own);
  uint64_t contenders = 0, index = 0;
  for (uint32_t i = 0; i < used(all); ++i) {
    if (i != place.slot && !recent(all.slots[i], now, kContends)) continue;
    if (i == place.slot) index = contenders;
    ++contenders;
  }
  if (contenders < 2) return 0;
  bounded = true;
  return now / wanted_.slice % contenders == index ? 0 : wanted_.longest_wait;
}

bool Turns::admits(uint32_t ordinal, uint64_t sequence, uint64_t kernel, uint64_t done, uint64_t now) {
  reap(done, now);
  const Sharing::Place& place = wanted_.places[ordinal];
  Slot* const mine = place.mine();
  if (!mine) return true;
  mine->busy_at.store(now, std::memory_order_relaxed);
  bool bounded = false;
  uint64_t patience = wait_for(place, now, bounded);
  if (bounded && !has_room(kernel)) patience = wanted_.longest_wait;
  if (patience != 0 && (held_since_ == 0 || now - held_since_ < patience)) {
    if (held_since_ == 0) held_since_ = now;
    return false;
  }
  if (held_since_ != 0) {
    add(mine->held, 1);
    add(mine->held_ns, now - held_since_);
    if (patience != 0) add(mine->overdue, 1);
    held_since_ = 0;
  }
  if (bounded) {
    const uint64_t expected = estimate(kernel);
    given_.push_back({sequence, kernel, now, expected});
    given_ns_ += expected;
  } else {
    given_.clear();
    given_ns_ = 0;
  }
  return true;
}

}  // namespace xmig::server
