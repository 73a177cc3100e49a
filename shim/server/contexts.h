// One real context per device ordinal, whatever contexts the program makes, on the devices that the program uses.
//
// A context takes device memory, and time when its process ends and when the next one begins. So a device is opened when the program
// makes a context there (xmOpen), and whoever takes the job opens those that are open (JournalHeader::devices_open). Whatever else
// needs one (memory that is placed on a device by its number, access by a peer) opens it, too.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <utility>

#include "device/runtime.h"
#include "journal/layout.h"

namespace xmig::server {

class Contexts {
 public:
  Contexts(device::Runtime& device, uint32_t devices) : device_(device), count_(devices) {}
  ~Contexts() {
    for (uint32_t ordinal = 0; ordinal < count_; ++ordinal) {
      if (is_open(ordinal)) device_.close_context(ordinal);
    }
  }
  Contexts(const Contexts&) = delete;

  // From any thread, which has no current context afterwards if it has opened one. After a failure it may be tried again. Raises
  // Unavailable, too.
  device::Status open(uint32_t ordinal) {
    const std::lock_guard lock(mutex_);
    if (is_open(ordinal)) return {};
    device::ContextHandle context = nullptr;
    current() = nullptr;
    if (const device::Status opened = device_.open_context(ordinal, context); !opened) return opened;
    real_[ordinal] = context;
    if (open_.load() == 0) home_ = ordinal;
    open_.fetch_or(1u << ordinal);
    if (hears_) hears_(ordinal);
    return {};
  }
  // The same with a result for what open() raises.
  device::Status try_open(uint32_t ordinal) {
    try {
      return open(ordinal);
    } catch (const device::Unavailable& error) {
      return device_.status(error.error());
    }
  }
  // Those of the bits. What there is not is not opened.
  device::Status open_all(uint64_t ordinals) {
    for (uint32_t ordinal = 0; ordinal < count_; ++ordinal) {
      if ((ordinals >> ordinal & 1) == 0) continue;
      if (const device::Status opened = open(ordinal); !opened) return opened;
    }
    return {};
  }
  // Called after each that is opened from now on, by the thread that has.
  void hear(std::function<void(uint32_t)> hears) { hears_ = std::move(hears); }

  bool is_open(uint32_t ordinal) const { return ordinal < count_ && (open_.load() >> ordinal & 1) != 0; }
  // A bit for each.
  uint32_t opened() const { return open_.load(); }
  // How many devices there are, open or not.
  uint32_t count() const { return count_; }
  // The first that was opened: for what any context is good for.
  uint32_t home() const { return home_; }
  // Opens it if it is not. Raises Unavailable.
  device::ContextHandle real(uint32_t ordinal) {
    if (!is_open(ordinal)) [[unlikely]] open_or_raise(ordinal);
    return real_[ordinal];
  }
  // Make the ordinal's context the calling thread's current one. Opens it if it is not. Raises Unavailable.
  void use(uint32_t ordinal) {
    const device::ContextHandle context = real(ordinal);
    if (current() == context) return;
    current() = context;
    device_.use(context);
  }

 private:
  static device::ContextHandle& current() {
    thread_local device::ContextHandle one = nullptr;
    return one;
  }
  void open_or_raise(uint32_t ordinal) {
    const device::Status opened = open(ordinal);
    if (!opened) throw device::Unavailable(device_.number_of(opened), "no context on device " + std::to_string(ordinal) + ": " + device_.text(opened));
  }

  device::Runtime& device_;
  const uint32_t count_;
  std::mutex mutex_;
  std::array<device::ContextHandle, journal::kMaxDevices> real_{};  // written before its bit is set, and never again
  std::atomic<uint32_t> open_{0};
  std::atomic<uint32_t> home_{0};
  std::function<void(uint32_t)> hears_;
};

}  // namespace xmig::server
