// The end of a server whose device has a sticky fault: tell the daemon, exit. Nothing is answered any more; the next
// server does that, after a replay.
//
// What lies in this folder: faults, watchdog (a device that does not come back counts as one), injector (faults on purpose).
#pragma once

#include <atomic>
#include <functional>
#include <string>

#include "device/runtime.h"
#include "server/channel/daemon.h"

namespace xmig::server {

inline constexpr int kFaultExit = 70;

// Answers from any thread while the executor works.
class Witness {
 public:
  virtual ~Witness() = default;
  // The name of the operation with this sequence number, for people.
  virtual std::string operation(uint64_t sequence) const = 0;
  // Whose work a fault is that the device itself cannot place.
  virtual Culprit culprit() const = 0;
};

class Faults {
 public:
  Faults(device::Runtime& device, Daemon& daemon);

  // Does this result mean that the context is lost? Then this does not return.
  // `result`: the vendor's number; 0 is success.
  void check(int result) {
    if (result != 0 && result != not_ready_) [[unlikely]] check_slowly(result);
  }
  void check(device::Status status) { check(status.number()); }
  // The device has failed at something that cannot fail. If it has no fault that says why, this is one.
  [[noreturn]] void give_up(uint64_t sequence, const char* text);
  [[noreturn]] void raise(device::Fault fault);
  // Who knows what is executed; nobody (nullptr) before and after.
  void hear(const Witness* witness) { witness_ = witness; }

 private:
  void check_slowly(int result);

  device::Runtime& device_;
  const int not_ready_;
  Daemon& daemon_;
  std::atomic<const Witness*> witness_{nullptr};
  std::atomic<bool> raised_{false};
};

}  // namespace xmig::server
