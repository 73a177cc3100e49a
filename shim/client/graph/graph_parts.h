// An executable graph in parts: collectives, or conditional nodes beside work that the program takes part in.
//
// What a conditional node does the device decides, so it goes to the server in a graph. What the program takes part in goes
// there record by record (graph_play.h), and collectives begin as they do outside of graphs. So the graph is divided: stretches
// that the device does alone are graphs of their own, what lies between is played, all in the stream of the launch and in an order
// that the edges allow.
//
// Collectives begin in the order in which they were captured. If what was captured next does not wait for them, they are in a *lane*
// of their own: a stream beside that of the launch, which is the first lane. (docs/decisions/0049-collectives-in-graphs.md)
//
// A kernel sets a condition in the driver's graph that it is in. So a conditional node and the kernels that set what it
// follows stay together, and so does whatever lies between them: there copies of page-locked memory get stand-ins
// (graph_stand_ins.h), as they do in bodies, events are waited for ahead of the part and recorded behind it, and host functions
// and memory operations are refused. (docs/decisions/0024-conditional-nodes.md)
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "client/graph/graph.h"
#include "client/graph/graph_lanes.h"
#include "client/graph/graph_stand_ins.h"

namespace xmig::client {

// Makes the server's executable graph of this number, or brings it up to date.
CUresult send_graph(const Graph& graph, uint64_t number, cuuint64_t flags, bool update);

// Under graphs_mutex().
class Parts {
 public:
  // `graph` and its nodes have to stay for as long as the parts; when its nodes change they are made anew.
  // The first lane is in a stream of the context's device.
  static CUresult make(const Graph& graph, cuuint64_t flags, Context& context, std::unique_ptr<Parts>& made);
  ~Parts();
  Parts(const Parts&) = delete;
  // Can it be launched? What cannot is launched in no part.
  CUresult check() const;
  CUresult launch(CUstream stream, Lanes& lanes);

 private:
  static constexpr size_t kStart = ~size_t{0};  // in place of a part: the beginning of the launch
  struct Wait {
    size_t lane;      // waits until
    size_t for_lane;  // has done
    size_t part;
  };
  struct Lane {
    Context* context;
    uint64_t communicator;  // 0: the launch's stream
  };
  struct Part {
    const Node* played = nullptr;  // or else:
    uint64_t graph = 0;            // the server's number of it
    std::vector<CUevent> awaited, recorded;
    std::unique_ptr<StandIns> stand_ins;
    std::vector<size_t> lanes{0};  // of collectives: one for each context
    std::vector<Wait> waits;
    std::map<size_t, std::unique_ptr<Mark>> marks;  // by lane: what others wait for
  };
  struct Item;
  class Division;
  class Plan;

  Parts() = default;
  CUresult add_graph(const Division& division, const std::vector<size_t>& items, cuuint64_t flags);
  static CUresult launch(const Part& part, CUstream stream);
  CUresult run(std::span<const CUstream> streams);
  CUresult run(const Part& part, std::span<const CUstream> streams) const;
  CUresult wait(const std::vector<Wait>& waits, std::span<const CUstream> streams) const;

  std::vector<Part> parts_;
  std::vector<Lane> lanes_;
  std::vector<Wait> at_end_;
  std::unique_ptr<Mark> start_;  // where somebody waits for it
  bool collectives_ = false;     // there are some: the first lane has to be of its device
  Mark entered_, left_;          // of a launch in a stream of another one
};

}  // namespace xmig::client
