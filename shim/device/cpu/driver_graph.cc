// Graphs, as far as a server needs them: captured from a stream, launched as one piece of work. A graph's work is done in
// the order in which it was captured, which every one of its edges allows.
#include "device/cpu/api.h"
#include "device/cpu/driver.h"

namespace xmig::device::cpu {
namespace {

// Handles of conditions: counted, in a range where nothing else is.
constexpr uint64_t kFirstCondition = 0x1d1e000000000000;
uint64_t conditions_made = 0;  // under the device's lock

// Nodes are only named, to be given back as dependencies: their numbers count the work of the graph.
CUgraphNode node_of(const GraphBody& body) { return as_handle<CUgraphNode>(0x10000 + body.work.size()); }

// body(CpuDevice&, graph)
template <typename Body>
CUresult with_graph(uint64_t handle, Body&& body) {
  return api([&](CpuDevice& device, Lock&) -> CUresult {
    std::shared_ptr<GraphBody>* const graph = device.graphs.find(handle);
    if (!graph) return CUDA_ERROR_INVALID_VALUE;
    return body(device, *graph);
  });
}

CUresult create(CUgraph* out, unsigned flags) {
  if (!out || flags) return CUDA_ERROR_INVALID_VALUE;
  return api([&](CpuDevice& device, Lock&) {
    *out = as_handle<CUgraph>(device.graphs.add(std::make_shared<GraphBody>()));
    return CUDA_SUCCESS;
  });
}

CUresult destroy(uint64_t handle) {
  return with_graph(handle, [&](CpuDevice& device, std::shared_ptr<GraphBody>&) {
    device.graphs.remove(handle);
    return CUDA_SUCCESS;
  });
}

// The handles of a graph and of the bodies in it.
void forget(CpuDevice& device, uint64_t handle) {
  std::shared_ptr<GraphBody>* const found = device.graphs.find(handle);
  if (!found) return;
  const std::shared_ptr<GraphBody> graph = *found;
  device.graphs.remove(handle);
  for (const auto& bodies : graph->inside) {
    for (const CUgraph body : bodies) forget(device, number(body));
  }
}

CUresult destroy_graph(CUgraph graph) {
  return with_graph(number(graph), [&](CpuDevice& device, std::shared_ptr<GraphBody>&) {
    forget(device, number(graph));
    return CUDA_SUCCESS;
  });
}

CUresult create_condition(CUgraphConditionalHandle* out, CUgraph handle, CUcontext, unsigned value, unsigned flags) {
  if (!out || (flags & ~unsigned{CU_GRAPH_COND_ASSIGN_DEFAULT})) return CUDA_ERROR_INVALID_VALUE;
  return with_graph(number(handle), [&](CpuDevice&, std::shared_ptr<GraphBody>& graph) {
    *out = kFirstCondition + ++conditions_made;
    graph->conditions.emplace(*out, flags ? value : 0);
    return CUDA_SUCCESS;
  });
}

// Conditional nodes only.
CUresult add_node(CUgraphNode* out, CUgraph handle, const CUgraphNode*, const CUgraphEdgeData*, size_t,
                  CUgraphNodeParams* params) {
  if (!out || !params) return CUDA_ERROR_INVALID_VALUE;
  if (params->type != CU_GRAPH_NODE_TYPE_CONDITIONAL) return CUDA_ERROR_NOT_SUPPORTED;
  CUDA_CONDITIONAL_NODE_PARAMS& choice = params->conditional;
  const bool one_or_two = choice.type == CU_GRAPH_COND_TYPE_IF && choice.size <= 2;
  const bool fits = one_or_two || choice.type == CU_GRAPH_COND_TYPE_SWITCH ||
                    (choice.type == CU_GRAPH_COND_TYPE_WHILE && choice.size == 1);
  if (!fits || choice.size == 0 || choice.handle <= kFirstCondition) return CUDA_ERROR_INVALID_VALUE;
  return with_graph(number(handle), [&](CpuDevice& device, std::shared_ptr<GraphBody>& found) -> CUresult {
    if (choice.handle > kFirstCondition + conditions_made) return CUDA_ERROR_INVALID_VALUE;
    const std::shared_ptr<GraphBody> graph = found;  // `found` moves when handles are made
    ChoiceWork work{choice.handle, choice.type, {}};
    std::vector<CUgraph>& handles = graph->inside.emplace_back();
    for (unsigned i = 0; i < choice.size; ++i) {
      work.bodies.push_back(std::make_shared<GraphBody>());
      handles.push_back(as_handle<CUgraph>(device.graphs.add(work.bodies.back())));
    }
    choice.phGraph_out = handles.data();
    graph->work.push_back(std::move(work));
    *out = node_of(*graph);
    return CUDA_SUCCESS;
  });
}

CUresult add_empty(CUgraphNode* out, CUgraph handle, const CUgraphNode*, size_t) {
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  return with_graph(number(handle), [&](CpuDevice&, std::shared_ptr<GraphBody>& graph) {
    *out = node_of(*graph);
    return CUDA_SUCCESS;
  });
}

CUresult begin_capture(CUstream handle, CUgraph graph, const CUgraphNode*, const CUgraphEdgeData*, size_t,
                       CUstreamCaptureMode) {
  return on_stream(handle, [&](CpuDevice& device, Stream& stream, Lock&) -> CUresult {
    std::shared_ptr<GraphBody>* const body = device.graphs.find(number(graph));
    if (!body || stream.capturing || stream.kind() == StreamKind::kLegacy) return CUDA_ERROR_INVALID_VALUE;
    stream.capturing = *body;
    stream.captured = graph;
    return CUDA_SUCCESS;
  });
}

CUresult end_capture(CUstream handle, CUgraph* graph) {
  return on_stream(handle, [&](CpuDevice&, Stream& stream, Lock&) -> CUresult {
    if (!stream.capturing) return CUDA_ERROR_ILLEGAL_STATE;
    stream.capturing.reset();
    *graph = stream.captured;
    return CUDA_SUCCESS;
  });
}

CUresult capture_info(CUstream handle, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                      const CUgraphNode** dependencies, const CUgraphEdgeData** edges, size_t* count) {
  return on_stream(handle, [&](CpuDevice&, Stream& stream, Lock&) -> CUresult {
    *status = stream.capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    if (!stream.capturing) return CUDA_SUCCESS;
    stream.last_captured = node_of(*stream.capturing);
    if (id) *id = 1;
    if (graph) *graph = stream.captured;
    if (dependencies) *dependencies = &stream.last_captured;
    if (edges) *edges = nullptr;
    if (count) *count = 1;
    return CUDA_SUCCESS;
  });
}

// An executable graph shares the work, which is never changed: what is updated is which work it shares.
CUresult instantiate(CUgraphExec* out, CUgraph handle, unsigned long long) {
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  return with_graph(number(handle), [&](CpuDevice& device, std::shared_ptr<GraphBody>& graph) {
    const std::shared_ptr<GraphBody> shared = graph;
    *out = as_handle<CUgraphExec>(device.graphs.add(shared));
    return CUDA_SUCCESS;
  });
}

CUresult update(CUgraphExec handle, CUgraph from, CUgraphExecUpdateResultInfo* info) {
  *info = {};
  return with_graph(number(handle), [&](CpuDevice& device, std::shared_ptr<GraphBody>& exec) -> CUresult {
    std::shared_ptr<GraphBody>* const graph = device.graphs.find(number(from));
    if (!graph) return CUDA_ERROR_INVALID_VALUE;
    exec = *graph;
    return CUDA_SUCCESS;
  });
}

CUresult launch(CUgraphExec handle, CUstream stream_handle) {
  return on_stream(stream_handle, [&](CpuDevice& device, Stream& stream, Lock&) -> CUresult {
    std::shared_ptr<GraphBody>* const body = device.graphs.find(number(handle));
    if (!body) return CUDA_ERROR_INVALID_VALUE;
    return enqueue(stream, GraphWork{*body});
  });
}

}  // namespace

void add_graph_functions(DriverTable& table) {
  table.cuGraphCreate = create;
  table.cuGraphDestroy = destroy_graph;
  table.cuGraphConditionalHandleCreate = create_condition;
  table.cuGraphAddNode_v2 = add_node;
  table.cuGraphAddEmptyNode = add_empty;
  table.cuStreamBeginCaptureToGraph = begin_capture;
  table.cuStreamEndCapture = end_capture;
  table.cuStreamGetCaptureInfo_v3 = capture_info;
  table.cuGraphInstantiateWithFlags = instantiate;
  table.cuGraphExecUpdate_v2 = update;
  table.cuGraphUpload = [](CUgraphExec, CUstream) { return CUDA_SUCCESS; };
  table.cuGraphLaunch = launch;
  table.cuGraphExecDestroy = [](CUgraphExec exec) { return destroy(number(exec)); };
}

}  // namespace xmig::device::cpu
