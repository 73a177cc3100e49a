// The end of a server whose device has a sticky fault: tell the daemon, exit. Nothing is answered any more; the next
// server does that, after a replay.
//
// What lies in this folder: faults, watchdog (a device that does not come back counts as one), injector (faults on purpose).
#pragma once

#include <cuda.h>

#include <atomic>
#include <functional>
#include <string>

#include "device/device.h"
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
  Faults(device::Device& device, Daemon& daemon);

  // Does this result mean that the context is lost? Then this does not return.
  void check(CUresult result) {
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_NOT_READY) [[unlikely]] check_slowly(result);
  }
  // The device has failed at something that cannot fail. If it has no fault that says why, this is one.
  [[noreturn]] void give_up(uint64_t sequence, const char* text);
  [[noreturn]] void raise(device::Fault fault);
  // Who knows what is executed; nobody (nullptr) before and after.
  void hear(const Witness* witness) { witness_ = witness; }

 private:
  void check_slowly(CUresult result);

  device::Device& device_;
  Daemon& daemon_;
  std::atomic<const Witness*> witness_{nullptr};
  std::atomic<bool> raised_{false};
};

}  // namespace xmig::server
