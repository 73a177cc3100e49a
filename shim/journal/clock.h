// CLOCK_MONOTONIC: the clock of every time that processes tell each other.
#pragma once

#include <time.h>

#include <cstdint>

namespace xmig::journal {

inline uint64_t now_ns() {
  timespec t{};
  ::clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(t.tv_nsec);
}

}  // namespace xmig::journal
