// Faults on purpose. The server injections at records, in snapshots, in replays and at imports itself. What injections in kernels and copies is,
// on a device that can be injected into, real work that faults, hangs or is killed beside them; other devices do it themselves.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include "device/runtime.h"
#include "server/channel/daemon.h"
#include "server/faults/faults.h"

namespace xmig::server {

class Injector {
 public:
  Injector(device::Runtime& device, Daemon& daemon, Faults& faults)
      : device_(device), daemon_(daemon), faults_(faults) {}

  // From any thread.
  void arm(const device::Injection& injection);

  // Has something to inject at this record, or has waited for one of its kind?
  bool due(uint64_t sequence) const { return sequence >= next_[kWork].load(std::memory_order_relaxed); }
  struct Stream {
    device::StreamHandle real = nullptr;
    uint32_t ordinal = 0;
  };
  // Before the record. `stream`: where the program's work goes; its context is current. `allocated`: is there a byte of the program's?
  void at_record(uint64_t sequence, Stream stream, const std::function<bool(uint64_t)>& allocated);
  // In the work of the record, a kernel or a copy in `stream`: before it is enqueued, and when it was.
  struct Beside {
    device::Injection injection;
    uint64_t sequence;
    Stream stream;
    Stream own;
    device::EventHandle started;  // the work is next in its stream
  };
  std::optional<Beside> beside(device::InjectPoint point, uint64_t sequence, Stream stream);
  void inject(const Beside& beside);

  void at_replay(uint64_t records, uint64_t sequence) { at(kReplay, records, sequence); }
  bool snapshot_due(uint64_t chunks) const { return chunks >= next_[kSnapshot].load(std::memory_order_relaxed); }
  void at_snapshot(uint64_t chunks, uint64_t sequence) { at(kSnapshot, chunks, sequence); }
  // What the driver is to answer to this import of another device's memory.
  device::Status at_import(uint64_t imports);

 private:
  enum Place { kWork, kReplay, kSnapshot, kImport, kPlaces };
  void at(Place place, uint64_t count, uint64_t sequence) {
    if (count >= next_[place].load(std::memory_order_relaxed)) [[unlikely]] inject_at(place, count, sequence);
  }
  void inject_at(Place place, uint64_t count, uint64_t sequence);
  std::optional<device::Injection> take(Place place, device::InjectPoint point, uint64_t count);
  void hit(const device::Injection& injection, uint64_t sequence, Stream stream);
  void flip(uint64_t address, Stream stream);
  [[noreturn]] void die();

  device::Runtime& device_;
  Daemon& daemon_;
  Faults& faults_;
  std::mutex mutex_;
  std::vector<device::Injection> armed_[kPlaces];  // guarded by mutex_
  std::atomic<uint64_t> next_[kPlaces] = {~0ull, ~0ull, ~0ull, ~0ull};
};

}  // namespace xmig::server
