// Stream capture: work goes into a graph instead of the journal.
//
// Two things divert a record on its way into the journal: a stream that is being captured, and a thread that collects
// operations to make a graph's node of them. Both are rare, so everything that appends asks one global word first.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "client/graph/graph.h"
#include "client/journal/append.h"
#include "client/journal/thread.h"

namespace xmig::client {

// How many captures there are, and threads that collect.
extern constinit std::atomic<int> diversions;
inline bool diverting() { return diversions.load(std::memory_order_relaxed) != 0; }

// What becomes of a record that is about to be appended; nothing: it goes into the journal.
std::optional<CUresult> divert(Thread& thread, Op op, const void* args, size_t args_bytes,
                               std::span<const Slice> payload);
// The same for a call that would wait for the device.
CUresult refuse_waiting(Thread& thread, Op op, const void* args);

// The calling thread's records become operations for as long as one of these lives.
class Collect {
 public:
  explicit Collect(std::vector<Operation>& into);
  ~Collect();
  Collect(const Collect&) = delete;

 private:
  Thread& thread_;
};

// A call that a capture which somebody else may be doing does not allow (cuThreadExchangeStreamCaptureMode).
CUresult check_unsafe_call();
// A call that waits for the whole context.
CUresult check_waiting_for_context(const Context& context);

// An event that was recorded in a capture stands for a place in its graph.
struct CapturedPlace {
  uint64_t capture = 0;  // 0: none
  std::vector<Dependency> after;
};
// Is the stream being captured? Then the event becomes such a place, or (external) a node. False: record it.
bool capture_event_record(CUstream stream, CUevent event, unsigned int flags, CapturedPlace& place, CUresult& result);
// False: an ordinary wait.
bool capture_event_wait(CUstream stream, CUevent event, unsigned int flags, const CapturedPlace& place, bool recorded,
                        CUresult& result);
// Asking for such an event's completion is a mistake that ends its capture.
CUresult refuse_captured(const CapturedPlace& place);

// cuMemAllocAsync and cuMemFreeAsync; nothing: the stream is not being captured.
std::optional<CUresult> capture_allocation(CUstream stream, size_t bytes, int ordinal, CUdeviceptr* address);
std::optional<CUresult> capture_free(CUstream stream, CUdeviceptr address);

// The driver launches no graph in a stream that is being captured (measured, 580): a mistake that ends its capture.
// Nothing: the stream is none.
std::optional<CUresult> refuse_graph_launch(CUstream stream);

// The stream is about to be destroyed.
void capture_stream_destroyed(CUstream stream);
// A thread is at its end, and its default streams with it.
void capture_thread_ended(const Thread& thread);

}  // namespace xmig::client
