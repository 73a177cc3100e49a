// Where in its address range a shadow keeps what is in host memory. The driver page-locks no host memory at addresses that
// it has reserved for a device, so the upper half of each range is not reserved.
#pragma once

#include "journal/layout.h"

namespace xmig::journal {

inline constexpr uint64_t kHostShadowAt = kShadowSpan / 2;

constexpr bool in_host_shadow(uint64_t address) {
  const uint64_t at = address - kShadowBase;
  return at < kMaxDevices * kShadowSpan && at % kShadowSpan >= kHostShadowAt;
}

}  // namespace xmig::journal
