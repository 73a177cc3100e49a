// One real context per device ordinal, whatever contexts the program makes.
#pragma once

#include <cstdint>
#include <vector>

#include "device/runtime.h"

namespace xmig::server {

class Contexts {
 public:
  Contexts(device::Runtime& device, uint32_t devices) : device_(device), count_(devices) {}
  ~Contexts() {
    for (uint32_t ordinal = 0; ordinal < real_.size(); ++ordinal) device_.close_context(ordinal);
  }
  Contexts(const Contexts&) = delete;

  // Those that are not open yet. After a failure it may be tried again. Raises Unavailable, too.
  device::Status open() {
    for (uint32_t ordinal = static_cast<uint32_t>(real_.size()); ordinal < count_; ++ordinal) {
      device::ContextHandle context = nullptr;
      if (const device::Status opened = device_.open_context(ordinal, context); !opened) return opened;
      real_.push_back(context);
    }
    return {};
  }
  // All of them; until then nothing below may be called.
  bool opened() const { return real_.size() == count_; }
  // How many there are, open or not.
  uint32_t count() const { return count_; }
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
  const uint32_t count_;
  std::vector<device::ContextHandle> real_;
};

}  // namespace xmig::server
