#include "server/cuda/handlers/asides.h"

namespace xmig::server {

// An event to wait for at once: the next use records it again.
CUresult Asides::mark_of(uint32_t ordinal, CUevent* mark) {
  CUevent& event = marks_[ordinal];
  const CUresult result = event ? CUDA_SUCCESS : driver_.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING);
  *mark = event;
  return result;
}

// Each of the program's streams has one of its own on each device: two that share one could wait for each other.
CUresult Asides::step(uint32_t home, CUstream stream, uint32_t ordinal, CUstream* out) {
  CUevent before = nullptr;
  contexts_.use(home);
  CUresult result = mark_of(home, &before);
  if (result == CUDA_SUCCESS) result = driver_.cuEventRecordWithFlags(before, stream, 0);
  if (result != CUDA_SUCCESS) return result;
  contexts_.use(ordinal);
  CUstream& aside = asides_[{home, stream, ordinal}];
  if (!aside) result = driver_.cuStreamCreateWithPriority(&aside, CU_STREAM_NON_BLOCKING, 0);
  if (result == CUDA_SUCCESS) result = driver_.cuStreamWaitEvent(aside, before, 0);
  if (result != CUDA_SUCCESS) {
    contexts_.use(home);
    return result;
  }
  working_.add(aside, ordinal);
  *out = aside;
  return CUDA_SUCCESS;
}

CUresult Asides::come_back(uint32_t home, CUstream stream, uint32_t ordinal, CUstream aside) {
  CUevent after = nullptr;
  contexts_.use(ordinal);
  CUresult result = mark_of(ordinal, &after);
  if (result == CUDA_SUCCESS) result = driver_.cuEventRecordWithFlags(after, aside, 0);
  contexts_.use(home);
  return result == CUDA_SUCCESS ? driver_.cuStreamWaitEvent(stream, after, 0) : result;
}

void Asides::drop(CUstream gone) {
  std::erase_if(asides_, [&](const auto& entry) {
    if (std::get<1>(entry.first) != gone) return false;
    working_.forget(entry.second);
    driver_.cuStreamDestroy_v2(entry.second);
    return true;
  });
}

void Asides::close() {
  for (const auto& [key, aside] : asides_) {
    contexts_.use(std::get<2>(key));
    driver_.cuStreamDestroy_v2(aside);
  }
  for (uint32_t ordinal = 0; ordinal < contexts_.count(); ++ordinal) {
    if (!marks_[ordinal]) continue;
    contexts_.use(ordinal);
    driver_.cuEventDestroy_v2(marks_[ordinal]);
  }
}

}  // namespace xmig::server
