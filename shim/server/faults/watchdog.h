// Notices a device that does not get on with its work: a kernel without end.
//
// On a thread of its own, for the executor may be stuck in the driver. It asks how things are and bites when they have
// been the same, with work pending, for as long as the job allows. Where that work may wait for other ranks, it does not bite but
// reports: who hangs is known only from all of them. Time in which this process did not run does not count.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>

namespace xmig::server {

class Watchdog {
 public:
  // On what pending work depends that gets no further. kNothing: there is none, or it may wait as long as it likes.
  enum class On { kNothing, kDevice, kRanks };
  struct Look {
    On on;
    uint64_t signature;  // another whenever the device has come further
  };
  // All are called from its thread; `bite` need not return. `stuck`: whenever it begins or ends that ranks are waited for without
  // progress.
  Watchdog(std::chrono::nanoseconds patience, std::function<Look()> look, std::function<void()> bite, std::function<void(bool)> stuck);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;

 private:
  void run();

  const std::chrono::nanoseconds patience_;
  const std::function<Look()> look_;
  const std::function<void()> bite_;
  const std::function<void(bool)> stuck_;
  std::mutex mutex_;
  std::condition_variable stop_;
  bool stopping_ = false;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace xmig::server
