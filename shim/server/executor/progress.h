// How far the device has come with the program's work. Nothing is queried and nothing is waited for: every so often a
// stream gets a mark, a write into memory of ours behind the work that it has so far.
//
// The executor says what it puts into streams; how far that is done may be queried from any thread, by one that reports a
// fault, or by the watchdog while the executor is stuck in the driver.
#pragma once

#include <cuda.h>

#include <array>
#include <atomic>
#include <cstdint>

#include "driver_table.h"
#include "journal/mapping.h"

namespace xmig::server {

class Progress {
 public:
  static constexpr uint32_t kMarkEvery = 128;  // on a GPU: a mark costs the executor and the device a microsecond each
  // `mark_every`: so many records of a stream get one mark.
  explicit Progress(const DriverTable& driver, uint32_t mark_every = kMarkEvery);
  ~Progress();
  Progress(const Progress&) = delete;

  void mark_every(uint32_t records) { mark_every_ = records; }
  // The record with this sequence has put work into this stream, whose context is current.
  CUresult enqueued(CUstream stream, uint32_t ordinal, uint64_t sequence) {
    if (!last_ || last_->stream != stream || last_->ordinal != ordinal) [[unlikely]] last_ = &lane_of(stream, ordinal);
    Lane& lane = *last_;
    unfinished_.store(true, std::memory_order_relaxed);
    if (lane.unmarked++ == 0) lane.first_unmarked.store(sequence, std::memory_order_relaxed);
    lane.enqueued.store(sequence, std::memory_order_relaxed);
    return lane.unmarked < mark_every_ ? CUDA_SUCCESS : mark(lane, sequence);
  }
  // A mark behind what each stream still has to do. `use_ordinal` makes a device's context the current one. What is done gets none: the
  // program may have waited for it, and would be answered that there is work in the stream again.
  template <typename F>
  CUresult mark_all(F&& use_ordinal) {
    const size_t count = lane_count_.load(std::memory_order_relaxed);
    for (size_t i = 0; i < count; ++i) {
      Lane& lane = lanes_[i];
      if (!lane.used || lane.gone || lane.unmarked == 0) continue;
      use_ordinal(lane.ordinal);
      if (&lane != &lanes_.back() && driver_.cuStreamQuery(lane.stream) == CUDA_SUCCESS) {
        finished(lane);
        continue;
      }
      const CUresult result = mark(lane, lane.enqueued.load(std::memory_order_relaxed));
      if (result != CUDA_SUCCESS) return result;
    }
    return CUDA_SUCCESS;
  }
  // The stream's handle is about to mean nothing any more; its work goes on.
  void destroyed(CUstream stream);
  // The device was found idle: what was executed so far, up to this record, is done.
  void idle(uint64_t sequence);

  // Is there work that was not seen done? From any thread, as are the following.
  bool unfinished() const { return unfinished_.load(std::memory_order_relaxed); }
  // All work of the records up to this one is done; kAll: of every record.
  static constexpr uint64_t kAll = ~0ull;
  uint64_t done() const;
  // Is another number whenever the device has come further.
  uint64_t signature() const;

 private:
  static constexpr size_t kLanes = 512;

  // A stream's work. The last lane is shared by all streams for which there is none left: it gets no marks.
  struct Lane {
    CUstream stream = nullptr;
    uint32_t ordinal = 0;
    bool used = false, gone = false;
    uint32_t unmarked = 0;
    std::atomic<uint64_t> enqueued{0};        // sequence of the last record with work in it
    std::atomic<uint64_t> marked{0};          // what the last mark writes: everything up to there is before it
    std::atomic<uint64_t> first_unmarked{0};  // the first record behind that mark
  };

  std::atomic<uint64_t>& word(const Lane& lane) const;
  Lane& lane_of(CUstream stream, uint32_t ordinal);
  CUresult mark(Lane& lane, uint64_t sequence);
  void finished(Lane& lane);

  const DriverTable& driver_;
  uint32_t mark_every_;
  journal::Mapping words_;  // one for each lane, written by the device
  std::array<Lane, kLanes> lanes_;
  Lane* last_ = nullptr;
  std::atomic<size_t> lane_count_{0};
  std::atomic<uint64_t> idle_at_{0};
  std::atomic<bool> unfinished_{false};
};

}  // namespace xmig::server
