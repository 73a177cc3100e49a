// What the client keeps for each thread of the program.
#pragma once

#include <cuda.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "journal/layout.h"

namespace xmig::client {

struct Context;
struct Operation;

// A synchronous record of this thread whose reply it has not taken yet.
struct Unanswered {
  uint64_t position = 0;
  uint32_t reply_offset = 0;  // of the reply space in the record; ours, since what lies in the ring could change
  uint32_t capacity = 0;
  bool collected = false;  // already taken out of the ring, into the fields below, because the ring had to be trimmed
  CUresult result = CUDA_SUCCESS;
  size_t bytes = 0;
  std::unique_ptr<std::byte[]> reply;
};

struct Thread {
  static constexpr uint32_t kNoSlot = ~0u;

  Context* context = nullptr;  // top of the stack
  uint32_t slot = kNoSlot;     // in JournalHeader::threads
  uint32_t per_thread_default = 0;
  uint64_t last_sequence = 0;
  uint32_t rung = 0;  // the doorbell, for a server that can run on this thread's processor only; 0: it was not so
  CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  std::vector<Operation>* collecting = nullptr;  // see graph/capture.h
  uint32_t unanswered_count = 0;  // oldest first
  std::array<Unanswered, 2 * journal::kStagingSlots> unanswered;
  std::vector<Context*> stack;
};

extern constinit thread_local Thread* current_thread [[gnu::tls_model("initial-exec")]];
Thread& create_thread();

inline Thread& this_thread() {
  if (!current_thread) [[unlikely]] return create_thread();
  return *current_thread;
}

// Takes a slot in the journal's header for this thread; it is freed at the thread's end. False: all are in use.
bool take_slot(Thread& thread);

}  // namespace xmig::client
