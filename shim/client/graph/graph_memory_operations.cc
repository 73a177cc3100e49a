// Nodes that wait for single words and write them, made and read.
#include "client/graph/capture.h"
#include "client/graph/graph_work.h"
#include "client/journal/context.h"
#include "client/memory/memory_operations.h"

namespace xmig::client {
namespace {

template <typename Args>
CUstreamBatchMemOpParams wait_of(const Operation& operation, CUstreamBatchMemOpType type) {
  const auto args = operation.as<Args>();
  CUstreamBatchMemOpParams params{};
  params.waitValue.operation = type;
  params.waitValue.address = args.addr;
  params.waitValue.value64 = args.value;
  params.waitValue.flags = args.flags;
  return params;
}

template <typename Args>
CUstreamBatchMemOpParams write_of(const Operation& operation, CUstreamBatchMemOpType type) {
  const auto args = operation.as<Args>();
  CUstreamBatchMemOpParams params{};
  params.writeValue.operation = type;
  params.writeValue.address = args.addr;
  params.writeValue.value64 = args.value;
  params.writeValue.flags = args.flags;
  return params;
}

CUstreamBatchMemOpParams params_of(const Operation& operation) {
  switch (operation.op) {
    case Op::cuStreamWaitValue32_v2:
      return wait_of<Args_cuStreamWaitValue32_v2>(operation, CU_STREAM_MEM_OP_WAIT_VALUE_32);
    case Op::cuStreamWaitValue64_v2:
      return wait_of<Args_cuStreamWaitValue64_v2>(operation, CU_STREAM_MEM_OP_WAIT_VALUE_64);
    case Op::cuStreamWriteValue32_v2:
      return write_of<Args_cuStreamWriteValue32_v2>(operation, CU_STREAM_MEM_OP_WRITE_VALUE_32);
    default: return write_of<Args_cuStreamWriteValue64_v2>(operation, CU_STREAM_MEM_OP_WRITE_VALUE_64);
  }
}

}  // namespace

CUresult make_memory_operation_work(const CUDA_BATCH_MEM_OP_NODE_PARAMS& params, Work& work) {
  if (params.ctx && !find_context(params.ctx)) return CUDA_ERROR_INVALID_CONTEXT;
  work.type = CU_GRAPH_NODE_TYPE_BATCH_MEM_OP;
  {
    const Collect collect(work.operations);
    const CUresult error = append_memory_operations(nullptr, params.count, params.paramArray, params.flags);
    if (error != CUDA_SUCCESS) return error;
  }
  work.memory_operations.assign(params.paramArray, params.paramArray + params.count);
  return CUDA_SUCCESS;
}

CUresult read_memory_operations(Node& node, CUDA_BATCH_MEM_OP_NODE_PARAMS& params) {
  if (node.memory_operations.empty()) {  // captured
    for (const Operation& operation : node.operations) node.memory_operations.push_back(params_of(operation));
  }
  params = {};
  params.count = static_cast<unsigned int>(node.memory_operations.size());
  params.paramArray = node.memory_operations.data();
  if (const Context* const context = this_thread().context) params.ctx = context->handle();
  return CUDA_SUCCESS;
}

}  // namespace xmig::client
