// Has the program called nvmlInit more often than nvmlShutdown?
#pragma once

#include <atomic>

namespace xmig::nvml {

extern constinit std::atomic<int> users;

inline bool in_use() { return users.load(std::memory_order_relaxed) > 0; }

}  // namespace xmig::nvml
