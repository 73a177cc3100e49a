// The driver's functions that build a graph and look at it.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "client/bootstrap/message.h"
#include "client/bootstrap/process.h"
#include "client/graph/capture.h"
#include "client/graph/graph.h"
#include "client/graph/graph_conditions.h"
#include "client/graph/graph_work.h"
#include "client/journal/append.h"
#include "local.h"

namespace xmig::client {
namespace {

CUgraphNode handle_of(const Node& node) { return reinterpret_cast<CUgraphNode>(node.handle); }

// Adds a node with this work. `make(work)` says what it is.
template <typename Make>
CUresult add(CUgraphNode* out, CUgraph handle, const CUgraphNode* dependencies, const CUgraphEdgeData* edges,
             size_t count, Make&& make) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  if (!out || (count && !dependencies)) return CUDA_ERROR_INVALID_VALUE;
  const std::lock_guard lock(graphs_mutex());
  Graph* const graph = find_graph(handle);
  if (!graph) return CUDA_ERROR_INVALID_VALUE;
  std::vector<Dependency> after;
  for (size_t i = 0; i < count; ++i) {
    Node* const node = find_node(dependencies[i]);
    if (!node || node->graph != graph) return CUDA_ERROR_INVALID_VALUE;
    after.push_back({node, edges ? edges[i] : CUgraphEdgeData{}});
  }
  Work work;
  if (const CUresult error = make(work); error != CUDA_SUCCESS) return error;
  Node& node = graph->add(work.type, std::move(after));
  if (work.memory) graph->memory.push_back(work.memory);
  node.allocation = work.allocation;
  set_work(node, std::move(work));
  *out = handle_of(node);
  return CUDA_SUCCESS;
}

// The node, if it is one of this type. body(node)
template <typename Body>
CUresult with_node(CUgraphNode handle, CUgraphNodeType type, Body&& body) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  const std::lock_guard lock(graphs_mutex());
  Node* const node = find_node(handle);
  if (!node || node->type != type) return CUDA_ERROR_INVALID_VALUE;
  return body(*node);
}

template <typename Make>
CUresult change(CUgraphNode handle, CUgraphNodeType type, Make&& make) {
  return with_node(handle, type, [&](Node& node) {
    Work work;
    const CUresult error = make(work);
    if (error == CUDA_SUCCESS) set_work(node, std::move(work));
    return error;
  });
}

CUDA_KERNEL_NODE_PARAMS_v2 widen(const CUDA_KERNEL_NODE_PARAMS_v1& p) {
  return {p.func,      p.gridDimX,       p.gridDimY,     p.gridDimZ, p.blockDimX, p.blockDimY,
          p.blockDimZ, p.sharedMemBytes, p.kernelParams, p.extra,    nullptr,     nullptr};
}

// The driver's way to return a list: how many there are, or as many as there is room for.
template <typename T>
CUresult give(const std::vector<T>& all, T* out, size_t* count) {
  if (!count) return CUDA_ERROR_INVALID_VALUE;
  if (!out) {
    *count = all.size();
    return CUDA_SUCCESS;
  }
  const size_t room = *count;
  for (size_t i = 0; i < room; ++i) out[i] = i < all.size() ? all[i] : T{};
  *count = std::min(room, all.size());
  return CUDA_SUCCESS;
}

struct Edges {
  std::vector<CUgraphNode> from, to;
  std::vector<CUgraphEdgeData> data;

  void add(const Node& node) {
    for (const Dependency& d : node.dependencies) {
      from.push_back(handle_of(*d.on));
      to.push_back(handle_of(node));
      data.push_back(d.edge);
    }
  }
  // Without a place for what an edge is, edges that are more than an order cannot be determined.
  bool plain() const {
    return std::all_of(data.begin(), data.end(),
                       [](const CUgraphEdgeData& e) { return !e.from_port && !e.to_port && !e.type; });
  }
};

