// Faults on purpose. The server strikes at records, in cuts and in redos itself; the device does in kernels and copies.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "device/device.h"
#include "server/daemon.h"
#include "server/faults.h"

namespace xmig::server {

class Injector {
 public:
  Injector(device::Device& device, Daemon& daemon, Faults& faults)
      : device_(device), daemon_(daemon), faults_(faults) {}

  // From any thread.
  void arm(const device::Injection& injection);

  void at_record(uint64_t sequence) { at(kRecord, sequence, sequence); }
  void at_redo(uint64_t records, uint64_t sequence) { at(kRedo, records, sequence); }
  void at_cut(uint64_t chunks, uint64_t sequence) { at(kCut, chunks, sequence); }

 private:
  enum Place { kRecord, kRedo, kCut, kPlaces };
  void at(Place place, uint64_t count, uint64_t sequence) {
    if (count >= next_[place].load(std::memory_order_relaxed)) [[unlikely]] strike(place, count, sequence);
  }
  void strike(Place place, uint64_t count, uint64_t sequence);

  device::Device& device_;
  Daemon& daemon_;
  Faults& faults_;
  std::mutex mutex_;
  std::vector<device::Injection> armed_[kPlaces];  // guarded by mutex_
  std::atomic<uint64_t> next_[kPlaces] = {~0ull, ~0ull, ~0ull};
};

}  // namespace xmig::server
