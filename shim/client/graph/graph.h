// CUDA graphs, as the program builds them.
//
// A graph lives here, in the client: nodes, what they do, and what each waits for. What a node does is kept as the
// records that the same calls would have appended (Operation), so that a captured launch, an explicitly added kernel node
// and an ordinary launch are one thing. The server hears of a graph when it becomes executable: then it goes there whole,
// as an image (journal/graph_image.h).
//
// What lies in this folder: graphs, their nodes and their work, capture, and what becomes of a graph when it is executable: one of the
// driver's (graph_exec), in parts (graph_parts, graph_stand_ins, graph_lanes), or record by record (graph_play). All of it is under
// graphs_mutex(), captures too.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "client/journal/context.h"
#include "client/journal/diversion.h"
#include "client/memory/graph_memory.h"
#include "ops.h"

namespace xmig::client {

struct Graph;
struct Node;
struct UserObject;

// One record's worth of work.
struct Operation {
  Op op;
  std::vector<std::byte> arguments, payload;

  template <typename Args>
  Args as() const {
    Args args;
    std::memcpy(&args, arguments.data(), sizeof(args));
    return args;
  }
};

// A value that kernels set and conditional nodes follow (cuGraphConditionalHandleCreate). Its number travels to kernels in
// their parameters, where it has to be recognised: docs/decisions/0024-conditional-nodes.md.
struct Condition {
  uint64_t number = 0;
  uint32_t value = 0;     // what it is when a launch begins,
  bool assigned = false;  // if this; otherwise a kernel has to set it first
};

// Collectives that begin together. What they are, client/collectives knows, which stands above this folder.
class Collectives {
 public:
  virtual ~Collectives() = default;
  // Can they begin?
  virtual CUresult check() const = 0;
  // Of which contexts are their communicators? Each once.
  virtual std::span<Context* const> contexts() const = 0;
  // The first one of these: a number that is never used again.
  virtual uint64_t communicator() const = 0;
  // In `stream_of(context)`.
  virtual CUresult begin(const std::function<CUstream(const Context&)>& stream_of) const = 0;
};

struct Node {
  uint64_t handle = 0;  // 0 in an executable graph, whose nodes the program names by those they were copied from
  uint64_t origin = 0;  // of a copy: the handle of the node that it was made from
  Graph* graph = nullptr;
  CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
  std::vector<Operation> operations;  // done one after the other
  std::shared_ptr<const Collectives> collectives;
  std::vector<Dependency> dependencies;
  CUevent event = nullptr;
  std::unique_ptr<Graph> child;
  // Of a conditional node: which condition decides which of the bodies runs, and how often.
  uint64_t condition = 0;
  CUgraphConditionalNodeType choice = CU_GRAPH_COND_TYPE_IF;
  std::vector<std::unique_ptr<Graph>> bodies;
  std::vector<CUgraph> body_handles;  // the program has this array for as long as the node is there
  CUDA_MEM_ALLOC_NODE_PARAMS allocation{};  // of memory nodes; a free node only has the address
  bool enabled = true;
  // What the parameters were set to, where the records do not say all of it.
  std::optional<CUDA_MEMCPY3D> copy;
  std::vector<CUstreamBatchMemOpParams> memory_operations;
  std::vector<void*> parameter_pointers;  // what a question for the parameters was answered with

  // f(graph) for each graph that is part of this node.
  template <typename F>
  void for_each_inside(F&& f) const {
    if (child) f(*child);
    for (const auto& body : bodies) f(*body);
  }
};

struct Graph {
  explicit Graph(bool named);
  ~Graph();
  Graph(const Graph&) = delete;

  Node& add(CUgraphNodeType type, std::vector<Dependency> dependencies);
  // One like this, which knows its origin, and waits for nothing yet.
  Node& add_like(const Node& node, bool named);
  void remove(Node& node);
  // A copy whose nodes know their origins; `named`: the program gets to see it.
  std::unique_ptr<Graph> clone(bool named) const;
  Node* find_origin(uint64_t handle);
  // Is it this graph, or one that a node of it contains, at any depth?
  bool contains(const Graph& graph) const;
  // Has it conditions or conditional nodes, at any depth? Such a graph is not copied for the program.
  bool conditional() const;
  // As they were added, but each after those that it waits for; empty if there is a circle.
  std::vector<Node*> in_order() const;

  uint64_t handle = 0;
  bool moved = false;  // into a node, for good: it cannot be used by itself any more
  const Graph* within = nullptr;  // the graph that has the node
  std::vector<Condition> conditions;
  std::weak_ptr<void> executable;  // what is made of a conditional graph: there is one at a time
  std::vector<std::unique_ptr<Node>> nodes;  // as they were added
  std::vector<std::shared_ptr<GraphMemory>> memory;
  std::map<UserObject*, unsigned int> user_objects;  // how many references
};

// Over all graphs, executables and captures. Recursive: a function of the driver may use another.
std::recursive_mutex& graphs_mutex();

// Under the mutex; nullptr for what is none.
Graph* find_graph(CUgraph handle);
Node* find_node(CUgraphNode handle);
// A graph that the program owns from now on.
CUgraph publish(std::unique_ptr<Graph> graph);
// Takes it back; nullptr if it is not one that can be destroyed.
std::unique_ptr<Graph> unpublish(CUgraph handle);

// The image of a graph for the server. False: it has a circle.
bool serialise(const Graph& graph, std::vector<std::byte>& image);

void retain(UserObject& object, unsigned int count);
void release(UserObject& object, unsigned int count);

// The context was reset: executables that belong to it are gone.
void graphs_context_reset(const Context& context);

}  // namespace xmig::client
