#include "server/cuda/handlers/intake.h"

#include <algorithm>

namespace xmig::server {

namespace {

constexpr size_t kMostRanges = 1024;

}  // namespace

CUstream Intake::stream(uint32_t ordinal) {
  Way& way = ways_[ordinal];
  if (way.stream) return way.stream;
  CUevent brought = nullptr;
  if (driver_.cuEventCreate(&brought, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS) return nullptr;
  if (driver_.cuStreamCreateWithPriority(&way.stream, CU_STREAM_NON_BLOCKING, 0) != CUDA_SUCCESS) {
    driver_.cuEventDestroy_v2(brought);
    way.stream = nullptr;
    return nullptr;
  }
  way.brought = brought;
  return way.stream;
}

CUresult Intake::join(uint32_t ordinal, CUstream stream) {
  const Way& way = ways_[ordinal];
  const CUresult result = driver_.cuEventRecordWithFlags(way.brought, way.stream, 0);
  return result == CUDA_SUCCESS ? driver_.cuStreamWaitEvent(stream, way.brought, 0) : result;
}

void Intake::will_write(uint64_t address, uint64_t bytes) {
  if (all_ || bytes == 0) return;
  uint64_t first = address, end = address + bytes;
  auto it = written_.upper_bound(first);
  if (it != written_.begin() && std::prev(it)->second >= first) --it;
  while (it != written_.end() && it->first <= end) {
    first = std::min(first, it->first);
    end = std::max(end, it->second);
    it = written_.erase(it);
  }
  written_.emplace(first, end);
  if (written_.size() > kMostRanges) may_write_all();
}

bool Intake::is_written(uint64_t address, uint64_t bytes) const {
  if (all_) return true;
  const auto next = written_.lower_bound(address + bytes);
  return next != written_.begin() && std::prev(next)->second > address;
}

}  // namespace xmig::server
