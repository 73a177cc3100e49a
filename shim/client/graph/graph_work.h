// What a node does, from and to the structures in which the driver's functions speak of it.
#pragma once

#include <cuda.h>

#include "client/graph/graph.h"

namespace xmig::client {

// The new work of a node; `type` as well. Nothing is changed if this fails.
struct Work {
  CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
  std::vector<Operation> operations;
  CUevent event = nullptr;
  std::unique_ptr<Graph> child;
  uint64_t condition = 0;
  CUgraphConditionalNodeType choice = CU_GRAPH_COND_TYPE_IF;
  std::vector<std::unique_ptr<Graph>> bodies;
  std::optional<CUDA_MEMCPY3D> copy;
  std::vector<CUstreamBatchMemOpParams> memory_operations;
  CUDA_MEM_ALLOC_NODE_PARAMS allocation{};
  std::shared_ptr<GraphMemory> memory;
};
// A function's context is where it runs, a kernel's the one that is named, or the calling thread's.
CUresult make_kernel_work(const CUDA_KERNEL_NODE_PARAMS_v2& params, Work& work);
// In which context does this node's kernel run? nullptr: it has none, or its module is gone.
Context* context_of_kernel(CUgraphNodeType type, const std::vector<Operation>& operations);
CUresult make_copy_work(const CUDA_MEMCPY3D& params, CUcontext context, Work& work);
CUresult make_set_work(const CUDA_MEMSET_NODE_PARAMS& params, CUcontext context, Work& work);
CUresult make_host_work(const CUDA_HOST_NODE_PARAMS& params, Work& work);
CUresult make_event_work(CUgraphNodeType type, CUevent event, Work& work);
CUresult make_memory_operation_work(const CUDA_BATCH_MEM_OP_NODE_PARAMS& params, Work& work);
CUresult make_allocation_work(CUDA_MEM_ALLOC_NODE_PARAMS& params, Work& work);
CUresult make_free_work(CUdeviceptr address, Work& work);
CUresult make_conditional_work(const CUDA_CONDITIONAL_NODE_PARAMS& params, const Graph& into, Work& work);
CUresult make_child_work(CUgraph child, bool named, Work& work);
// The graph itself becomes the node's: its nodes keep their handles.
CUresult move_child_work(CUgraph child, const Graph& into, Work& work);
// `into`: the graph that the node is in, nullptr for a node of an executable graph.
CUresult make_work(CUgraphNodeParams& params, const Graph* into, Work& work);

// Nodes that stay what they were made as: CUDA does not change allocations.
constexpr bool is_fixed(CUgraphNodeType type) {
  return type == CU_GRAPH_NODE_TYPE_MEM_ALLOC || type == CU_GRAPH_NODE_TYPE_MEM_FREE;
}

// Puts it into a node of the same type.
void set_work(Node& node, Work&& work);

CUresult read_kernel(Node& node, CUDA_KERNEL_NODE_PARAMS_v2& params);
CUresult read_copy(const Node& node, CUDA_MEMCPY3D& params);
CUresult read_set(const Node& node, CUDA_MEMSET_NODE_PARAMS& params);
CUresult read_host(const Node& node, CUDA_HOST_NODE_PARAMS& params);
CUresult read_memory_operations(Node& node, CUDA_BATCH_MEM_OP_NODE_PARAMS& params);

}  // namespace xmig::client