CUresult give_edges(const Edges& edges, const std::vector<CUgraphNode>* first, CUgraphNode* first_out,
                    const std::vector<CUgraphNode>* second, CUgraphNode* second_out, CUgraphEdgeData* data_out,
                    size_t* count) {
  if (!count) return CUDA_ERROR_INVALID_VALUE;
  const size_t room = *count;
  if (first_out && !data_out && !edges.plain()) return CUDA_ERROR_LOSSY_QUERY;
  CUresult result = give(*first, first_out, count);
  if (second && second_out) {
    *count = room;
    result = give(*second, second_out, count);
  }
  if (data_out && first_out) {
    *count = room;
    result = give(edges.data, data_out, count);
  }
  return result;
}

const char* name_of(CUgraphNodeType type) {
  switch (type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: return "kernel";
    case CU_GRAPH_NODE_TYPE_MEMCPY: return "memcpy";
    case CU_GRAPH_NODE_TYPE_MEMSET: return "memset";
    case CU_GRAPH_NODE_TYPE_HOST: return "host";
    case CU_GRAPH_NODE_TYPE_GRAPH: return "graph";
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT: return "event wait";
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD: return "event record";
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC: return "allocate";
    case CU_GRAPH_NODE_TYPE_MEM_FREE: return "free";
    case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP: return "memory operation";
    case CU_GRAPH_NODE_TYPE_CONDITIONAL: return "conditional";
    default: return "empty";
  }
}

}  // namespace

// --- graphs -----------------------------------------------------------------------------------------------------

CUresult cuGraphCreate(CUgraph* phGraph, unsigned int flags) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  if (!phGraph || flags) return CUDA_ERROR_INVALID_VALUE;
  const std::lock_guard lock(graphs_mutex());
  *phGraph = publish(std::make_unique<Graph>(true));
  return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph hGraph) {
  if (const CUresult error = initialized(); error != CUDA_SUCCESS) return error;
  const std::lock_guard lock(graphs_mutex());
  return unpublish(hGraph) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphClone(CUgraph* phGraphClone, CUgraph originalGraph) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  const std::lock_guard lock(graphs_mutex());
  const Graph* const graph = find_graph(originalGraph);
  if (!graph || !phGraphClone) return CUDA_ERROR_INVALID_VALUE;
  if (graph->conditional()) return refuse_copy();
  *phGraphClone = publish(graph->clone(true));
  return CUDA_SUCCESS;
}

CUresult cuGraphNodeFindInClone(CUgraphNode* phNode, CUgraphNode hOriginalNode, CUgraph hClonedGraph) {
  const std::lock_guard lock(graphs_mutex());
  Graph* const graph = find_graph(hClonedGraph);
  if (!phNode || !graph) return CUDA_ERROR_INVALID_VALUE;
  Node* const node = graph->find_origin(reinterpret_cast<uint64_t>(hOriginalNode));
  if (!node) return CUDA_ERROR_INVALID_VALUE;
  *phNode = handle_of(*node);
  return CUDA_SUCCESS;
}

// --- adding nodes -----------------------------------------------------------------------------------------------

CUresult cuGraphAddKernelNode_v2(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                                 size_t numDependencies, const CUDA_KERNEL_NODE_PARAMS_v2* nodeParams) {
  if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
  return add(phGraphNode, hGraph, dependencies, nullptr, numDependencies,
             [&](Work& work) { return make_kernel_work(*nodeParams, work); });
}

CUresult cuGraphAddKernelNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                              size_t numDependencies, const CUDA_KERNEL_NODE_PARAMS_v1* nodeParams) {
  if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
  const CUDA_KERNEL_NODE_PARAMS_v2 params = widen(*nodeParams);
  return client::cuGraphAddKernelNode_v2(phGraphNode, hGraph, dependencies, numDependencies, &params);
}

CUresult cuGraphAddMemcpyNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                              size_t numDependencies, const CUDA_MEMCPY3D* copyParams, CUcontext ctx) {
  if (!copyParams) return CUDA_ERROR_INVALID_VALUE;
  return add(phGraphNode, hGraph, dependencies, nullptr, numDependencies,
             [&](Work& work) { return make_copy_work(*copyParams, ctx, work); });
}

CUresult cuGraphAddMemsetNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                              size_t numDependencies, const CUDA_MEMSET_NODE_PARAMS* memsetParams, CUcontext ctx) {
  if (!memsetParams) return CUDA_ERROR_INVALID_VALUE;
  return add(phGraphNode, hGraph, dependencies, nullptr, numDependencies,
             [&](Work& work) { return make_set_work(*memsetParams, ctx, work); });
}

