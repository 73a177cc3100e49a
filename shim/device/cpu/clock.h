#pragma once

#include <time.h>

#include <cstdint>

namespace xmig::device::cpu {

inline int64_t monotonic_nanoseconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

}  // namespace xmig::device::cpu
