// Stream capture: work goes into a graph instead of the journal.
//
// Two things divert a record on its way into the journal (journal/diversion.h): a stream that is being captured, and a thread
// that collects operations to make a graph's node of them.
#pragma once

#include <cuda.h>

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "client/graph/graph.h"
#include "client/journal/thread.h"

namespace xmig::client {

// The calling thread's records become operations for as long as one of these lives.
class Collect {
 public:
  explicit Collect(std::vector<Operation>& into);
  ~Collect();
  Collect(const Collect&) = delete;

 private:
  Thread& thread_;
};

// The driver launches no graph in a stream that is being captured (measured, 580): a mistake that ends its capture.
// Nothing: the stream is none.
std::optional<CUresult> refuse_graph_launch(CUstream stream);

// Which capture the stream takes part in, 0: none. An error: work in it would break one.
CUresult find_capture(CUstream stream, uint64_t& capture);
// They become a node of this capture, in which all of these streams take part.
CUresult capture_collectives(uint64_t capture, std::span<const CUstream> streams, std::shared_ptr<const Collectives> collectives);

}  // namespace xmig::client
