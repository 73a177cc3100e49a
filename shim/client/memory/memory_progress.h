// How far the program knows its streams to have come, in sequence numbers of records: what makes memory that was freed
// in the order of one stream safe for the others.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "client/memory/memory_ranges.h"

namespace xmig::client {

class Progress {
 public:
  // Everything of the stream (of every stream of the context) before record `sequence` is done.
  void stream_reached(uint64_t stream_key, uint64_t sequence);
  void context_reached(uint64_t context, uint64_t sequence);

  bool covers(const FreedBy& freed);

 private:
  std::mutex lock_;
  std::unordered_map<uint64_t, uint64_t> streams_;
  std::unordered_map<uint64_t, uint64_t> contexts_;
};

Progress& progress();

// Ranges of a destroyed stream belong to this one, until the context is waited for.
uint64_t orphan_key(uint64_t context);

// Contexts that have allocated something: those whose work memory is waited for before it is taken away.
void note_context(uint64_t context);
void forget_context(uint64_t context);

// The context that a stream belongs to; of the special streams, the current one.
struct StreamHome {
  uint64_t context = 0;
  int ordinal = -1;
};
StreamHome stream_home(CUstream stream);

// cuCtxSynchronize for a context that need not be the current one. A context that is gone has nothing to wait for.
CUresult synchronize_context(uint64_t context);
// What cuMemFree does before it takes memory away: waits for `owner`, whose error it returns, and for every other
// context, which could be using the memory too but whose faults are not the caller's.
CUresult synchronize_users(uint64_t owner);

}  // namespace xmig::client
