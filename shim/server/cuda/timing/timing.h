// How long the device takes for the program's work: all operations while a trace is taken, some of them for the profile.
//
// Around an operation that is timed lie two events in its stream. The executor asks for them when it looks at everything else, and never
// waits for them. While there is neither a trace nor a profile nothing of this costs more than a comparison for each record.
//
// Invariants:
//   What is timed is put into the program's streams as it would be without: an event changes no order, and nobody waits for one.
//   A graph's nodes are not timed, only the launch of all of it: what is captured would be another graph.
//   The pages are written here only. The daemon, which reads them, is trusted; what it reads in them is not.
//
// The executor's thread alone.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "driver_table.h"
#include "journal/layout.h"
#include "server/contexts.h"
#include "server/cuda/objects/objects.h"
#include "server/cuda/timing/operation.h"
#include "server/memory/live_set.h"
#include "server/profiling/profiling.h"

namespace xmig::server {

class Streams;

class Timing {
 public:
  Timing(Profiling& profiling, const DriverTable& driver, Contexts& contexts, Objects& objects, const LiveSet& live);
  Timing(const Timing&) = delete;
  // Every event of ours, before the contexts are closed.
  void close();

  // In each turn: does the daemon want something else, and what has ended?
  void turn() {
    if (seen_ != profiling_.changes()) [[unlikely]] follow();
    if (!lanes_.empty()) [[unlikely]] poll();
  }
  bool waits() const { return !lanes_.empty(); }
  // Before it sleeps: what turn() does rarely.
  void rest();
  bool on() const { return profile_ || trace_; }
  bool traces() const { return trace_ != nullptr; }  // for which the driver may make threads

  // Around the execution of a record. `replayed`: an earlier server has executed it.
  void before(const Record& record, Streams& streams, bool replayed);
  void after();
  void allocated();       // or freed
  void forget_kernels();  // some have gone, and others may get their numbers

  // Of xMIG's own work, in a trace. ns.
  void did(profiling::Kind kind, std::string_view what, uint64_t began, uint64_t ended);

 private:
  // When the device's clock was at an event, by the host's clock.
  struct Base {
    CUevent event = nullptr;
    uint64_t at = 0;
  };
  struct Timed {
    CUevent began = nullptr, ended = nullptr;
    std::shared_ptr<const Base> base;  // of a trace
    Operation operation;
    uint32_t entry = 0;  // number + 1; 0: it is not for the profile
    uint32_t name = 0;
    uint32_t stream = 0;
    uint64_t sequence = 0;
    bool replayed = false;
  };
  // A stream has its own, for what is in it ends in this order.
  struct Lane {
    uint32_t ordinal = 0;
    std::deque<Timed> timed;
  };

  void follow();
  void start_profile(std::shared_ptr<ProfilingPage> page);
  void start_trace(std::shared_ptr<ProfilingPage> page);
  void end_trace();
  void poll();
  bool finish(Lane& lane, const Timed& timed);
  void give_up(Lane& lane);
  void tick(uint64_t now);
  void count(const Operation& operation);
  uint32_t entry_of(const Operation& operation);
  uint32_t new_entry(const Operation& operation);
  std::string kernel_name(const Operation& operation, size_t longest);
  bool due();
  void choose_next();
  CUevent take_event(uint32_t ordinal);
  void give_event(uint32_t ordinal, CUevent event);
  std::shared_ptr<const Base> base(uint32_t ordinal);
  uint32_t stream_number(uint64_t handle, CUstream stream);
  uint64_t reachable(const Record& record) const;
  uint32_t name_number(const Operation& operation);
  uint32_t write_name(std::string_view text);
  bool write(const void* piece, size_t bytes, std::string_view text = {});
  void drop();
  profiling::ProfileHeader& profile() const { return *reinterpret_cast<profiling::ProfileHeader*>(profile_->at(0)); }
  profiling::ProfileEntry& entry(uint32_t number) const {
    return reinterpret_cast<profiling::ProfileEntry*>(profile_->at(profiling::kEntriesAt))[number];
  }
  profiling::TraceHeader& trace() const { return *reinterpret_cast<profiling::TraceHeader*>(trace_->at(0)); }

  Profiling& profiling_;
  const DriverTable& driver_;
  Contexts& contexts_;
  Objects& objects_;
  const LiveSet& live_;
  uint32_t seen_ = 0;

  std::shared_ptr<ProfilingPage> profile_, trace_;
  bool ending_ = false;
  uint64_t end_by_ = 0;

  // The profile.
  uint32_t every_ = 0, gap_ = 0;  // the longest mean gap between two samples; the present one
  uint32_t until_ = 0;            // operations until the next sample
  uint64_t random_ = 0x9e3779b97f4a7c15ull;
  uint64_t operations_ = 0;  // that are not replayed
  uint64_t chosen_at_ = 0, chosen_operations_ = 0;
  uint64_t launches_ = 0, ticked_ = 0, ticks_ = 0;
  struct Known {
    uint64_t key;
    uint32_t number;  // + 1
  };
  std::array<Known, 4 * profiling::kEntries> known_{};  // open addressing

  // The trace.
  std::unordered_map<uint64_t, uint32_t> names_;    // by Operation::kind and what
  std::unordered_map<uint64_t, uint32_t> streams_;  // by handle, or by the driver's for the default streams
  uint32_t last_name_ = 0;
  std::array<std::shared_ptr<const Base>, journal::kMaxDevices> bases_;
  std::array<CUstream, journal::kMaxDevices> base_streams_{};

  std::unordered_map<CUstream, Lane> lanes_;
  size_t under_way_ = 0;
  uint64_t polled_at_ = 0;
  std::array<std::vector<CUevent>, journal::kMaxDevices> free_;
  Timed open_;  // its record is being executed
  CUstream open_stream_ = nullptr;
  uint32_t open_ordinal_ = 0;
};

}  // namespace xmig::server
