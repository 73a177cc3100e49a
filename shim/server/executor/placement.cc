#include "server/executor/placement.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <future>
#include <utility>

#include "journal/futex.h"

namespace xmig::server {
namespace {

constexpr uint32_t kMostFailures = 10;  // after those, 1024 sleeps are spent anywhere before the next try
constexpr uint32_t kGood = 64;          // settled sleeps in a row that make up for a failure; the next is spent anywhere
// What waking it anywhere has to take for it to settle: the other way, too, has its price. What counts for longer was
// something else.
constexpr uint64_t kDear = 30'000, kLongestWakeUp = 100'000, kNoWakeUp = 5'000'000;

constexpr std::chrono::milliseconds kUsherPatience{1};  // with the usher

std::atomic<uint32_t> fetches{0};  // of a process's one executor, ever

bool same(const cpu_set_t& a, const cpu_set_t& b) { return CPU_EQUAL(&a, &b); }

cpu_set_t only(int processor) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(processor, &set);
  return set;
}

cpu_set_t all() {
  cpu_set_t set;
  std::memset(&set, 0xff, sizeof(set));
  return set;
}

bool get(pid_t thread, cpu_set_t& set) {
  CPU_ZERO(&set);
  return ::sched_getaffinity(thread, sizeof(set), &set) == 0;
}
bool set(pid_t thread, const cpu_set_t& set) { return ::sched_setaffinity(thread, sizeof(set), &set) == 0; }

}  // namespace

void Placement::open(journal::JournalHeader& header) {
  header_ = &header;
  executor_ = static_cast<pid_t>(::syscall(SYS_gettid));
  late_ = header.late.load(std::memory_order_relaxed);
  stopping_.store(false);
  get(::getpid(), main_);
  std::promise<pid_t> id;
  const uint32_t seen = header.usher.load(std::memory_order_seq_cst);
  usher_ = std::thread([this, &id, seen] {
    ::pthread_setname_np(::pthread_self(), "usher");
    id.set_value(static_cast<pid_t>(::syscall(SYS_gettid)));
    run_usher(seen);
  });
  usher_id_ = id.get_future().get();
}

void Placement::settle(journal::JournalHeader& header, uint32_t processor) {
  uint32_t asleep = journal::kAsleep;
  bool call = false;
  if (processor != 0 && processor <= CPU_SETSIZE && (usher_.joinable() || wake_up_ >= kDear)) {
    if (!usher_.joinable()) open(header);
    const int wanted = static_cast<int>(processor - 1);
    const std::lock_guard lock(mutex_);
    wish_ = Wish::kNone;
    const uint32_t late = header.late.load(std::memory_order_relaxed);
    if (!settled_ || wanted != processor_ || late != late_) {
      loosen();
      if (may_settle(wanted, late)) {
        call = ::sched_getcpu() != wanted;
        wish_ = call ? Wish::kBind : Wish::kNone;
        settled_ = !call && set(executor_, only(wanted));
      }
    }
    if (settled_) asleep = where();
  } else {
    free();
  }
  bound_ = false;
  header.server_sleeping.store(asleep, std::memory_order_seq_cst);
  if (call) call_usher();
}

bool Placement::may_settle(int processor, uint32_t late) {
  if (late != late_) {
    late_ = late;
    settled_for_ = 0;
    failures_ = std::min(failures_ + 1, kMostFailures);
    anywhere_ = 1u << failures_;
  }
  if (anywhere_ != 0) {
    --anywhere_;
    return false;
  }
  if (wake_up_ < kDear) return false;
  if (++settled_for_ % kGood == 0) {
    if (failures_ != 0) --failures_;
    return false;
  }
  // Where the whole process was bound to the very processor that this thread slept on, woke() could not see it.
  if (cpu_set_t main; get(::getpid(), main) && !same(main, main_)) {
    main_ = main;
    if (processor_ >= 0 && same(main, only(processor_))) set(executor_, main);
  }
  const cpu_set_t before = free_;
  if (!learn() || !CPU_ISSET(processor, &free_) || CPU_COUNT(&free_) < 2) return false;
  if (processor != processor_ || !same(before, free_)) {
    cpu_set_t others = free_;
    CPU_CLR(processor, &others);
    if (!set(usher_id_, others)) return false;
  }
  processor_ = processor;
  return true;
}

