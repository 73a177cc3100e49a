// Notices a device that does not get on with its work: a kernel without end.
//
// On a thread of its own, for the executor may be stuck in the driver. It asks how things are and bites when they have
// been the same, with work pending, for as long as the job allows. Time in which this process did not run does not count.
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
  struct Look {
    bool pending;        // is there work that depends on nobody but the device?
    uint64_t signature;  // another whenever the device has come further
  };
  // `look` and `bite` are called from its thread; `bite` need not return.
  Watchdog(std::chrono::nanoseconds patience, std::function<Look()> look, std::function<void()> bite);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;

 private:
  void run();

  const std::chrono::nanoseconds patience_;
  const std::function<Look()> look_;
  const std::function<void()> bite_;
  std::mutex mutex_;
  std::condition_variable stop_;
  bool stopping_ = false;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace xmig::server