CUresult cuGraphAddHostNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                            size_t numDependencies, const CUDA_HOST_NODE_PARAMS* nodeParams) {
  if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
  return add(phGraphNode, hGraph, dependencies, nullptr, numDependencies,
             [&](Work& work) { return make_host_work(*nodeParams, work); });
}

CUresult cuGraphAddChildGraphNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                                  size_t numDependencies, CUgraph childGraph) {
  return add(phGraphNode, hGraph, dependencies, nullptr, numDependencies,
             [&](Work& work) { return make_child_work(childGraph, true, work); });
}

CUresult cuGraphAddEmptyNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                             size_t numDependencies) {
  return add(phGraphNode, hGraph, dependencies, nullptr, numDependencies, [](Work&) { return CUDA_SUCCESS; });
}

CUresult cuGraphAddEventRecordNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                                   size_t numDependencies, CUevent event) {
  return add(phGraphNode, hGraph, dependencies, nullptr, numDependencies,
             [&](Work& work) { return make_event_work(CU_GRAPH_NODE_TYPE_EVENT_RECORD, event, work); });
}

CUresult cuGraphAddEventWaitNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                                 size_t numDependencies, CUevent event) {
  return add(phGraphNode, hGraph, dependencies, nullptr, numDependencies,
             [&](Work& work) { return make_event_work(CU_GRAPH_NODE_TYPE_WAIT_EVENT, event, work); });
}

CUresult cuGraphAddBatchMemOpNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                                  size_t numDependencies, const CUDA_BATCH_MEM_OP_NODE_PARAMS* nodeParams) {
  if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
  return add(phGraphNode, hGraph, dependencies, nullptr, numDependencies,
             [&](Work& work) { return make_memory_operation_work(*nodeParams, work); });
}

CUresult cuGraphAddMemAllocNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                                size_t numDependencies, CUDA_MEM_ALLOC_NODE_PARAMS* nodeParams) {
  if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
  return add(phGraphNode, hGraph, dependencies, nullptr, numDependencies,
             [&](Work& work) { return make_allocation_work(*nodeParams, work); });
}

CUresult cuGraphAddMemFreeNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                               size_t numDependencies, CUdeviceptr dptr) {
  return add(phGraphNode, hGraph, dependencies, nullptr, numDependencies,
             [&](Work& work) { return make_free_work(dptr, work); });
}

CUresult cuGraphAddNode_v2(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                           const CUgraphEdgeData* dependencyData, size_t numDependencies,
                           CUgraphNodeParams* nodeParams) {
  if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
  const CUresult result = add(phGraphNode, hGraph, dependencies, dependencyData, numDependencies,
                              [&](Work& work) { return make_work(*nodeParams, find_graph(hGraph), work); });
  if (result == CUDA_SUCCESS && nodeParams->type == CU_GRAPH_NODE_TYPE_GRAPH) {
    return client::cuGraphChildGraphNodeGetGraph(*phGraphNode, &nodeParams->graph.graph);
  }
  if (result == CUDA_SUCCESS && nodeParams->type == CU_GRAPH_NODE_TYPE_CONDITIONAL) {
    const std::lock_guard lock(graphs_mutex());
    nodeParams->conditional.phGraph_out = find_node(*phGraphNode)->body_handles.data();
  }
  return result;
}

CUresult cuGraphAddNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies,
                        size_t numDependencies, CUgraphNodeParams* nodeParams) {
  return client::cuGraphAddNode_v2(phGraphNode, hGraph, dependencies, nullptr, numDependencies, nodeParams);
}

CUresult cuGraphDestroyNode(CUgraphNode hNode) {
  const std::lock_guard lock(graphs_mutex());
  Node* const node = find_node(hNode);
  if (!node) return CUDA_ERROR_INVALID_VALUE;
  node->graph->remove(*node);
  return CUDA_SUCCESS;
}

// --- what a node does -------------------------------------------------------------------------------------------

CUresult cuGraphNodeGetType(CUgraphNode hNode, CUgraphNodeType* type) {
  const std::lock_guard lock(graphs_mutex());
  const Node* const node = find_node(hNode);
  if (!node || !type) return CUDA_ERROR_INVALID_VALUE;
  *type = node->type;
  return CUDA_SUCCESS;
}

CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode hNode, CUDA_KERNEL_NODE_PARAMS_v2* nodeParams) {
  if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
  return with_node(hNode, CU_GRAPH_NODE_TYPE_KERNEL, [&](Node& node) { return read_kernel(node, *nodeParams); });
}

CUresult cuGraphKernelNodeGetParams(CUgraphNode hNode, CUDA_KERNEL_NODE_PARAMS_v1* nodeParams) {
  CUDA_KERNEL_NODE_PARAMS_v2 wide{};
  if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
  const CUresult result = client::cuGraphKernelNodeGetParams_v2(hNode, &wide);
  if (result == CUDA_SUCCESS) {
    *nodeParams = {wide.func,      wide.gridDimX,       wide.gridDimY,     wide.gridDimZ, wide.blockDimX, wide.blockDimY,
                   wide.blockDimZ, wide.sharedMemBytes, wide.kernelParams, wide.extra};
  }
  return result;
}

CUresult cuGraphKernelNodeSetParams_v2(CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS_v2* nodeParams) {
  if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
  return change(hNode, CU_GRAPH_NODE_TYPE_KERNEL, [&](Work& work) { return make_kernel_work(*nodeParams, work); });
}

CUresult cuGraphKernelNodeSetParams(CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS_v1* nodeParams) {
  if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
  const CUDA_KERNEL_NODE_PARAMS_v2 params = widen(*nodeParams);
  return client::cuGraphKernelNodeSetParams_v2(hNode, &params);
}

CUresult cuGraphMemcpyNodeGetParams(CUgraphNode hNode, CUDA_MEMCPY3D* nodeParams) {
  if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
  return with_node(hNode, CU_GRAPH_NODE_TYPE_MEMCPY, [&](Node& node) { return read_copy(node, *nodeParams); });
}

CUresult cuGraphMemcpyNodeSetParams(CUgraphNode hNode, const CUDA_MEMCPY3D* nodeParams) {
  if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
  return change(hNode, CU_GRAPH_NODE_TYPE_MEMCPY, [&](Work& work) { return make_copy_work(*nodeParams, nullptr, work); });
}

CUresult cuGraphMemsetNodeGetParams(CUgraphNode hNode, CUDA_MEMSET_NODE_PARAMS* nodeParams) {
  if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
  return with_node(hNode, CU_GRAPH_NODE_TYPE_MEMSET, [&](Node& node) { return read_set(node, *nodeParams); });
}

CUresult cuGraphMemsetNodeSetParams(CUgraphNode hNode, const CUDA_MEMSET_NODE_PARAMS* nodeParams) {
  if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
  return change(hNode, CU_GRAPH_NODE_TYPE_MEMSET, [&](Work& work) { return make_set_work(*nodeParams, nullptr, work); });
}

CUresult cuGraphHostNodeGetParams(CUgraphNode hNode, CUDA_HOST_NODE_PARAMS* nodeParams) {
  if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
  return with_node(hNode, CU_GRAPH_NODE_TYPE_HOST, [&](Node& node) { return read_host(node, *nodeParams); });
}

CUresult cuGraphHostNodeSetParams(CUgraphNode hNode, const CUDA_HOST_NODE_PARAMS* nodeParams) {
  if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
  return change(hNode, CU_GRAPH_NODE_TYPE_HOST, [&](Work& work) { return make_host_work(*nodeParams, work); });
}

CUresult cuGraphBatchMemOpNodeGetParams(CUgraphNode hNode, CUDA_BATCH_MEM_OP_NODE_PARAMS* nodeParams_out) {
  if (!nodeParams_out) return CUDA_ERROR_INVALID_VALUE;
  return with_node(hNode, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP,
                   [&](Node& node) { return read_memory_operations(node, *nodeParams_out); });
}

CUresult cuGraphBatchMemOpNodeSetParams(CUgraphNode hNode, const CUDA_BATCH_MEM_OP_NODE_PARAMS* nodeParams) {
  if (!nodeParams) return CUDA_ERROR_INVALID_VALUE;
  return change(hNode, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP,
                [&](Work& work) { return make_memory_operation_work(*nodeParams, work); });
}

CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode hNode, CUgraph* phGraph) {
  if (!phGraph) return CUDA_ERROR_INVALID_VALUE;
  return with_node(hNode, CU_GRAPH_NODE_TYPE_GRAPH, [&](Node& node) {
    *phGraph = reinterpret_cast<CUgraph>(node.child->handle);
    return CUDA_SUCCESS;
  });
}

namespace {

CUresult get_event(CUgraphNode handle, CUgraphNodeType type, CUevent* out) {
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  return with_node(handle, type, [&](Node& node) {
    *out = node.event;
    return CUDA_SUCCESS;
  });
}

CUresult set_event(CUgraphNode handle, CUgraphNodeType type, CUevent event) {
  return change(handle, type, [&](Work& work) { return make_event_work(type, event, work); });
}

}  // namespace

CUresult cuGraphEventRecordNodeGetEvent(CUgraphNode hNode, CUevent* event_out) {
  return get_event(hNode, CU_GRAPH_NODE_TYPE_EVENT_RECORD, event_out);
}
CUresult cuGraphEventRecordNodeSetEvent(CUgraphNode hNode, CUevent event) {
  return set_event(hNode, CU_GRAPH_NODE_TYPE_EVENT_RECORD, event);
}
CUresult cuGraphEventWaitNodeGetEvent(CUgraphNode hNode, CUevent* event_out) {
  return get_event(hNode, CU_GRAPH_NODE_TYPE_WAIT_EVENT, event_out);
}
CUresult cuGraphEventWaitNodeSetEvent(CUgraphNode hNode, CUevent event) {
  return set_event(hNode, CU_GRAPH_NODE_TYPE_WAIT_EVENT, event);
}

