// One real context per device ordinal, whatever contexts the program makes.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <vector>

#include "driver_table.h"

namespace xmig::server {

class Contexts {
 public:
  explicit Contexts(const DriverTable& driver) : driver_(driver) {}
  ~Contexts() {
    for (uint32_t ordinal = 0; ordinal < real_.size(); ++ordinal) driver_.cuDevicePrimaryCtxRelease_v2(device(ordinal));
  }
  Contexts(const Contexts&) = delete;

  CUresult open(uint32_t devices) {
    for (uint32_t ordinal = 0; ordinal < devices; ++ordinal) {
      CUcontext context = nullptr;
      const CUresult result = driver_.cuDevicePrimaryCtxRetain(&context, device(ordinal));
      if (result != CUDA_SUCCESS) return result;
      real_.push_back(context);
    }
    return CUDA_SUCCESS;
  }
  CUcontext context(uint32_t ordinal) const { return real_[ordinal]; }
  uint32_t count() const { return static_cast<uint32_t>(real_.size()); }
  CUcontext real(uint32_t ordinal) const { return real_[ordinal]; }
  // Make the ordinal's context the calling thread's current one.
  void use(uint32_t ordinal) {
    thread_local CUcontext current = nullptr;
    if (current == real_[ordinal]) return;
    current = real_[ordinal];
    driver_.cuCtxSetCurrent(current);
  }

 private:
  CUdevice device(uint32_t ordinal) const {
    CUdevice device = 0;
    driver_.cuDeviceGet(&device, static_cast<int>(ordinal));
    return device;
  }

  const DriverTable& driver_;
  std::vector<CUcontext> real_;
};

}  // namespace xmig::server
