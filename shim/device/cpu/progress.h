// Waiting for work to complete: spin for a moment, then sleep until something has changed.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace xmig::device::cpu {

inline constexpr std::chrono::microseconds kSpin{20};

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// True as soon as `ready()` is, within the spinning time.
template <typename Ready>
bool spin(Ready&& ready) {
  static const bool alone = std::thread::hardware_concurrency() < 2;
  if (ready()) return true;
  if (alone) return false;
  const auto until = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      relax();
    }
    std::this_thread::yield();  // on a busy machine, whom we wait for may need this very core
  } while (std::chrono::steady_clock::now() < until);
  return ready();
}

// One place where everybody waits who waits for a stream, whichever device it belongs to: an event of one context may
// be awaited in another. Workers say changed() after every piece of work; it costs a load while nobody sleeps.
class Progress {
 public:
  static Progress& instance() {
    static Progress* const progress = new Progress;  // for ever: threads that nobody joins may say something at the very end
    return *progress;
  }

  // What `ready` reads must have been written before, with sequential consistency.
  void changed() {
    if (sleepers_.load() == 0) return;
    const std::lock_guard lock(mutex_);
    condition_.notify_all();
  }

  template <typename Ready>
  void wait(Ready&& ready, bool spinning = true) {
    if (spinning ? spin(ready) : ready()) return;
    std::unique_lock lock(mutex_);
    ++sleepers_;
    condition_.wait(lock, ready);
    --sleepers_;
  }

  // For what changes without anybody saying so: memory that another process may write.
  template <typename Ready>
  void poll(Ready&& ready) {
    if (spin(ready)) return;
    std::unique_lock lock(mutex_);
    ++sleepers_;
    for (auto pause = std::chrono::microseconds(50); !ready();
         pause = std::min<std::chrono::microseconds>(pause * 2, std::chrono::milliseconds(2)))
      condition_.wait_for(lock, pause);
    --sleepers_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable condition_;
  std::atomic<int> sleepers_{0};
};

}  // namespace xmig::device::cpu
