#include "server/executor/progress.h"

#include <sys/mman.h>

#include <algorithm>

namespace xmig::server {

Progress::Progress(const DriverTable& driver, uint32_t mark_every)
    : driver_(driver),
      mark_every_(mark_every),
      words_(::mmap(nullptr, kLanes * sizeof(uint64_t), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0),
             kLanes * sizeof(uint64_t)) {
  if (words_) driver_.cuMemHostRegister_v2(words_.data(), words_.size(), CU_MEMHOSTREGISTER_PORTABLE);
}

Progress::~Progress() {
  if (words_) driver_.cuMemHostUnregister(words_.data());
}

std::atomic<uint64_t>& Progress::word(const Lane& lane) const {
  return reinterpret_cast<std::atomic<uint64_t>*>(words_.data())[&lane - lanes_.data()];
}

Progress::Lane& Progress::lane_of(CUstream stream, uint32_t ordinal) {
  const size_t count = lane_count_.load(std::memory_order_relaxed);
  Lane* free = nullptr;
  for (size_t i = 0; i < count; ++i) {
    Lane& lane = lanes_[i];
    if (lane.used && !lane.gone && lane.stream == stream && lane.ordinal == ordinal) return lane;
    const bool done = lane.gone && word(lane).load(std::memory_order_acquire) >= lane.marked.load();
    if (done && !free) free = &lane;
  }
  if (!free && count + 1 < kLanes) {
    free = &lanes_[count];
    lane_count_.store(count + 1, std::memory_order_release);
  }
  if (!free) {
    lane_count_.store(kLanes, std::memory_order_release);
    return lanes_[kLanes - 1];
  }
  // Sequences only grow: what an earlier stream has left in the lane's numbers is done, and says nothing wrong.
  free->stream = stream;
  free->ordinal = ordinal;
  free->used = true;
  free->gone = false;
  free->unmarked = 0;
  return *free;
}

CUresult Progress::mark(Lane& lane, uint64_t sequence) {
  if (!words_ || &lane == &lanes_.back()) return CUDA_SUCCESS;
  const auto address = static_cast<CUdeviceptr>(reinterpret_cast<uintptr_t>(&word(lane)));
  const CUresult result =
      driver_.cuStreamWriteValue64_v2(lane.stream, address, sequence, CU_STREAM_WRITE_VALUE_DEFAULT);
  if (result != CUDA_SUCCESS) return result;
  lane.marked.store(sequence, std::memory_order_relaxed);
  lane.unmarked = 0;
  return CUDA_SUCCESS;
}

// No mark is on its way that could write something lower.
void Progress::finished(Lane& lane) {
  const uint64_t enqueued = lane.enqueued.load(std::memory_order_relaxed);
  if (words_) word(lane).store(enqueued, std::memory_order_release);
  lane.marked.store(enqueued, std::memory_order_relaxed);
  lane.unmarked = 0;
}

void Progress::destroyed(CUstream stream) {
  const size_t count = std::min(lane_count_.load(std::memory_order_relaxed), kLanes - 1);
  for (size_t i = 0; i < count; ++i) {
    Lane& lane = lanes_[i];
    if (!lane.used || lane.gone || lane.stream != stream) continue;
    if (lane.unmarked != 0) mark(lane, lane.enqueued.load(std::memory_order_relaxed));
    lane.gone = true;
  }
  last_ = nullptr;
}

void Progress::idle(uint64_t sequence) {
  idle_at_.store(sequence, std::memory_order_release);
  const size_t count = lane_count_.load(std::memory_order_relaxed);
  for (size_t i = 0; i < count; ++i) lanes_[i].unmarked = 0;
  unfinished_.store(false, std::memory_order_relaxed);
}

uint64_t Progress::done() const {
  const uint64_t idle_at = idle_at_.load(std::memory_order_acquire);
  const size_t count = lane_count_.load(std::memory_order_acquire);
  uint64_t done = kAll;
  for (size_t i = 0; i < count; ++i) {
    const Lane& lane = lanes_[i];
    const uint64_t enqueued = lane.enqueued.load(std::memory_order_acquire);
    const uint64_t reached = std::max(words_ ? word(lane).load(std::memory_order_acquire) : 0, idle_at);
    if (reached >= enqueued) continue;
    const uint64_t first = lane.first_unmarked.load(std::memory_order_relaxed);
    const bool marks_are_behind = reached >= lane.marked.load(std::memory_order_relaxed);
    done = std::min(done, marks_are_behind && first > reached ? first - 1 : reached);
  }
  return done;
}

uint64_t Progress::signature() const {
  uint64_t sum = idle_at_.load(std::memory_order_acquire);
  const size_t count = lane_count_.load(std::memory_order_acquire);
  for (size_t i = 0; words_ && i < count; ++i) sum += word(lanes_[i]).load(std::memory_order_acquire);
  return sum;
}

}  // namespace xmig::server
