// One real context per device ordinal, whatever contexts the program makes.
#pragma once

#include <cstdint>
#include <vector>

#include "device/runtime.h"

namespace xmig::server {

class Contexts {
 public:
  explicit Contexts(device::Runtime& device) : device_(device) {}
  ~Contexts() {
    for (uint32_t ordinal = 0; ordinal < real_.size(); ++ordinal) device_.close_context(ordinal);
  }
  Contexts(const Contexts&) = delete;

  device::Status open(uint32_t devices) {
    for (uint32_t ordinal = 0; ordinal < devices; ++ordinal) {
      device::ContextHandle context = nullptr;
      if (const device::Status opened = device_.open_context(ordinal, context); !opened) return opened;
      real_.push_back(context);
    }
    return {};
  }
  uint32_t count() const { return static_cast<uint32_t>(real_.size()); }
  device::ContextHandle real(uint32_t ordinal) const { return real_[ordinal]; }
  // Make the ordinal's context the calling thread's current one.
  void use(uint32_t ordinal) {
    thread_local device::ContextHandle current = nullptr;
    if (current == real_[ordinal]) return;
    current = real_[ordinal];
    device_.use(current);
  }

 private:
  device::Runtime& device_;
  std::vector<device::ContextHandle> real_;
};

}  // namespace xmig::server
