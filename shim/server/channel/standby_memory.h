// Device memory that communicators take which servers have made ahead (cuda/objects/prepared_communicators.h), of this process and of
// others on its devices. It is there for a recovery; a program that has no room for its own data gets it.
//
// The executor's thread asks the daemon and waits here; the control thread brings what it answers.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "server/channel/daemon.h"

namespace xmig::server {

class StandbyMemory {
 public:
  explicit StandbyMemory(Daemon& daemon) : daemon_(daemon) {}
  StandbyMemory(const StandbyMemory&) = delete;

  // The program lacks so many bytes of this device. Waits for the daemon. What comes free in a moment, about; 0: nothing does.
  uint64_t give_up(uint32_t ordinal, uint64_t missing) {
    std::unique_lock lock(mutex_);
    const uint64_t number = ++wanted_;
    lock.unlock();
    if (!daemon_.attached()) return 0;
    daemon_.memory_short(number, ordinal, missing);
    lock.lock();
    return changed_.wait_for(lock, kPatience, [&] { return answered_ == number; }) ? given_up_ : 0;
  }

  // The control thread.
  void given_up(uint64_t number, uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    answered_ = number;
    given_up_ = bytes;
    changed_.notify_all();
  }
  // The daemon has gone: nobody answers.
  void gone() {
    const std::lock_guard lock(mutex_);
    answered_ = wanted_;
    given_up_ = 0;
    changed_.notify_all();
  }

 private:
  static constexpr std::chrono::seconds kPatience{5};  // with a daemon, or a machine, that is busy

  Daemon& daemon_;
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t wanted_ = 0, answered_ = 0;  // guarded by mutex_, as is all that follows: numbers of questions
  uint64_t given_up_ = 0;
};

}  // namespace xmig::server
