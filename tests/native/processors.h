// The processors that threads may use.
#pragma once

#include <sched.h>

#include <vector>

#include "check.h"

namespace harness {

inline cpu_set_t mask_of(pid_t thread) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CHECK(::sched_getaffinity(thread, sizeof(set), &set) == 0);
  return set;
}

inline cpu_set_t only(int processor) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(processor, &set);
  return set;
}

// Those that this thread may use.
inline std::vector<int> processors() {
  const cpu_set_t set = mask_of(0);
  std::vector<int> list;
  for (int i = 0; i < CPU_SETSIZE; ++i) {
    if (CPU_ISSET(i, &set)) list.push_back(i);
  }
  return list;
}

inline void run_on(int processor) {
  const cpu_set_t set = only(processor);
  CHECK(::sched_setaffinity(0, sizeof(set), &set) == 0);
}

}  // namespace harness
