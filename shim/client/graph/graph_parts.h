// An executable graph in parts: conditional nodes beside work that the program takes part in.
//
// What a conditional node does the device decides, so it goes to the server in a graph. What the program takes part in goes
// there record by record (graph_play.h). So the graph is divided: stretches that the device does alone are graphs of their own,
// what lies between is played, all in the stream of the launch and in an order that the edges allow.
//
// A kernel sets a condition in the driver's graph that it is in. So a conditional node and the kernels that set what it
// follows stay together, and so does whatever lies between them: there copies of page-locked memory get stand-ins
// (graph_stand_ins.h), as they do in bodies, events are waited for ahead of the part and recorded behind it, and host functions
// and memory operations are refused. (docs/decisions/0024-conditional-nodes.md)
#pragma once

#include <cuda.h>

#include <memory>
#include <vector>

#include "client/graph/graph.h"
#include "client/graph/graph_stand_ins.h"

namespace xmig::client {

// Makes the server's executable graph of this number, or brings it up to date.
CUresult send_graph(const Graph& graph, uint64_t number, cuuint64_t flags, bool update);

// Under graphs_mutex().
class Parts {
 public:
  // `graph` and its nodes have to stay for as long as the parts; when its nodes change they are made anew.
  static CUresult make(const Graph& graph, cuuint64_t flags, std::unique_ptr<Parts>& made);
  ~Parts();
  Parts(const Parts&) = delete;
  CUresult launch(CUstream stream);

 private:
  struct Part {
    const Node* played = nullptr;  // or else:
    uint64_t graph = 0;            // the server's number of it
    std::vector<CUevent> awaited, recorded;
    std::unique_ptr<StandIns> stand_ins;
  };
  struct Item;
  class Division;

  Parts() = default;
  CUresult add_graph(const Division& division, const std::vector<size_t>& items, cuuint64_t flags);

  std::vector<Part> parts_;
};

}  // namespace xmig::client
