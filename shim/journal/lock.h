// A lock within one process that is held for some hundred nanoseconds by threads that launch kernels all the time: it costs
// two atomic operations when nobody else wants it, spins for a moment when somebody does, and then sleeps.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "journal/futex.h"

namespace xmig::journal {

class Lock {
 public:
  void lock() {
    uint32_t free = kFree;
    if (!word_.compare_exchange_strong(free, kHeld, std::memory_order_acquire)) [[unlikely]] lock_slowly();
  }
  void unlock() {
    if (word_.exchange(kFree, std::memory_order_release) == kWanted) [[unlikely]] {
      futex_wake(word_, 1, FutexScope::kPrivate);
    }
  }

 private:
  enum : uint32_t { kFree, kHeld, kWanted };  // kWanted: held, and somebody sleeps

  [[gnu::noinline]] void lock_slowly() {
    const int spins = spinning_helps() ? 200 : 0;
    for (int i = 0; i < spins; ++i) {
      uint32_t free = kFree;
      if (word_.load(std::memory_order_relaxed) == kFree &&
          word_.compare_exchange_weak(free, kHeld, std::memory_order_acquire)) {
        return;
      }
      cpu_relax();
    }
    while (word_.exchange(kWanted, std::memory_order_acquire) != kFree) {
      futex_wait(word_, kWanted, std::chrono::seconds(1), FutexScope::kPrivate);
    }
  }

  std::atomic<uint32_t> word_{kFree};
};

}  // namespace xmig::journal
