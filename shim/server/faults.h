// The end of a server whose device has a sticky fault: tell the daemon, exit. Nothing is answered any more; the next
// server does that, after a redo.
#pragma once

#include <cuda.h>

#include <atomic>
#include <functional>
#include <string>

#include "device/device.h"
#include "server/daemon.h"

namespace xmig::server {

inline constexpr int kFaultExit = 70;

class Faults {
 public:
  Faults(device::Device& device, Daemon& daemon);

  // Does this result mean that the context is lost? Then this does not return.
  void check(CUresult result) {
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_NOT_READY) [[unlikely]] check_slowly(result);
  }
  [[noreturn]] void strike(const device::Fault& fault);
  // The name of the operation with this sequence number, for people.
  void name_operations(std::function<std::string(uint64_t)> name);

 private:
  void check_slowly(CUresult result);

  device::Device& device_;
  Daemon& daemon_;
  std::function<std::string(uint64_t)> operation_;
  std::atomic<bool> struck_{false};
};

}  // namespace xmig::server
