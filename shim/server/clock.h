// The server's times, and how a log says them.
#pragma once

#include <cstdint>
#include <string>

#include "journal/clock.h"

namespace xmig::server {

using journal::now_ns;

// For a line of the log.
inline std::string in_ms(uint64_t ns) { return std::to_string((ns + 500'000) / 1'000'000) + " ms"; }

}  // namespace xmig::server
