// Buffers that a replay copies to what the program has already: known to the device, so that such a copy is as
// asynchronous as the one that it repeats.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "device/runtime.h"
#include "journal/layout.h"
#include "journal/mapping.h"

namespace xmig::server {

inline constexpr size_t kScratchBytes = journal::kStagingBytes;  // no single copy to the host is longer

class ScratchPool {
 public:
  explicit ScratchPool(device::Runtime& device) : device_(device) {}
  ~ScratchPool() {
    for (const journal::Mapping& buffer : buffers_) device_.unlock_host(buffer.data());
  }

  struct GiveBack {
    ScratchPool* pool;
    void operator()(std::byte* buffer) const {
      const std::lock_guard lock(pool->mutex_);
      pool->free_.push_back(buffer);
    }
  };
  using Buffer = std::unique_ptr<std::byte[], GiveBack>;

  // kScratchBytes of memory; empty if there is none. Given back from any thread, before the pool goes.
  Buffer take() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) {
      constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS;
      journal::Mapping made(::mmap(nullptr, kScratchBytes, PROT_READ | PROT_WRITE, kFlags, -1, 0), kScratchBytes);
      if (!made) return {nullptr, {this}};
      static_cast<void>(device_.lock_host(made.data(), kScratchBytes, false));
      free_.push_back(made.data());
      buffers_.push_back(std::move(made));
    }
    Buffer buffer(free_.back(), {this});
    free_.pop_back();
    return buffer;
  }

 private:
  device::Runtime& device_;
  std::mutex mutex_;
  std::vector<journal::Mapping> buffers_;  // guarded by mutex_
  std::vector<std::byte*> free_;           // guarded by mutex_
};

}  // namespace xmig::server
