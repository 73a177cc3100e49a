// What the daemon wants of profiles and traces, handed from the thread that listens to it to the executor's. What lies in this folder:
// pages (what is written, and where), profiling. Who writes is cuda/timing.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "common/result.h"
#include "ipc/fd.h"
#include "server/profiling/pages.h"

namespace xmig::server {

// A memfd of the daemon's, mapped.
class ProfilingPage {
 public:
  // It has `least` bytes or more.
  static Result<std::shared_ptr<ProfilingPage>> map(ipc::UniqueFd file, size_t least);
  ~ProfilingPage();
  ProfilingPage(const ProfilingPage&) = delete;

  std::byte* at(size_t offset) const { return bytes_ + offset; }
  size_t size() const { return size_; }

 private:
  ProfilingPage(std::byte* bytes, size_t size) : bytes_(bytes), size_(size) {}

  std::byte* bytes_;
  size_t size_;
};

class Profiling {
 public:
  struct Wanted {
    std::shared_ptr<ProfilingPage> profile;  // null: none
    uint32_t every = 0;                      // one of so many operations is timed, or fewer; 0: none
    std::shared_ptr<ProfilingPage> trace;    // null: none
    bool end = false;                        // of the trace
  };

  // The thread that listens to the daemon. `every` as above.
  Result<> profile(ipc::UniqueFd file, uint32_t every);
  Result<> trace(ipc::UniqueFd file);
  void end_trace();

  // The executor's thread. How often something else was wanted; then what.
  uint32_t changes() const { return changes_.load(std::memory_order_acquire); }
  Wanted wanted() const;

 private:
  mutable std::mutex mutex_;
  Wanted wanted_;  // guarded by mutex_
  std::atomic<uint32_t> changes_{0};
};

}  // namespace xmig::server
