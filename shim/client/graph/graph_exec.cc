// Executable graphs. The client keeps a copy of what each was made from: a change of one node makes it stale, and the
// next launch brings the server up to date with all of them at once.
#include <cstring>
#include <unordered_map>
#include <utility>

#include "client/bootstrap/message.h"
#include "client/bootstrap/process.h"
#include "client/graph/capture.h"
#include "client/graph/graph.h"
#include "client/graph/graph_conditions.h"
#include "client/graph/graph_lanes.h"
#include "client/graph/graph_order.h"
#include "client/graph/graph_parts.h"
#include "client/graph/graph_play.h"
#include "client/graph/graph_stand_ins.h"
#include "client/graph/graph_work.h"
#include "client/journal/append.h"
#include "client/journal/ring_writer.h"
#include "client/journal/streams.h"
#include "local.h"

namespace xmig::client {
namespace {

using journal::Kind;

struct Exec {
  uint64_t handle = 0;
  cuuint64_t flags = 0;
  Context* context = nullptr;
  std::unique_ptr<Graph> graph;
  bool played = false;           // record by record,
  std::unique_ptr<Parts> parts;  // or in parts, if it has conditional nodes or collectives
  bool on_server = false;
  bool stale = false;
  std::shared_ptr<void> only;  // that a conditional graph knows of it
  LaunchOrder order;
  Lanes lanes;
};

// Under graphs_mutex().
std::unordered_map<uint64_t, std::unique_ptr<Exec>>& execs() {
  static auto& all = *new std::unordered_map<uint64_t, std::unique_ptr<Exec>>;
  return all;
}

Exec* find_exec(CUgraphExec handle) {
  const auto found = execs().find(reinterpret_cast<uint64_t>(handle));
  return found == execs().end() ? nullptr : found->second.get();
}

// Brings the server up to date with the graph as it is now.
CUresult send(Exec& exec) {
  const bool conditional = exec.graph->conditional();
  if (conditional) {
    if (const CUresult error = check_conditions(*exec.graph); error != CUDA_SUCCESS) return error;
  }
  const bool played = has_program_in_it(*exec.graph);
  std::unique_ptr<Parts> parts;
  CUresult result = CUDA_SUCCESS;
  if ((played && conditional) || has_collectives(*exec.graph)) {
    const WithContext own(*exec.context);
    result = Parts::make(*exec.graph, exec.flags, *exec.context, parts);
  } else if (played) {
    std::vector<std::byte> image;
    result = serialise(*exec.graph, image) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;  // without a circle
  } else {
    result = send_graph(*exec.graph, exec.handle, exec.flags, exec.on_server);
    exec.on_server |= result == CUDA_SUCCESS;
  }
  if (result != CUDA_SUCCESS) return result;
  exec.played = played || parts != nullptr;
  exec.parts = std::move(parts);
  exec.stale = false;
  return CUDA_SUCCESS;
}

CUresult instantiate(CUgraphExec* out, CUgraph handle, cuuint64_t flags) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  constexpr cuuint64_t kKnown = CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH | CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD |
                                CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;
  if (flags & CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH) {
    say("graphs that kernels launch (CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH) are not supported under xMIG");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  if (!out || (flags & ~kKnown)) return CUDA_ERROR_INVALID_VALUE;
  const Current now = current(this_thread());
  if (now.error != CUDA_SUCCESS) return now.error;
  const std::lock_guard lock(graphs_mutex());
  Graph* const graph = find_graph(handle);
  if (!graph || graph->moved) return CUDA_ERROR_INVALID_VALUE;
  auto exec = std::make_unique<Exec>();
  exec->flags = flags;
  exec->context = now.context;
  exec->graph = graph->clone(false);
  if (graph->conditional()) {
    if (!graph->executable.expired()) return refuse_copy();
    exec->only = std::make_shared<int>();
  }
  exec->handle = create_handle(Kind::kGraphExec);
  if (!exec->handle) return CUDA_ERROR_OUT_OF_MEMORY;
  if (const CUresult error = send(*exec); error != CUDA_SUCCESS) {
    free_handle(exec->handle);
    return error;
  }
  graph->executable = exec->only;
  *out = reinterpret_cast<CUgraphExec>(exec->handle);
  execs().emplace(exec->handle, std::move(exec));
  return CUDA_SUCCESS;
}

// An executable graph's kernel stays in its context, whatever function it gets.
bool other_context(CUgraphNodeType type, const std::vector<Operation>& before, const std::vector<Operation>& after) {
  const Context* const old = context_of_kernel(type, before);
  const Context* const next = context_of_kernel(type, after);
  return old && next && old != next;
}

// Is `next` the same but for what its nodes do? Then its nodes get the names of the old ones.
CUgraphExecUpdateResult compare(const Graph& old, const Graph& next, const Node*& culprit) {
  if (old.nodes.size() != next.nodes.size()) return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
  std::unordered_map<const Node*, size_t> places, old_places;
  for (size_t i = 0; i < next.nodes.size(); ++i) {
    places.emplace(next.nodes[i].get(), i);
    old_places.emplace(old.nodes[i].get(), i);
  }
  for (size_t i = 0; i < next.nodes.size(); ++i) {
    const Node& before = *old.nodes[i];
    const Node& after = *next.nodes[i];
    culprit = &after;
    if (before.type != after.type || !before.collectives != !after.collectives) {
      return CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED;
    }
    if (before.dependencies.size() != after.dependencies.size()) return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
    for (size_t d = 0; d < after.dependencies.size(); ++d) {
      if (old_places.at(before.dependencies[d].on) != places.at(after.dependencies[d].on)) {
        return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
      }
    }
    if (other_context(after.type, before.operations, after.operations)) {
      return CU_GRAPH_EXEC_UPDATE_ERROR_UNSUPPORTED_FUNCTION_CHANGE;
    }
    if (before.choice != after.choice || before.bodies.size() != after.bodies.size()) {
      return CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED;
    }
    CUgraphExecUpdateResult inside = CU_GRAPH_EXEC_UPDATE_SUCCESS;
    if (before.child) inside = compare(*before.child, *after.child, culprit);
    for (size_t b = 0; b < after.bodies.size() && inside == CU_GRAPH_EXEC_UPDATE_SUCCESS; ++b) {
      inside = compare(*before.bodies[b], *after.bodies[b], culprit);
    }
    if (inside != CU_GRAPH_EXEC_UPDATE_SUCCESS) return inside;
  }
  culprit = nullptr;
  return CU_GRAPH_EXEC_UPDATE_SUCCESS;
}

void take_names(const Graph& old, Graph& next) {
  for (size_t i = 0; i < next.nodes.size(); ++i) {
    next.nodes[i]->origin = old.nodes[i]->origin;
    next.nodes[i]->enabled = old.nodes[i]->enabled;
    if (next.nodes[i]->child) take_names(*old.nodes[i]->child, *next.nodes[i]->child);
    for (size_t b = 0; b < next.nodes[i]->bodies.size(); ++b) {
      take_names(*old.nodes[i]->bodies[b], *next.nodes[i]->bodies[b]);
    }
  }
}

// A new content for one node of an executable graph. `make(work)`
template <typename Make>
CUresult change(CUgraphExec handle, CUgraphNode of, CUgraphNodeType type, Make&& make) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  const std::lock_guard lock(graphs_mutex());
  Exec* const exec = find_exec(handle);
  Node* const node = exec ? exec->graph->find_origin(reinterpret_cast<uint64_t>(of)) : nullptr;
  if (!node || node->type != type) return CUDA_ERROR_INVALID_VALUE;
  Work work;
  if (const CUresult error = make(work); error != CUDA_SUCCESS) return error;
  if (other_context(node->type, node->operations, work.operations)) return CUDA_ERROR_INVALID_VALUE;
  if (work.child) {  // has the same nodes, and they keep the names that the program knows them by
    const Node* culprit = nullptr;
    if (compare(*node->child, *work.child, culprit) != CU_GRAPH_EXEC_UPDATE_SUCCESS) {
      return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
    }
    take_names(*node->child, *work.child);
  }
  set_work(*node, std::move(work));
  exec->stale = true;
  return CUDA_SUCCESS;
}

CUresult launch(CUgraphExec handle, CUstream stream, bool upload) {
  Thread& thread = this_thread();
  if (const CUresult error = enter(thread); error != CUDA_SUCCESS) return error;
  if (!valid_stream(stream)) return CUDA_ERROR_INVALID_HANDLE;
  const std::lock_guard lock(graphs_mutex());
  Exec* const exec = find_exec(handle);
  if (!exec) return CUDA_ERROR_INVALID_VALUE;
  if (diverting() && !upload) {
    if (const auto refused = refuse_graph_launch(stream)) return *refused;
  }
  if (exec->stale) {
    if (const CUresult error = send(*exec); error != CUDA_SUCCESS) return error;
  }
  if (exec->parts && !upload) {
    if (const CUresult error = exec->parts->check(); error != CUDA_SUCCESS) return error;
  }
  if (!upload) {
    if (const CUresult error = exec->order.before(stream); error != CUDA_SUCCESS) return error;
  }
  if (exec->played && upload) return CUDA_SUCCESS;
  if (exec->parts) return exec->parts->launch(stream, exec->lanes);
  if (exec->played) return play(*exec->graph, stream);
  const Args_xmGraphLaunch args{
      .exec = exec->handle, .stream = reinterpret_cast<uint64_t>(stream), .upload = upload, .reserved = 0};
  return append(Op::xmGraphLaunch, &args, sizeof(args));
}

}  // namespace