CUresult cuGraphMemAllocNodeGetParams(CUgraphNode hNode, CUDA_MEM_ALLOC_NODE_PARAMS* params_out) {
  if (!params_out) return CUDA_ERROR_INVALID_VALUE;
  return with_node(hNode, CU_GRAPH_NODE_TYPE_MEM_ALLOC, [&](Node& node) {
    *params_out = node.allocation;
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphMemFreeNodeGetParams(CUgraphNode hNode, CUdeviceptr* dptr_out) {
  if (!dptr_out) return CUDA_ERROR_INVALID_VALUE;
  return with_node(hNode, CU_GRAPH_NODE_TYPE_MEM_FREE, [&](Node& node) {
    *dptr_out = node.allocation.dptr;
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphNodeSetParams(CUgraphNode hNode, CUgraphNodeParams* nodeParams) {
  if (!nodeParams || nodeParams->type == CU_GRAPH_NODE_TYPE_CONDITIONAL) return CUDA_ERROR_INVALID_VALUE;
  if (is_fixed(nodeParams->type)) return CUDA_ERROR_NOT_SUPPORTED;
  return with_node(hNode, nodeParams->type, [&](Node& node) {
    Work work;
    const CUresult error = make_work(*nodeParams, node.graph, work);
    if (error == CUDA_SUCCESS) set_work(node, std::move(work));
    return error;
  });
}

// --- a kernel node's attributes ---------------------------------------------------------------------------------

namespace {

CUlaunchAttribute* attributes_of(Operation& launch) {
  return reinterpret_cast<CUlaunchAttribute*>(launch.payload.data());
}

void put_attribute(Operation& launch, CUlaunchAttributeID id, const CUlaunchAttributeValue& value) {
  auto args = launch.as<Args_xmLaunch>();
  for (uint32_t i = 0; i < args.attributes; ++i) {
    if (attributes_of(launch)[i].id != id) continue;
    attributes_of(launch)[i].value = value;
    return;
  }
  CUlaunchAttribute attribute{};
  attribute.id = id;
  attribute.value = value;
  const auto* const bytes = reinterpret_cast<const std::byte*>(&attribute);
  launch.payload.insert(launch.payload.begin(), bytes, bytes + sizeof(attribute));
  ++args.attributes;
  std::memcpy(launch.arguments.data(), &args, sizeof(args));
}

}  // namespace

CUresult cuGraphKernelNodeGetAttribute(CUgraphNode hNode, CUkernelNodeAttrID attr, CUkernelNodeAttrValue* value_out) {
  if (!value_out) return CUDA_ERROR_INVALID_VALUE;
  return with_node(hNode, CU_GRAPH_NODE_TYPE_KERNEL, [&](Node& node) {
    Operation& launch = node.operations.front();
    const auto args = launch.as<Args_xmLaunch>();
    *value_out = {};
    if (attr == CU_LAUNCH_ATTRIBUTE_COOPERATIVE) value_out->cooperative = static_cast<int>(args.cooperative);
    for (uint32_t i = 0; i < args.attributes; ++i) {
      if (attributes_of(launch)[i].id == attr) *value_out = attributes_of(launch)[i].value;
    }
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphKernelNodeSetAttribute(CUgraphNode hNode, CUkernelNodeAttrID attr, const CUkernelNodeAttrValue* value) {
  if (!value) return CUDA_ERROR_INVALID_VALUE;
  return with_node(hNode, CU_GRAPH_NODE_TYPE_KERNEL, [&](Node& node) {
    put_attribute(node.operations.front(), attr, *value);
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphKernelNodeCopyAttributes(CUgraphNode dst, CUgraphNode src) {
  return with_node(src, CU_GRAPH_NODE_TYPE_KERNEL, [&](Node& from) {
    return with_node(dst, CU_GRAPH_NODE_TYPE_KERNEL, [&](Node& to) {
      Operation& launch = from.operations.front();
      const auto args = launch.as<Args_xmLaunch>();
      for (uint32_t i = 0; i < args.attributes; ++i) {
        put_attribute(to.operations.front(), attributes_of(launch)[i].id, attributes_of(launch)[i].value);
      }
      return CUDA_SUCCESS;
    });
  });
}

// --- its shape --------------------------------------------------------------------------------------------------

CUresult cuGraphGetNodes(CUgraph hGraph, CUgraphNode* nodes, size_t* numNodes) {
  const std::lock_guard lock(graphs_mutex());
  const Graph* const graph = find_graph(hGraph);
  if (!graph) return CUDA_ERROR_INVALID_VALUE;
  std::vector<CUgraphNode> all;
  for (const auto& node : graph->nodes) all.push_back(handle_of(*node));
  return give(all, nodes, numNodes);
}

CUresult cuGraphGetRootNodes(CUgraph hGraph, CUgraphNode* rootNodes, size_t* numRootNodes) {
  const std::lock_guard lock(graphs_mutex());
  const Graph* const graph = find_graph(hGraph);
  if (!graph) return CUDA_ERROR_INVALID_VALUE;
  std::vector<CUgraphNode> roots;
  for (const auto& node : graph->nodes) {
    if (node->dependencies.empty()) roots.push_back(handle_of(*node));
  }
  return give(roots, rootNodes, numRootNodes);
}

CUresult cuGraphGetEdges_v2(CUgraph hGraph, CUgraphNode* from, CUgraphNode* to, CUgraphEdgeData* edgeData,
                            size_t* numEdges) {
  const std::lock_guard lock(graphs_mutex());
  const Graph* const graph = find_graph(hGraph);
  if (!graph || !from != !to) return CUDA_ERROR_INVALID_VALUE;
  Edges edges;
  for (const auto& node : graph->nodes) edges.add(*node);
  return give_edges(edges, &edges.from, from, &edges.to, to, edgeData, numEdges);
}

CUresult cuGraphGetEdges(CUgraph hGraph, CUgraphNode* from, CUgraphNode* to, size_t* numEdges) {
  return client::cuGraphGetEdges_v2(hGraph, from, to, nullptr, numEdges);
}

CUresult cuGraphNodeGetDependencies_v2(CUgraphNode hNode, CUgraphNode* dependencies, CUgraphEdgeData* edgeData,
                                       size_t* numDependencies) {
  const std::lock_guard lock(graphs_mutex());
  const Node* const node = find_node(hNode);
  if (!node) return CUDA_ERROR_INVALID_VALUE;
  Edges edges;
  edges.add(*node);
  return give_edges(edges, &edges.from, dependencies, nullptr, nullptr, edgeData, numDependencies);
}

CUresult cuGraphNodeGetDependencies(CUgraphNode hNode, CUgraphNode* dependencies, size_t* numDependencies) {
  return client::cuGraphNodeGetDependencies_v2(hNode, dependencies, nullptr, numDependencies);
}

CUresult cuGraphNodeGetDependentNodes_v2(CUgraphNode hNode, CUgraphNode* dependentNodes, CUgraphEdgeData* edgeData,
                                         size_t* numDependentNodes) {
  const std::lock_guard lock(graphs_mutex());
  const Node* const node = find_node(hNode);
  if (!node) return CUDA_ERROR_INVALID_VALUE;
  Edges edges;
  for (const auto& other : node->graph->nodes) {
    for (const Dependency& d : other->dependencies) {
      if (d.on != node) continue;
      edges.to.push_back(handle_of(*other));
      edges.data.push_back(d.edge);
    }
  }
  return give_edges(edges, &edges.to, dependentNodes, nullptr, nullptr, edgeData, numDependentNodes);
}

CUresult cuGraphNodeGetDependentNodes(CUgraphNode hNode, CUgraphNode* dependentNodes, size_t* numDependentNodes) {
  return client::cuGraphNodeGetDependentNodes_v2(hNode, dependentNodes, nullptr, numDependentNodes);
}

CUresult cuGraphAddDependencies_v2(CUgraph hGraph, const CUgraphNode* from, const CUgraphNode* to,
                                   const CUgraphEdgeData* edgeData, size_t numDependencies) {
  const std::lock_guard lock(graphs_mutex());
  const Graph* const graph = find_graph(hGraph);
  if (!graph || (numDependencies && (!from || !to))) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < numDependencies; ++i) {
    Node* const before = find_node(from[i]);
    Node* const after = find_node(to[i]);
    if (!before || !after || before == after || before->graph != graph || after->graph != graph) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    for (const Dependency& d : after->dependencies) {
      if (d.on == before) return CUDA_ERROR_INVALID_VALUE;
    }
    after->dependencies.push_back({before, edgeData ? edgeData[i] : CUgraphEdgeData{}});
  }
  return CUDA_SUCCESS;
}

CUresult cuGraphAddDependencies(CUgraph hGraph, const CUgraphNode* from, const CUgraphNode* to,
                                size_t numDependencies) {
  return client::cuGraphAddDependencies_v2(hGraph, from, to, nullptr, numDependencies);
}

CUresult cuGraphRemoveDependencies_v2(CUgraph hGraph, const CUgraphNode* from, const CUgraphNode* to,
                                      const CUgraphEdgeData* edgeData, size_t numDependencies) {
  const std::lock_guard lock(graphs_mutex());
  const Graph* const graph = find_graph(hGraph);
  if (!graph || (numDependencies && (!from || !to))) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < numDependencies; ++i) {
    Node* const before = find_node(from[i]);
    Node* const after = find_node(to[i]);
    if (!before || !after || after->graph != graph) return CUDA_ERROR_INVALID_VALUE;
    if (std::erase_if(after->dependencies, [&](const Dependency& d) { return d.on == before; }) == 0) {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  return CUDA_SUCCESS;
}

CUresult cuGraphRemoveDependencies(CUgraph hGraph, const CUgraphNode* from, const CUgraphNode* to,
                                   size_t numDependencies) {
  return client::cuGraphRemoveDependencies_v2(hGraph, from, to, nullptr, numDependencies);
}

CUresult cuGraphDebugDotPrint(CUgraph hGraph, const char* path, unsigned int flags) {
  const std::lock_guard lock(graphs_mutex());
  const Graph* const graph = find_graph(hGraph);
  if (!graph || !path) return CUDA_ERROR_INVALID_VALUE;
  FILE* const file = std::fopen(path, "we");
  if (!file) return CUDA_ERROR_OPERATING_SYSTEM;
  std::fprintf(file, "digraph \"graph\" {\n");
  for (const auto& node : graph->nodes) {
    std::fprintf(file, "  \"%p\" [label=\"%s\"];\n", static_cast<const void*>(node.get()),
                 node->collectives ? "collectives" : name_of(node->type));
    for (const Dependency& d : node->dependencies) {
      std::fprintf(file, "  \"%p\" -> \"%p\";\n", static_cast<const void*>(d.on), static_cast<const void*>(node.get()));
    }
  }
  std::fprintf(file, "}\n");
  return std::fclose(file) == 0 ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

}  // namespace xmig::client
