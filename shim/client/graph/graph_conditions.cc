#include "client/graph/graph_conditions.h"

#include <sys/random.h>

#include <algorithm>
#include <unordered_set>

#include "client/bootstrap/message.h"
#include "client/bootstrap/process.h"
#include "client/graph/graph_play.h"
#include "client/graph/graph_work.h"
#include "client/journal/append.h"
#include "client/journal/context.h"
#include "local.h"

namespace xmig::client {
namespace {

// The number of a condition is looked for in kernels' parameters, so nothing else may look like one. The upper 16 bits
// make it no address (those are sign-extended from bit 47 or 56), no small integer, and a floating-point number of no
// use; the others are random.
constexpr uint64_t kTag = 0xc3a5ull << 48;

// The numbers given out by this process, under graphs_mutex().
std::unordered_set<uint64_t>& numbers() {
  static auto& all = *new std::unordered_set<uint64_t>;
  return all;
}

uint64_t new_number() {
  uint64_t bits = 0;
  do {
    if (::getrandom(&bits, sizeof(bits), 0) != static_cast<ssize_t>(sizeof(bits))) return 0;
  } while (!numbers().insert(kTag | bits >> 16).second);
  return kTag | bits >> 16;
}

// The conditions of a graph and of those around it: what a node of it can follow.
bool can_follow(const Graph& graph, uint64_t number) {
  for (const Graph* around = &graph; around; around = around->within) {
    const auto& all = around->conditions;
    if (std::any_of(all.begin(), all.end(), [&](const Condition& c) { return c.number == number; })) return true;
  }
  return false;
}

void collect(const Graph& graph, std::unordered_set<uint64_t>& made, std::unordered_set<uint64_t>& followed) {
  for (const Condition& condition : graph.conditions) made.insert(condition.number);
  for (const auto& node : graph.nodes) {
    if (!node->bodies.empty()) followed.insert(node->condition);
    node->for_each_inside([&](const Graph& inside) { collect(inside, made, followed); });
  }
}

// What the device may do without anybody else.
bool can_be_in_body(CUgraphNodeType type) {
  return type == CU_GRAPH_NODE_TYPE_KERNEL || type == CU_GRAPH_NODE_TYPE_MEMCPY || type == CU_GRAPH_NODE_TYPE_MEMSET ||
         type == CU_GRAPH_NODE_TYPE_GRAPH || type == CU_GRAPH_NODE_TYPE_EMPTY || type == CU_GRAPH_NODE_TYPE_CONDITIONAL;
}

bool bodies_are_fine(const Graph& graph, bool in_body) {
  bool fine = true;
  for (const auto& node : graph.nodes) {
    fine = fine && (!in_body || can_be_in_body(node->type));
    const bool deeper = in_body || !node->bodies.empty();
    node->for_each_inside([&](const Graph& inside) { fine = fine && bodies_are_fine(inside, deeper); });
  }
  return fine;
}

bool collectives_in_bodies(const Graph& graph) {
  bool found = false;
  for (const auto& node : graph.nodes) {
    for (const auto& body : node->bodies) found = found || has_collectives(*body);
    if (node->child) found = found || collectives_in_bodies(*node->child);
  }
  return found;
}

}  // namespace

CUresult refuse_copy() {
  say("a graph with conditional nodes cannot be cloned, copied into a child node or captured stream, or be made "
      "executable twice at a time: CUDA does not allow it");
  return CUDA_ERROR_NOT_SUPPORTED;
}

bool has_unused_conditions(const Graph& graph) {
  std::unordered_set<uint64_t> made, followed;
  collect(graph, made, followed);
  return std::any_of(made.begin(), made.end(), [&](uint64_t number) { return !followed.contains(number); });
}

CUresult check_conditions(const Graph& graph) {
  if (has_unused_conditions(graph)) {
    say("a graph has a conditional handle that no conditional node uses");
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (!bodies_are_fine(graph, false)) {
    say("the body of a conditional node can have kernels, copies, memsets, child graphs, conditional and empty nodes only");
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (collectives_in_bodies(graph)) {
    say("the body of a conditional node cannot have collectives under xMIG: how often they run only the device would know");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  return CUDA_SUCCESS;
}

CUresult make_conditional_work(const CUDA_CONDITIONAL_NODE_PARAMS& params, const Graph& into, Work& work) {
  const unsigned int most = params.type == CU_GRAPH_COND_TYPE_WHILE ? 1 : params.type == CU_GRAPH_COND_TYPE_IF ? 2 : ~0u;
  if (params.type < CU_GRAPH_COND_TYPE_IF || params.type > CU_GRAPH_COND_TYPE_SWITCH || params.size < 1 ||
      params.size > most) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (!can_follow(into, params.handle)) return CUDA_ERROR_INVALID_VALUE;
  if (params.ctx && !find_context(params.ctx)) return CUDA_ERROR_INVALID_CONTEXT;
  work.type = CU_GRAPH_NODE_TYPE_CONDITIONAL;
  work.condition = params.handle;
  work.choice = params.type;
  for (unsigned int i = 0; i < params.size; ++i) {
    work.bodies.push_back(std::make_unique<Graph>(true));
    work.bodies.back()->moved = true;
  }
  return CUDA_SUCCESS;
}

CUresult cuGraphConditionalHandleCreate(CUgraphConditionalHandle* pHandle_out, CUgraph hGraph, CUcontext ctx,
                                        unsigned int defaultLaunchValue, unsigned int flags) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  if (!pHandle_out || (flags & ~static_cast<unsigned int>(CU_GRAPH_COND_ASSIGN_DEFAULT))) return CUDA_ERROR_INVALID_VALUE;
  if (ctx && !find_context(ctx)) return CUDA_ERROR_INVALID_CONTEXT;
  const std::lock_guard lock(graphs_mutex());
  Graph* const graph = find_graph(hGraph);
  if (!graph) return CUDA_ERROR_INVALID_VALUE;
  const uint64_t number = new_number();
  if (!number) return CUDA_ERROR_OPERATING_SYSTEM;
  graph->conditions.push_back({number, defaultLaunchValue, flags != 0});
  *pHandle_out = number;
  return CUDA_SUCCESS;
}

}  // namespace xmig::client
