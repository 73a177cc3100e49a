// Faults that tests and `xmigctl fault inject` ask for, waiting for their moment.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>
#include <vector>

#include "device/device.h"

namespace xmig::device::cpu {

struct ArmedInjection {
  Injection injection;
  Device::Notify notify;
  void* user;
};

class Injections {
 public:
  void arm(const Injection& injection, Device::Notify notify, void* user) {
    const std::lock_guard lock(mutex_);
    armed_.push_back({injection, notify, user});
    count_.store(armed_.size(), std::memory_order_release);
  }

  // The injection for this piece of work, if there is one. Each is injected once.
  std::optional<ArmedInjection> take(InjectPoint point, uint64_t sequence) {
    if (count_.load(std::memory_order_acquire) == 0) return std::nullopt;
    const std::lock_guard lock(mutex_);
    for (auto it = armed_.begin(); it != armed_.end(); ++it) {
      if (it->injection.point != point || sequence < it->injection.sequence) continue;
      const ArmedInjection found = *it;
      armed_.erase(it);
      count_.store(armed_.size(), std::memory_order_release);
      return found;
    }
    return std::nullopt;
  }

 private:
  std::atomic<size_t> count_{0};
  std::mutex mutex_;
  std::vector<ArmedInjection> armed_;
};

}  // namespace xmig::device::cpu
