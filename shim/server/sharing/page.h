// What the servers of one device show each other: who has work (xmigd/sharing/pages.py has the same).
//
// Two files of the daemon's for each device. One is written by servers of critical jobs, and others map it for reading only. The
// other is written by servers of best-effort jobs, in turns. All of it is advice from processes that may be hostile: moments are
// believed for kStale only, and nobody waits longer than its own bound.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace xmig::server::sharing {

inline constexpr uint64_t kMagic = 0x31726168736d6978;
inline constexpr uint32_t kSlots = 255;
inline constexpr uint64_t kStale = 50'000'000;  // ns after which a server that has shown nothing counts as idle

struct alignas(64) PageHeader {
  uint64_t magic;
  std::atomic<uint32_t> used;  // slots below this number may be in use. Written by the daemon
};

struct alignas(64) Slot {
  std::atomic<uint32_t> present;  // a server that executes has it. Written by the daemon
  uint32_t reserved;
  std::atomic<uint64_t> busy_at;  // CLOCK_MONOTONIC in ns: it had work then; 0: it has none. Written by the server, as is the rest
  std::atomic<uint64_t> held;     // kernels that waited
  std::atomic<uint64_t> held_ns;  // for how long, all together
  std::atomic<uint64_t> overdue;  // of those, kernels that waited for as long as they may
};

struct Page {
  PageHeader header;
  Slot slots[kSlots];
};
static_assert(sizeof(Slot) == 64 && sizeof(Page) == 16 << 10);

}  // namespace xmig::server::sharing
