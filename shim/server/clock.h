// CLOCK_MONOTONIC: the clock of every time in the control protocol.
#pragma once

#include <time.h>

#include <cstdint>
#include <string>

namespace xmig::server {

inline uint64_t now_ns() {
  timespec t{};
  ::clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(t.tv_nsec);
}

// For a line of the log.
inline std::string in_ms(uint64_t ns) { return std::to_string((ns + 500'000) / 1'000'000) + " ms"; }

}  // namespace xmig::server
