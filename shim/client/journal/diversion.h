// Work that goes elsewhere than into the journal: into a graph, while a stream is captured or a thread collects operations.
//
// Graphs are made above this folder and above those that append, which therefore see of them only this. Diversions are rare, so
// everything that appends asks one global word first; who takes the records is known since the first time that it was not zero.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "client/journal/append.h"
#include "ops.h"

namespace xmig::client {

struct Context;
struct Node;
struct Thread;

struct Dependency {
  Node* on = nullptr;
  CUgraphEdgeData edge{};
};

// An event that was recorded in a capture stands for a place in its graph.
struct CapturedPlace {
  uint64_t capture = 0;  // 0: none
  std::vector<Dependency> after;
};

class Diversion {
 public:
  // What becomes of a record that is about to be appended; nothing: it goes into the journal.
  virtual std::optional<CUresult> divert(Thread& thread, Op op, const void* args, size_t args_bytes,
                                         std::span<const Slice> payload) = 0;
  // The same for a call that would wait for the device.
  virtual CUresult refuse_waiting(Thread& thread, Op op, const void* args) = 0;

  // A call that a capture which somebody else may be doing does not allow (cuThreadExchangeStreamCaptureMode).
  virtual CUresult check_unsafe_call() = 0;
  // A call that waits for the whole context.
  virtual CUresult check_waiting_for_context(const Context& context) = 0;

  // Is the stream being captured? Then the event becomes such a place, or (external) a node. False: record it.
  virtual bool record_event(CUstream stream, CUevent event, unsigned int flags, CapturedPlace& place, CUresult& result) = 0;
  // False: an ordinary wait.
  virtual bool wait_for_event(CUstream stream, CUevent event, unsigned int flags, const CapturedPlace& place, bool recorded,
                              CUresult& result) = 0;
  // Asking for such an event's completion is a mistake that ends its capture.
  virtual CUresult refuse_captured(const CapturedPlace& place) = 0;

  // cuMemAllocAsync and cuMemFreeAsync; nothing: the stream is not being captured.
  virtual std::optional<CUresult> allocate(CUstream stream, size_t bytes, int ordinal, CUdeviceptr* address) = 0;
  virtual std::optional<CUresult> free(CUstream stream, CUdeviceptr address) = 0;

  // The stream is about to be destroyed.
  virtual void stream_destroyed(CUstream stream) = 0;
  // A thread is at its end, and its default streams with it.
  virtual void thread_ended(const Thread& thread) = 0;

 protected:
  ~Diversion() = default;
};

// How many captures there are, and threads that collect.
extern constinit std::atomic<int> diversions;
inline bool diverting() { return diversions.load(std::memory_order_relaxed) != 0; }

// Who diverts; there is one, for ever. To be queried only when something was diverted once.
Diversion& diversion();
void begin_diversion(Diversion& by);
void end_diversion();

}  // namespace xmig::client
