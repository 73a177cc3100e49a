// Communicators, as far as the client needs to know them: one table, whose entries are never destroyed.
//
// What lies in this folder: communicators (made, queried and ended), operations (checked, and put into records), group (what
// a thread has put together), captured (groups that became a graph's), genuine (the library that the program would have loaded). Collectives run in the servers; the client
// opens no socket. All of it may be called from any thread; a group is its thread's.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "api/nccl.h"
#include "client/journal/context.h"
#include "client/journal/handles.h"
#include "journal/collectives.h"
#include "journal/layout.h"

namespace xmig::client {

// An operator that the program has made for a communicator.
struct ScaledSum {
  uint32_t type = 0;
  bool by_device = false;
  uint64_t scalar = 0;  // its bits, or its address
};

struct Communicator {
  std::atomic<bool> alive{false};
  // Written before `alive`.
  Context* context = nullptr;
  uint32_t rank = 0;
  uint32_t ranks = 0;
  std::atomic<uint64_t> id{0};  // never used again, as its number may be
  std::mutex mutex;
  std::vector<std::optional<ScaledSum>> operators;  // guarded by mutex; by number, from ncclNumOps on
};

inline ncclComm_t as_handle(uint64_t handle) { return reinterpret_cast<ncclComm_t>(handle); }
inline uint64_t number(ncclComm_t handle) { return reinterpret_cast<uint64_t>(handle); }
// nullptr: it is none, or none any more.
Communicator* find_communicator(ncclComm_t handle);

// What NCCL calls an error of the driver; the text is for ncclGetLastError.
ncclResult_t as_nccl(CUresult error);
// The same with a reason, which is kept for ncclGetLastError and goes into the job's log.
ncclResult_t failed(ncclResult_t result, const char* format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace xmig::client
