// A device's context: its streams, and the sticky error that ends it.
//
// Ordering between streams is settled when work is enqueued, not when it runs: the legacy stream waits for what all
// blocking streams have been given so far, and they wait for it. A wait only ever names work that is enqueued
// already, so waits cannot form a circle.
#pragma once

#include <cuda.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "device/cpu/injections.h"
#include "device/cpu/stream.h"
#include "device/device.h"
#include "device/limits.h"

namespace xmig::device::cpu {

// What outlives contexts: where faults are reported and injections wait.
struct Shared {
  Injections injections;
  std::mutex mutex;
  Fault fault;  // the first
  void (*on_fault)(void*) = nullptr;
  void* on_fault_user = nullptr;
};

class Context : public std::enable_shared_from_this<Context> {
 public:
  Context(int ordinal, size_t memory_bytes, std::shared_ptr<Shared> shared)
      : limits(memory_bytes), ordinal_(ordinal), shared_(std::move(shared)) {}

  int ordinal() const { return ordinal_; }
  Shared& shared() { return *shared_; }

  // The sticky error, or CUDA_SUCCESS.
  CUresult error() const { return static_cast<CUresult>(error_.load()); }
  // Sets it, once; later faults of the same context are consequences.
  void raise(int error, uint64_t sequence, std::string text);

  // The context is gone: work that has not begun never will. (A kernel without end keeps its thread.)
  bool abandoned() const { return abandoned_.load(); }
  void abandon();

  // Work that has not begun is dropped once this is true.
  bool dropping() const { return abandoned() || error_.load() != 0; }

  // The following are called, or used, under the device's lock.
  Limits limits;
  std::shared_ptr<Stream> create_stream(StreamKind kind);
  const std::shared_ptr<Stream>& legacy();
  const std::shared_ptr<Stream>& per_thread();
  // Enqueues, after what the rules of the legacy stream put before it. Returns the work's position.
  uint64_t submit(Stream& stream, Work work, uint64_t sequence);
  // Would work submitted now run at once? Then little things may be done on the spot.
  bool idle(Stream& stream);
  // The positions that a wait for this stream (or for the whole context) means.
  std::vector<Reach> reach(Stream& stream);
  std::vector<Reach> reach_all();

 private:
  void order(Stream& stream, uint64_t sequence);
  void forget_finished();

  const int ordinal_;
  const std::shared_ptr<Shared> shared_;
  std::atomic<int> error_{0};
  std::atomic<bool> abandoned_{false};
  std::shared_ptr<Stream> legacy_, per_thread_;
  std::vector<std::shared_ptr<Stream>> streams_;  // all, also destroyed ones that still have work
};

}  // namespace xmig::device::cpu
