// The launches of one executable graph: each comes after the one before it, in whatever streams they are.
//
// The driver orders those of one graph of its own. Here they may be several (one that is made anew when its nodes have
// changed), or none (a graph that the program takes part in is appended record by record), so the journal says it: an
// event in the stream of the last launch, which the next one's waits for. In one and the same stream there is nothing to
// say. What else the other stream was given meanwhile is waited for, too.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "client/graph/graph_lanes.h"

namespace xmig::client {

struct Context;

// Under graphs_mutex().
class LaunchOrder {
 public:
  // Before a launch in this stream.
  CUresult before(CUstream stream);

 private:
  CUresult follow(CUstream stream);

  uint64_t key_ = 0;  // of the last launch's stream, 0: there was none
  CUstream stream_ = nullptr;
  uint64_t stream_id_ = 0;
  Context* context_ = nullptr;  // the stream's
  Mark mark_;
};

}  // namespace xmig::client