void graphs_context_reset(const Context& context) {
  const std::lock_guard lock(graphs_mutex());
  StandIns::context_reset(context);
  std::erase_if(execs(), [&](const auto& entry) {
    if (entry.second->context != &context) return false;
    free_handle(entry.first);
    return true;
  });
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec* phGraphExec, CUgraph hGraph, unsigned long long flags) {
  return instantiate(phGraphExec, hGraph, flags);
}

CUresult cuGraphInstantiateWithParams(CUgraphExec* phGraphExec, CUgraph hGraph,
                                      CUDA_GRAPH_INSTANTIATE_PARAMS* instantiateParams) {
  if (!instantiateParams) return CUDA_ERROR_INVALID_VALUE;
  instantiateParams->hErrNode_out = nullptr;
  instantiateParams->result_out = CUDA_GRAPH_INSTANTIATE_SUCCESS;
  CUresult result = instantiate(phGraphExec, hGraph, instantiateParams->flags);
  if (result != CUDA_SUCCESS) {
    const std::lock_guard lock(graphs_mutex());
    const Graph* const graph = find_graph(hGraph);
    const bool unused = graph && has_unused_conditions(*graph);
    instantiateParams->result_out =
        unused ? CUDA_GRAPH_INSTANTIATE_CONDITIONAL_HANDLE_UNUSED : CUDA_GRAPH_INSTANTIATE_ERROR;
  }
  if (result == CUDA_SUCCESS && (instantiateParams->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD)) {
    result = client::cuGraphUpload(*phGraphExec, instantiateParams->hUploadStream);
  }
  return result;
}

