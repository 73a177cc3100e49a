// Streams, as far as the client needs to know them: one table, whose entries are never destroyed.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstdint>

#include "client/bootstrap/process.h"

namespace xmig::client {

struct Context;

inline constexpr int kLeastPriority = 0;
// Of the streams of a device; smaller is greater.
inline int greatest_priority(int ordinal) {
  return attribute(ordinal, CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED) ? -5 : kLeastPriority;
}

struct Stream {
  std::atomic<bool> alive{false};
  // Written before `alive`.
  unsigned int flags = 0;
  int priority = 0;
  uint64_t id = 0;
  Context* context = nullptr;
  std::atomic<uint32_t> synchronization_policy{CU_SYNC_POLICY_AUTO};
  std::atomic<uint32_t> memory_domain{0};
  std::atomic<uint64_t> capture{0};  // which one it takes part in; see graph/capture.h
};

// The null stream and the two that stand for default streams.
inline bool special(CUstream stream) { return reinterpret_cast<uint64_t>(stream) <= 2; }
// As records have it.
inline uint64_t number(CUstream stream) { return reinterpret_cast<uint64_t>(stream); }
// nullptr for special ones and for what is not a stream.
Stream* find_stream(CUstream stream);
// Is it one of ours, or one of the three special values?
bool valid_stream(CUstream stream);
// Where a stream of this handle is, or will be when it is `alive`.
Stream& stream_place(uint64_t handle);
// The null stream means another one in a _ptds function.
CUstream resolve(CUstream stream);

// The context was reset: its streams are gone.
void streams_context_reset(const Context& context);

}  // namespace xmig::client
