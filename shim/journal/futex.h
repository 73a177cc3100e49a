// Sleeping on a word of memory, and spinning for a moment before it comes to that.
//
// Every sleep has a time limit: whoever sleeps looks, when it ends, whether the other side still lives.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdint>

namespace xmig::journal {

// kShared: the word lies in memory that processes share.
enum class FutexScope { kPrivate, kShared };

// Sleep while `word` is `expected`, at most `timeout`. False: the time is up. True: woken, changed or interrupted; the
// caller looks again in any case.
inline bool futex_wait(const std::atomic<uint32_t>& word, uint32_t expected, std::chrono::nanoseconds timeout,
                       FutexScope scope = FutexScope::kShared) {
  const timespec limit{static_cast<time_t>(timeout.count() / 1'000'000'000),
                       static_cast<long>(timeout.count() % 1'000'000'000)};
  const int op = FUTEX_WAIT | (scope == FutexScope::kPrivate ? FUTEX_PRIVATE_FLAG : 0);
  return ::syscall(SYS_futex, &word, op, expected, &limit, nullptr, 0) == 0 || errno != ETIMEDOUT;
}

inline void futex_wake(const std::atomic<uint32_t>& word, int count = INT_MAX,
                       FutexScope scope = FutexScope::kShared) {
  const int op = FUTEX_WAKE | (scope == FutexScope::kPrivate ? FUTEX_PRIVATE_FLAG : 0);
  ::syscall(SYS_futex, &word, op, count, nullptr, nullptr, 0);
}

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// How many processors this process may use; 0: the system does not say.
inline int processors() {
  static const int count = [] {
    cpu_set_t cpus;
    return ::sched_getaffinity(0, sizeof(cpus), &cpus) == 0 ? CPU_COUNT(&cpus) : 0;
  }();
  return count;
}
// Can the other side run while this one spins?
inline bool spinning_helps() { return processors() != 1; }
// May one thread keep a processor busy without being missed? While it waits for something that ends by itself, as the
// genuine driver does, and a moment after it had work, because being woken takes long.
inline bool processors_to_spare() { return processors() >= 8; }

// Spin until `done()`, at most `limit`. Returns the last done(). Yields now and then: where processors share no cache,
// Linux wakes the other side on the very processor that spins.
template <typename Done>
bool spin_until(Done&& done, std::chrono::nanoseconds limit) {
  if (!spinning_helps()) return done();
  const auto end = std::chrono::steady_clock::now() + limit;
  do {
    for (int i = 0; i < 32; ++i) {
      if (done()) return true;
      cpu_relax();
    }
    ::sched_yield();
  } while (std::chrono::steady_clock::now() < end);
  return done();
}

}  // namespace xmig::journal