CUresult cuGraphInstantiate_v2(CUgraphExec* phGraphExec, CUgraph hGraph, CUgraphNode* phErrorNode, char* logBuffer,
                               size_t bufferSize) {
  if (phErrorNode) *phErrorNode = nullptr;
  if (logBuffer && bufferSize) *logBuffer = 0;
  return instantiate(phGraphExec, hGraph, 0);
}

CUresult cuGraphInstantiate(CUgraphExec* phGraphExec, CUgraph hGraph, CUgraphNode* phErrorNode, char* logBuffer,
                            size_t bufferSize) {
  return client::cuGraphInstantiate_v2(phGraphExec, hGraph, phErrorNode, logBuffer, bufferSize);
}

CUresult cuGraphExecGetFlags(CUgraphExec hGraphExec, cuuint64_t* flags) {
  const std::lock_guard lock(graphs_mutex());
  const Exec* const exec = find_exec(hGraphExec);
  if (!exec || !flags) return CUDA_ERROR_INVALID_VALUE;
  *flags = exec->flags & ~cuuint64_t{CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD};
  return CUDA_SUCCESS;
}

CUresult cuGraphExecDestroy(CUgraphExec hGraphExec) {
  if (const CUresult error = initialized(); error != CUDA_SUCCESS) return error;
  const std::lock_guard lock(graphs_mutex());
  Exec* const exec = find_exec(hGraphExec);
  if (!exec) return CUDA_ERROR_INVALID_VALUE;
  const Args_xmGraphDestroy args{.exec = exec->handle};
  const CUresult result = exec->on_server ? append(Op::xmGraphDestroy, &args, sizeof(args)) : CUDA_SUCCESS;
  if (result != CUDA_SUCCESS) return result;
  free_handle(exec->handle);
  execs().erase(reinterpret_cast<uint64_t>(hGraphExec));
  return CUDA_SUCCESS;
}

