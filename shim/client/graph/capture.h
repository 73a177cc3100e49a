// Stream capture: work goes into a graph instead of the journal.
//
// Two things divert a record on its way into the journal (journal/diversion.h): a stream that is being captured, and a thread
// that collects operations to make a graph's node of them.
#pragma once

#include <cuda.h>

#include <optional>
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

}  // namespace xmig::client
