// Putting records into the journal, and waiting for replies. Everything else in the client stands on this.
//
// What lies in this folder: append and ring_writer (a record's way into the ring, under `writer.lock`), and what a record is of and
// names: thread (what each thread of the program has; its own, but for the slot that the server reads), context and streams (flat
// tables; what threads change in an object are atomics, or is under the lock that is named beside it), context_storage, handles.
// diversion: what may take a record in the journal's place. Nothing here knows memory, modules or graphs.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "journal/layout.h"
#include "ops.h"

namespace xmig::client {

// May this thread call the driver? CUDA_ERROR_NOT_INITIALIZED before cuInit and in a forked child, the job's sticky
// error while there is one, CUDA_SUCCESS otherwise.
CUresult enter();

// Before the program's first context on a device, or its first record: until then its server takes nothing of the device, and now it
// opens it. The error is that of the context that cannot be made; it may be tried again.
CUresult open_device(int ordinal);
// The lowest of those that are open; 0 if none is.
int an_open_device();

// A number for a new object; freed numbers are used again only after the server can no longer meet the old meaning.
uint64_t create_handle(journal::Kind kind);
void free_handle(uint64_t handle);

// Append a record and return at once. Waits only while the ring is full (until the server's next snapshot).
CUresult append(Op op, const void* args, size_t args_bytes);

struct Slice {
  const void* data;  // nullptr: reserve the space, write nothing
  size_t bytes;
};
// The same with a payload, gathered from `slices`; at most journal::kMaxPayload bytes in all.
CUresult append(Op op, const void* args, size_t args_bytes, std::span<const Slice> slices);

// Append and wait. The reply is copied to `reply` (at most reply_bytes). Returns the record's CUresult.
CUresult call(Op op, const void* args, size_t args_bytes, void* reply, size_t reply_bytes);

// The two halves of call(), so that several copies can be in flight. One thread, at most kStagingSlots at a time, and
// finish() in the order of start().
struct Pending {
  uint64_t position = journal::kNotWaiting;
  CUresult error = CUDA_SUCCESS;  // of start(); finish() returns it
};
Pending start(Op op, const void* args, size_t args_bytes, std::span<const Slice> slices, size_t reply_bytes);
CUresult finish(Pending& pending, void* reply, size_t reply_bytes, size_t* used = nullptr);

// The sequence number of the last record this thread appended.
uint64_t last_sequence();

// The calling thread's current context: device ordinal (-1: none) and context handle (0: none).
int current_ordinal();
uint64_t current_context();

// While one is alive, the legacy default stream means the per-thread one (the _ptds entry points).
class PerThreadDefaultStream {
 public:
  PerThreadDefaultStream();
  ~PerThreadDefaultStream();
  PerThreadDefaultStream(const PerThreadDefaultStream&) = delete;
};
// CU_STREAM_LEGACY or CU_STREAM_PER_THREAD: what a call without a stream argument uses.
CUstream default_stream();

// Base address of the staging slots as this process sees them.
std::byte* staging();

}  // namespace xmig::client