CUresult cuGraphLaunch(CUgraphExec hGraph, CUstream hStream) { return launch(hGraph, hStream, false); }
CUresult cuGraphUpload(CUgraphExec hGraph, CUstream hStream) { return launch(hGraph, hStream, true); }

CUresult cuGraphExecUpdate_v2(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphExecUpdateResultInfo* resultInfo) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  if (!resultInfo) return CUDA_ERROR_INVALID_VALUE;
  *resultInfo = {};
  const std::lock_guard lock(graphs_mutex());
  Exec* const exec = find_exec(hGraphExec);
  const Graph* const graph = find_graph(hGraph);
  if (!exec || !graph || graph->moved) return CUDA_ERROR_INVALID_VALUE;
  const Node* culprit = nullptr;
  resultInfo->result = compare(*exec->graph, *graph, culprit);
  if (resultInfo->result != CU_GRAPH_EXEC_UPDATE_SUCCESS) {
    resultInfo->errorNode = culprit ? reinterpret_cast<CUgraphNode>(culprit->handle) : nullptr;
    return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
  }
  std::unique_ptr<Graph> next = graph->clone(false);
  take_names(*exec->graph, *next);
  std::swap(exec->graph, next);
  const bool was_stale = std::exchange(exec->stale, true);
  const CUresult result = send(*exec);
  if (result != CUDA_SUCCESS) {  // then it stays as it was
    std::swap(exec->graph, next);
    exec->stale = was_stale;
    resultInfo->result = CU_GRAPH_EXEC_UPDATE_ERROR;
  }
  return result;
}

CUresult cuGraphExecUpdate(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphNode* hErrorNode_out,
                           CUgraphExecUpdateResult* updateResult_out) {
  CUgraphExecUpdateResultInfo info{};
  const CUresult result = client::cuGraphExecUpdate_v2(hGraphExec, hGraph, &info);
  if (hErrorNode_out) *hErrorNode_out = info.errorNode;
  if (updateResult_out) *updateResult_out = info.result;
  return result;
}

// --- single nodes -----------------------------------------------------------------------------------------------

CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec hGraphExec, CUgraphNode hNode,
                                           const CUDA_KERNEL_NODE_PARAMS_v2* nodeParams) {
  if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
  return change(hGraphExec, hNode, CU_GRAPH_NODE_TYPE_KERNEL,
                [&](Work& work) { return make_kernel_work(*nodeParams, work); });
}

CUresult cuGraphExecKernelNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
                                        const CUDA_KERNEL_NODE_PARAMS_v1* nodeParams) {
  if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
  const CUDA_KERNEL_NODE_PARAMS_v1& p = *nodeParams;
  const CUDA_KERNEL_NODE_PARAMS_v2 wide{p.func,      p.gridDimX,       p.gridDimY,     p.gridDimZ,
                                        p.blockDimX, p.blockDimY,      p.blockDimZ,    p.sharedMemBytes,
                                        p.kernelParams, p.extra,       nullptr,        nullptr};
  return client::cuGraphExecKernelNodeSetParams_v2(hGraphExec, hNode, &wide);
}

CUresult cuGraphExecMemcpyNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_MEMCPY3D* copyParams,
                                        CUcontext ctx) {
  if (!copyParams) return CUDA_ERROR_INVALID_VALUE;
  return change(hGraphExec, hNode, CU_GRAPH_NODE_TYPE_MEMCPY,
                [&](Work& work) { return make_copy_work(*copyParams, ctx, work); });
}

CUresult cuGraphExecMemsetNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
                                        const CUDA_MEMSET_NODE_PARAMS* memsetParams, CUcontext ctx) {
  if (!memsetParams) return CUDA_ERROR_INVALID_VALUE;
  return change(hGraphExec, hNode, CU_GRAPH_NODE_TYPE_MEMSET,
                [&](Work& work) { return make_set_work(*memsetParams, ctx, work); });
}

