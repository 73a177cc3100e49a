// Copies between a device and plain memory, which has a descriptor and no address here (Hosted::plain): through small
// page-locked buffers, on several threads, each with one buffer that the device works on and one that the processor does.
//
// Reading and writing take no pages into this process: nothing is zeroed, faulted in or locked before content comes, and
// nothing is taken apart when the process ends.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "common/result.h"
#include "device/runtime.h"
#include "journal/layout.h"

namespace xmig::server {

// How far something has come that others wait for.
class Watermark {
 public:
  void rise(uint64_t level) { set(level); }
  // It goes no further.
  void give_up() { set(kGivenUp); }
  // Waits for this level. False: it was given up.
  bool await(uint64_t level) const {
    uint64_t now = level_.load();
    while (now < level) {
      level_.wait(now);
      now = level_.load();
    }
    return now != kGivenUp;
  }

 private:
  static constexpr uint64_t kGivenUp = ~0ull;
  void set(uint64_t level) {
    level_.store(level);
    level_.notify_all();
  }
  std::atomic<uint64_t> level_{0};
};

class StagingCopy {
 public:
  // More make memory no faster (docs/decisions/0009).
  static constexpr size_t kMostThreads = 16;
  // `use_ordinal` makes a device's context the calling thread's current one.
  StagingCopy(device::Runtime& device, std::function<void(uint32_t)> use_ordinal, size_t most_threads = kMostThreads);
  ~StagingCopy();
  StagingCopy(const StagingCopy&) = delete;

  struct Piece {
    uint64_t device;
    int fd;
    uint64_t offset;
    uint32_t ordinal;
    uint64_t mapped = 0;  // where it is in this process, too
    uint64_t bytes = journal::kGranule;
  };
  // One granule each. The device is drained.
  Result<> to_plain(std::span<const Piece> pieces);
  // `made`, if given: there is memory on the device below this address; the pieces come in the order of theirs.
  Result<> to_device(std::span<const Piece> pieces, const Watermark* made = nullptr);

  // Makes the buffers for copies of so many pieces from or to a device, as far as they are not there.
  void make_ready(uint32_t ordinal, size_t pieces = kMostThreads);

  // Of all threads together, since the last look: copying between buffers and memory, waiting for the device; making buffers.
  struct Spent {
    uint64_t copying_ns = 0, waiting_ns = 0, making_ns = 0;
  };
  Spent spent();
  static std::string text(const Spent& spent);  // for a line of the log

 private:
  class Lane;
  class Locked;
  struct Run;
  size_t threads_for(size_t pieces) const;
  void make_lanes(uint32_t ordinal, size_t count);
  Result<> run(Run& run);
  void work(Run& run);
  std::unique_ptr<Lane> lane(uint32_t ordinal);
  void give_back(std::unique_ptr<Lane> lane);

  device::Runtime& device_;
  const std::function<void(uint32_t)> use_ordinal_;
  const size_t most_threads_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Lane>> idle_;  // guarded by mutex_
  Spent spent_;                              // likewise
};

}  // namespace xmig::server
