// What this process shares with its server from the first cuInit on, and whether it may be used.
//
// Everything here is written once, by the thread that initialises, before `phase` becomes kRunning; nothing is ever
// destroyed, so that a program's atexit handlers and static destructors can still call the driver.
//
// What lies in this folder: handshake and process, native (the genuine driver instead), starter, job_log and message (what is reported to
// people), entry_points and unsupported (functions by name), requested. It sees no other folder of the client: what is made of a job's
// memory stands above it, down to the first cuInit (driver/init.cc).
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "journal/layout.h"

namespace xmig::client {

enum class Phase : uint32_t {
  kNotInitialized,
  kRunning,
  kNative,  // no daemon, and the genuine driver answers instead (XMIG_WITHOUT_DAEMON=native)
  kForked,  // a child of a process that had initialised: it has no job, and never will
};

struct Process {
  std::atomic<Phase> phase{Phase::kNotInitialized};
  std::atomic<uint32_t> lost{0};  // a CUresult: server and daemon are gone, and nobody knows this job any more
  const void* memory = nullptr;  // owns what follows
  journal::JournalHeader* header = nullptr;
  std::byte* ring = nullptr;
  uint64_t ring_bytes = 0;
  std::byte* staging = nullptr;
  std::atomic<uint32_t> opened{0};  // a bit for each device that the server has opened: open_device()
  bool launch_blocking = false;  // $CUDA_LAUNCH_BLOCKING, as the driver takes it: a launch ends with its kernel
  int driver_version = 0;
  int device_count = 0;
  journal::DeviceDescription devices[journal::kMaxDevices] = {};  // our copy: the shared one could change
};
extern constinit Process process;

// Everything that initialized() does beyond its fast path.
CUresult not_running();

// May local questions be answered? (The job's loss is reported; a fault of one context is not.)
inline CUresult initialized() {
  if (process.phase.load(std::memory_order_acquire) != Phase::kRunning) [[unlikely]] return not_running();
  const auto state = process.header->state.load(std::memory_order_relaxed);
  if (state == static_cast<uint32_t>(journal::ServerState::kLost)) [[unlikely]] return not_running();
  if (process.lost.load(std::memory_order_relaxed)) [[unlikely]] return not_running();
  return CUDA_SUCCESS;
}

// The description of a device, or nullptr if there is no such ordinal.
inline const journal::DeviceDescription* description(int ordinal) {
  return ordinal >= 0 && ordinal < process.device_count ? &process.devices[ordinal] : nullptr;
}
// The same as a result, for those who need no description.
CUresult check_ordinal(int ordinal);
inline int attribute(int ordinal, CUdevice_attribute which) { return process.devices[ordinal].attributes[which]; }

// To be called where the program waits or polls. About once a second it looks whether server or daemon live; if neither
// does, it says so once, and asks a daemon that is back to go on. Anything but CUDA_SUCCESS ends the waiting.
CUresult check_peers();

}  // namespace xmig::client