CUresult cuGraphExecHostNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
                                      const CUDA_HOST_NODE_PARAMS* nodeParams) {
  if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
  return change(hGraphExec, hNode, CU_GRAPH_NODE_TYPE_HOST, [&](Work& work) { return make_host_work(*nodeParams, work); });
}

CUresult cuGraphExecChildGraphNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, CUgraph childGraph) {
  CUgraphNodeParams params{};
  params.type = CU_GRAPH_NODE_TYPE_GRAPH;
  params.graph.graph = childGraph;
  return client::cuGraphExecNodeSetParams(hGraphExec, hNode, &params);
}

CUresult cuGraphExecBatchMemOpNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
                                            const CUDA_BATCH_MEM_OP_NODE_PARAMS* nodeParams) {
  if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
  return change(hGraphExec, hNode, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP,
                [&](Work& work) { return make_memory_operation_work(*nodeParams, work); });
}

CUresult cuGraphExecEventRecordNodeSetEvent(CUgraphExec hGraphExec, CUgraphNode hNode, CUevent event) {
  return change(hGraphExec, hNode, CU_GRAPH_NODE_TYPE_EVENT_RECORD,
                [&](Work& work) { return make_event_work(CU_GRAPH_NODE_TYPE_EVENT_RECORD, event, work); });
}

CUresult cuGraphExecEventWaitNodeSetEvent(CUgraphExec hGraphExec, CUgraphNode hNode, CUevent event) {
  return change(hGraphExec, hNode, CU_GRAPH_NODE_TYPE_WAIT_EVENT,
                [&](Work& work) { return make_event_work(CU_GRAPH_NODE_TYPE_WAIT_EVENT, event, work); });
}

CUresult cuGraphExecNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, CUgraphNodeParams* nodeParams) {
  if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
  if (is_fixed(nodeParams->type)) return CUDA_ERROR_NOT_SUPPORTED;
  return change(hGraphExec, hNode, nodeParams->type, [&](Work& work) { return make_work(*nodeParams, nullptr, work); });
}

CUresult cuGraphNodeSetEnabled(CUgraphExec hGraphExec, CUgraphNode hNode, unsigned int isEnabled) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  const std::lock_guard lock(graphs_mutex());
  Exec* const exec = find_exec(hGraphExec);
  Node* const node = exec ? exec->graph->find_origin(reinterpret_cast<uint64_t>(hNode)) : nullptr;
  if (!node || node->type > CU_GRAPH_NODE_TYPE_MEMSET) return CUDA_ERROR_INVALID_VALUE;
  exec->stale |= node->enabled != (isEnabled != 0);
  node->enabled = isEnabled != 0;
  return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetEnabled(CUgraphExec hGraphExec, CUgraphNode hNode, unsigned int* isEnabled) {
  const std::lock_guard lock(graphs_mutex());
  Exec* const exec = find_exec(hGraphExec);
  const Node* const node = exec ? exec->graph->find_origin(reinterpret_cast<uint64_t>(hNode)) : nullptr;
  if (!node || !isEnabled || node->type > CU_GRAPH_NODE_TYPE_MEMSET) return CUDA_ERROR_INVALID_VALUE;
  *isEnabled = node->enabled;
  return CUDA_SUCCESS;
}

// --- memory of graphs: it has its place as long as the graph is there, so there is nothing that could be trimmed --

CUresult cuDeviceGraphMemTrim(CUdevice device) {
  return description(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attr, void* value) {
  if (!description(device)) return CUDA_ERROR_INVALID_DEVICE;
  if (!value || attr > CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH) return CUDA_ERROR_INVALID_VALUE;
  *static_cast<cuuint64_t*>(value) = graph_memory_bytes(device);
  return CUDA_SUCCESS;
}

CUresult cuDeviceSetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attr, void* value) {
  if (!description(device)) return CUDA_ERROR_INVALID_DEVICE;
  const bool high = attr == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH || attr == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH;
  return value && high && *static_cast<const cuuint64_t*>(value) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

}  // namespace xmig::client