// The thread has never been bound, or somebody has changed what it may use. Is that all that its cpuset has, as the usher can
// tell? Then it is to follow the cpuset when that changes, which a thread bound to a list of processors would not.
bool Placement::learn() {
  cpu_set_t now, most;
  if (!get(executor_, now)) return false;
  if (same(now, free_)) return true;
  if (!set(usher_id_, all()) || !get(usher_id_, most)) return false;
  open_ended_ = same(most, now);
  free_ = now;
  return true;
}

void Placement::set_free() {
  set(executor_, open_ended_ ? all() : free_);
  settled_ = false;
}

void Placement::woke(bool rung) {
  if (!usher_.joinable()) return;
  const std::lock_guard lock(mutex_);
  wish_ = Wish::kNone;
  bound_ = settled_ && rung;
  if (!rung) loosen();
}

void Placement::took(uint64_t rung_at, uint64_t heard_at) {
  if (rung_at + kNoWakeUp < heard_at) return;
  const uint64_t counted = heard_at > rung_at ? std::min(heard_at - rung_at, kLongestWakeUp) : 0;
  wake_up_ = wake_up_ == 0 ? counted : (7 * wake_up_ + counted) / 8;
}

void Placement::free() {
  if (!bound_) return;
  bound_ = false;
  const std::lock_guard lock(mutex_);
  loosen();
}

// Unless somebody has bound the thread to something else meanwhile, or the processor has gone: that stays.
void Placement::loosen() {
  if (cpu_set_t now; settled_ && get(executor_, now) && same(now, only(processor_))) set_free();
  settled_ = false;
}

void Placement::leave() {
  const uint32_t before = fetches.load(std::memory_order_seq_cst);
  free();
  {
    const std::lock_guard lock(mutex_);
    wish_ = Wish::kFetch;
  }
  // Until it is there, which this thread would otherwise see in the middle of its work: a thread that it makes would be
  // bound as it is for that moment.
  call_usher();
  journal::futex_wait(fetches, before, kUsherPatience, journal::FutexScope::kPrivate);
  const std::lock_guard lock(mutex_);
  wish_ = Wish::kNone;
}

void Placement::release() {
  const std::lock_guard lock(mutex_);
  wish_ = Wish::kNone;
  loosen();
}

void Placement::call_usher() {
  header_->usher.fetch_add(1, std::memory_order_seq_cst);
  journal::futex_wake(header_->usher);
}

// On the usher's thread, as are the following. The executor sleeps, unless it has just been woken.
void Placement::bind() {
  if (!set(executor_, only(processor_))) return;
  settled_ = true;
  uint32_t expected = journal::kAsleep;
  if (!header_->server_sleeping.compare_exchange_strong(expected, where())) set_free();
}

// To this processor: the kernel has put the usher on one that is free, if there is one. But who is elsewhere than where the
// executor sleeps may have got the usher to where it is itself: there the executor must not come.
void Placement::fetch() {
  cpu_set_t now;
  const bool ours = get(executor_, now) && same(now, settled_ ? only(processor_) : free_);
  const int here = ::sched_getcpu();
  cpu_set_t to = only(here);
  if (settled_ && header_->caller.load(std::memory_order_relaxed) == static_cast<uint32_t>(here) + 1) {
    to = free_;
    CPU_CLR(here, &to);
  }
  if (ours) set(executor_, to);
  if (settled_) journal::futex_wake(header_->doorbell);
  if (ours) set_free();
  settled_ = false;
}

void Placement::run_usher(uint32_t seen) {
  while (!stopping_.load(std::memory_order_seq_cst)) {
    journal::futex_wait(header_->usher, seen, std::chrono::seconds(60));
    const uint32_t rung = header_->usher.load(std::memory_order_seq_cst);
    if (rung == seen) continue;
    seen = rung;
    const std::lock_guard lock(mutex_);
    const Wish wish = std::exchange(wish_, Wish::kNone);
    if (wish == Wish::kBind) {
      bind();
    } else if (wish == Wish::kFetch || (settled_ && header_->heard.load() != header_->doorbell.load())) {
      fetch();
      fetches.fetch_add(1, std::memory_order_seq_cst);
      journal::futex_wake(fetches, 1, journal::FutexScope::kPrivate);
    }
    // Who has woken the usher has woken nobody else. The executor may have been let loose just before it fell asleep.
    if (header_->heard.load() != header_->doorbell.load()) journal::futex_wake(header_->doorbell);
  }
}

void Placement::close() {
  if (!usher_.joinable()) return;
  release();
  stopping_.store(true, std::memory_order_seq_cst);
  call_usher();
  usher_.join();
  bound_ = false;
  processor_ = -1;
}

}  // namespace xmig::server
