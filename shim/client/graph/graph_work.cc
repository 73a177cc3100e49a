#include "client/graph/graph_work.h"

#include <cstring>

#include "client/bootstrap/message.h"
#include "client/bootstrap/process.h"
#include "client/graph/capture.h"
#include "client/graph/graph_conditions.h"
#include "client/journal/append.h"
#include "client/memory/memory_map.h"
#include "client/modules/modules.h"
#include "client/stream/events.h"
#include "local.h"
#include "records.h"

namespace xmig::client {
namespace {

// The calling thread's context for a moment, if one is named. False: it is none, or dead.
class Inside {
 public:
  explicit Inside(CUcontext handle) : thread_(this_thread()), before_(thread_.context) {
    if (!handle) return;
    Context* const context = find_context(handle);
    usable_ = context && context->alive.load();
    if (usable_) thread_.context = context;
  }
  ~Inside() { thread_.context = before_; }
  Inside(const Inside&) = delete;
  explicit operator bool() const { return usable_; }

 private:
  Thread& thread_;
  Context* const before_;
  bool usable_ = true;
};

const Operation* only(const Node& node, CUgraphNodeType type) {
  return node.type == type && !node.operations.empty() ? &node.operations.front() : nullptr;
}

}  // namespace

// --- kernels ----------------------------------------------------------------------------------------------------

CUresult make_kernel_work(const CUDA_KERNEL_NODE_PARAMS_v2& params, Work& work) {
  const CUfunction function = params.func ? params.func : reinterpret_cast<CUfunction>(params.kern);
  const Context* const own = context_of(function);
  const Inside inside(own ? own->handle() : params.func ? nullptr : params.ctx);
  if (!inside) return CUDA_ERROR_INVALID_CONTEXT;
  work.type = CU_GRAPH_NODE_TYPE_KERNEL;
  const Collect collect(work.operations);
  return client::cuLaunchKernel(function, params.gridDimX, params.gridDimY, params.gridDimZ, params.blockDimX,
                                params.blockDimY, params.blockDimZ, params.sharedMemBytes, nullptr,
                                params.kernelParams, params.extra);
}

Context* context_of_kernel(CUgraphNodeType type, const std::vector<Operation>& operations) {
  if (type != CU_GRAPH_NODE_TYPE_KERNEL || operations.empty()) return nullptr;
  return context_of(reinterpret_cast<CUfunction>(operations.front().as<Args_xmLaunch>().function));
}

CUresult read_kernel(Node& node, CUDA_KERNEL_NODE_PARAMS_v2& params) {
  const Operation* const launch = only(node, CU_GRAPH_NODE_TYPE_KERNEL);
  if (!launch) return CUDA_ERROR_INVALID_VALUE;
  const auto args = launch->as<Args_xmLaunch>();
  const auto function = reinterpret_cast<CUfunction>(args.function);
  Context* const own = context_of(function);
  if (!own) return CUDA_ERROR_INVALID_HANDLE;
  const FunctionHere here = find_function(function, *own);
  if (!here.function) return here.error;
  const std::byte* const parameters = launch->payload.data() + args.attributes * sizeof(CUlaunchAttribute);
  node.parameter_pointers.clear();
  for (const journal::ParameterInfo& parameter : here.function->parameters) {
    node.parameter_pointers.push_back(const_cast<std::byte*>(parameters + parameter.offset));
  }
  params = {};
  params.func = function;
  params.gridDimX = args.grid_x;
  params.gridDimY = args.grid_y;
  params.gridDimZ = args.grid_z;
  params.blockDimX = args.block_x;
  params.blockDimY = args.block_y;
  params.blockDimZ = args.block_z;
  params.sharedMemBytes = args.shared_bytes;
  params.kernelParams = node.parameter_pointers.empty() ? nullptr : node.parameter_pointers.data();
  return CUDA_SUCCESS;
}

// --- copies -----------------------------------------------------------------------------------------------------

CUresult make_copy_work(const CUDA_MEMCPY3D& params, CUcontext context, Work& work) {
  const Inside inside(context);
  if (!inside) return CUDA_ERROR_INVALID_CONTEXT;
  work.type = CU_GRAPH_NODE_TYPE_MEMCPY;
  work.copy = params;
  const Collect collect(work.operations);
  return client::cuMemcpy3DAsync_v2(&params, nullptr);
}

CUresult read_copy(const Node& node, CUDA_MEMCPY3D& params) {
  if (node.copy) {
    params = *node.copy;
    return CUDA_SUCCESS;
  }
  const Operation* const copy = only(node, CU_GRAPH_NODE_TYPE_MEMCPY);
  if (!copy) return CUDA_ERROR_INVALID_VALUE;
  params = {};
  params.srcMemoryType = params.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
  const auto fill = [&](uint64_t to, uint64_t to_pitch, uint64_t from, uint64_t from_pitch, uint64_t width,
                        uint64_t height) {
    params.dstDevice = to;
    params.dstPitch = to_pitch;
    params.srcDevice = from;
    params.srcPitch = from_pitch;
    params.WidthInBytes = width;
    params.Height = params.srcHeight = params.dstHeight = height;
    params.Depth = node.operations.size();
  };
  switch (copy->op) {
    case Op::cuMemcpyDtoDAsync_v2: {
      const auto args = copy->as<Args_cuMemcpyDtoDAsync_v2>();
      fill(args.dstDevice, args.ByteCount, args.srcDevice, args.ByteCount, args.ByteCount, 1);
      return CUDA_SUCCESS;
    }
    case Op::xmCopy2D: {
      const auto args = copy->as<Args_xmCopy2D>();
      fill(args.destination, args.destination_pitch, args.source, args.source_pitch, args.width, args.height);
      return CUDA_SUCCESS;
    }
    case Op::xmCopyFromPinned: {
      const auto args = copy->as<Args_xmCopyFromPinned>();
      fill(args.destination, args.pitch, args.source, args.source_pitch, args.width, args.height);
      return CUDA_SUCCESS;
    }
    case Op::xmCopyToPinned: {
      const auto args = copy->as<Args_xmCopyToPinned>();
      fill(args.destination, args.destination_pitch, args.source, args.pitch, args.width, args.height);
      return CUDA_SUCCESS;
    }
    default: return CUDA_ERROR_NOT_SUPPORTED;
  }
}

// --- fills ------------------------------------------------------------------------------------------------------

CUresult make_set_work(const CUDA_MEMSET_NODE_PARAMS& params, CUcontext context, Work& work) {
  const Inside inside(context);
  if (!inside) return CUDA_ERROR_INVALID_CONTEXT;
  if (params.elementSize != 1 && params.elementSize != 2 && params.elementSize != 4) return CUDA_ERROR_INVALID_VALUE;
  if (!params.width || !params.height || memory_map().place(params.dst, 1) != Place::kDevice) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  work.type = CU_GRAPH_NODE_TYPE_MEMSET;
  const Collect collect(work.operations);
  const CUdeviceptr to = params.dst;
  const auto byte = static_cast<unsigned char>(params.value);
  const auto half = static_cast<unsigned short>(params.value);
  if (params.height == 1) {
    if (params.elementSize == 1) return record::cuMemsetD8Async(to, byte, params.width, nullptr);
    if (params.elementSize == 2) return record::cuMemsetD16Async(to, half, params.width, nullptr);
    return record::cuMemsetD32Async(to, params.value, params.width, nullptr);
  }
  if (params.elementSize == 1) {
    return record::cuMemsetD2D8Async(to, params.pitch, byte, params.width, params.height, nullptr);
  }
  if (params.elementSize == 2) {
    return record::cuMemsetD2D16Async(to, params.pitch, half, params.width, params.height, nullptr);
  }
  return record::cuMemsetD2D32Async(to, params.pitch, params.value, params.width, params.height, nullptr);
}

namespace {

template <typename Args>
void read_row(const Operation& fill, unsigned int value, unsigned int element, CUDA_MEMSET_NODE_PARAMS& params) {
  const auto args = fill.as<Args>();
  params = {args.dstDevice, 0, value, element, args.N, 1};
}
template <typename Args>
void read_rows(const Operation& fill, unsigned int value, unsigned int element, CUDA_MEMSET_NODE_PARAMS& params) {
  const auto args = fill.as<Args>();
  params = {args.dstDevice, args.dstPitch, value, element, args.Width, args.Height};
}

}  // namespace

CUresult read_set(const Node& node, CUDA_MEMSET_NODE_PARAMS& params) {
  const Operation* const fill = only(node, CU_GRAPH_NODE_TYPE_MEMSET);
  if (!fill) return CUDA_ERROR_INVALID_VALUE;
  switch (fill->op) {
    case Op::cuMemsetD8Async:
      read_row<Args_cuMemsetD8Async>(*fill, fill->as<Args_cuMemsetD8Async>().uc, 1, params);
      return CUDA_SUCCESS;
    case Op::cuMemsetD16Async:
      read_row<Args_cuMemsetD16Async>(*fill, fill->as<Args_cuMemsetD16Async>().us, 2, params);
      return CUDA_SUCCESS;
    case Op::cuMemsetD32Async:
      read_row<Args_cuMemsetD32Async>(*fill, fill->as<Args_cuMemsetD32Async>().ui, 4, params);
      return CUDA_SUCCESS;
    case Op::cuMemsetD2D8Async:
      read_rows<Args_cuMemsetD2D8Async>(*fill, fill->as<Args_cuMemsetD2D8Async>().uc, 1, params);
      return CUDA_SUCCESS;
    case Op::cuMemsetD2D16Async:
      read_rows<Args_cuMemsetD2D16Async>(*fill, fill->as<Args_cuMemsetD2D16Async>().us, 2, params);
      return CUDA_SUCCESS;
    case Op::cuMemsetD2D32Async:
      read_rows<Args_cuMemsetD2D32Async>(*fill, fill->as<Args_cuMemsetD2D32Async>().ui, 4, params);
      return CUDA_SUCCESS;
    default: return CUDA_ERROR_NOT_SUPPORTED;
  }
}

// --- host functions, events, graphs -----------------------------------------------------------------------------

CUresult make_host_work(const CUDA_HOST_NODE_PARAMS& params, Work& work) {
  work.type = CU_GRAPH_NODE_TYPE_HOST;
  const Collect collect(work.operations);
  return client::cuLaunchHostFunc(nullptr, params.fn, params.userData);
}

CUresult read_host(const Node& node, CUDA_HOST_NODE_PARAMS& params) {
  const Operation* const call = only(node, CU_GRAPH_NODE_TYPE_HOST);
  if (!call) return CUDA_ERROR_INVALID_VALUE;
  const auto args = call->as<Args_xmHostFunc>();
  params.fn = reinterpret_cast<CUhostFn>(args.function);
  params.userData = reinterpret_cast<void*>(args.user_data);
  return CUDA_SUCCESS;
}

CUresult make_event_work(CUgraphNodeType type, CUevent event, Work& work) {
  if (!valid_event(event)) return CUDA_ERROR_INVALID_VALUE;
  work.type = type;
  work.event = event;
  return CUDA_SUCCESS;
}

CUresult make_allocation_work(CUDA_MEM_ALLOC_NODE_PARAMS& params, Work& work) {
  const CUmemLocation& where = params.poolProps.location;
  if (where.type != CU_MEM_LOCATION_TYPE_DEVICE || !description(where.id) || !params.bytesize) return CUDA_ERROR_INVALID_VALUE;
  CUresult error = CUDA_SUCCESS;
  work.memory = allocate_graph_memory(params.bytesize, where.id, error);
  if (!work.memory) return error;
  work.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC;
  params.dptr = work.memory->address;
  work.allocation = params;
  work.allocation.accessDescs = nullptr;
  work.allocation.accessDescCount = 0;
  return CUDA_SUCCESS;
}

CUresult make_free_work(CUdeviceptr address, Work& work) {
  if (!is_graph_memory(address)) return CUDA_ERROR_INVALID_VALUE;
  work.type = CU_GRAPH_NODE_TYPE_MEM_FREE;
  work.allocation.dptr = address;
  return CUDA_SUCCESS;
}

CUresult make_child_work(CUgraph child, bool named, Work& work) {
  const Graph* const graph = find_graph(child);
  if (!graph || (named && graph->moved)) return CUDA_ERROR_INVALID_VALUE;
  if (named && graph->conditional()) return refuse_copy();
  work.type = CU_GRAPH_NODE_TYPE_GRAPH;
  work.child = graph->clone(named);
  return CUDA_SUCCESS;
}

CUresult move_child_work(CUgraph child, const Graph& into, Work& work) {
  const Graph* const graph = find_graph(child);
  if (!graph || graph->contains(into)) return CUDA_ERROR_INVALID_VALUE;
  work.child = unpublish(child);
  if (!work.child) return CUDA_ERROR_INVALID_VALUE;  // it is a node's already
  work.child->moved = true;
  work.type = CU_GRAPH_NODE_TYPE_GRAPH;
  return CUDA_SUCCESS;
}

CUresult make_work(CUgraphNodeParams& params, const Graph* into, Work& work) {
  switch (params.type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: {
      const CUDA_KERNEL_NODE_PARAMS_v3& kernel = params.kernel;
      return make_kernel_work({kernel.func, kernel.gridDimX, kernel.gridDimY, kernel.gridDimZ, kernel.blockDimX,
                               kernel.blockDimY, kernel.blockDimZ, kernel.sharedMemBytes, kernel.kernelParams,
                               kernel.extra, kernel.kern, kernel.ctx},
                              work);
    }
    case CU_GRAPH_NODE_TYPE_MEMCPY: return make_copy_work(params.memcpy.copyParams, params.memcpy.copyCtx, work);
    case CU_GRAPH_NODE_TYPE_MEMSET: {
      const CUDA_MEMSET_NODE_PARAMS_v2& fill = params.memset;
      return make_set_work({fill.dst, fill.pitch, fill.value, fill.elementSize, fill.width, fill.height}, fill.ctx, work);
    }
    case CU_GRAPH_NODE_TYPE_HOST: return make_host_work({params.host.fn, params.host.userData}, work);
    case CU_GRAPH_NODE_TYPE_GRAPH:
      if (params.graph.ownership == CU_GRAPH_CHILD_GRAPH_OWNERSHIP_CLONE) {
        return make_child_work(params.graph.graph, into != nullptr, work);
      }
      if (!into || params.graph.ownership != CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE) return CUDA_ERROR_INVALID_VALUE;
      return move_child_work(params.graph.graph, *into, work);
    case CU_GRAPH_NODE_TYPE_EMPTY: work.type = params.type; return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT: return make_event_work(params.type, params.eventWait.event, work);
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD: return make_event_work(params.type, params.eventRecord.event, work);
    case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
      return make_memory_operation_work({params.memOp.ctx, params.memOp.count, params.memOp.paramArray,
                                         params.memOp.flags}, work);
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC: {
      CUDA_MEM_ALLOC_NODE_PARAMS_v2& requested = params.alloc;
      CUDA_MEM_ALLOC_NODE_PARAMS_v1 same{requested.poolProps, requested.accessDescs, requested.accessDescCount, requested.bytesize, 0};
      const CUresult result = make_allocation_work(same, work);
      if (result == CUDA_SUCCESS) requested.dptr = same.dptr;
      return result;
    }
    case CU_GRAPH_NODE_TYPE_MEM_FREE: return make_free_work(params.free.dptr, work);
    case CU_GRAPH_NODE_TYPE_CONDITIONAL:
      return into ? make_conditional_work(params.conditional, *into, work) : CUDA_ERROR_INVALID_VALUE;
    case CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL:
    case CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT:
      say("external semaphores are not supported under xMIG, also not in graphs: they belong to the program's process");
      return CUDA_ERROR_NOT_SUPPORTED;
    default:
      say("a graph node of type %d is not supported under xMIG", static_cast<int>(params.type));
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

void set_work(Node& node, Work&& work) {
  node.type = work.type;
  // A launch keeps the attributes that were set on the node.
  if (node.type == CU_GRAPH_NODE_TYPE_KERNEL && !node.operations.empty()) {
    const auto before = node.operations.front().as<Args_xmLaunch>();
    Operation& launch = work.operations.front();
    auto args = launch.as<Args_xmLaunch>();
    if (before.attributes && !args.attributes) {
      const auto& old = node.operations.front().payload;
      launch.payload.insert(launch.payload.begin(), old.begin(),
                            old.begin() + before.attributes * sizeof(CUlaunchAttribute));
      args.attributes = before.attributes;
      args.cooperative = before.cooperative;
      std::memcpy(launch.arguments.data(), &args, sizeof(args));
    }
  }
  node.operations = std::move(work.operations);
  node.event = work.event;
  node.copy = work.copy;
  node.memory_operations = std::move(work.memory_operations);
  if (work.child) node.child = std::move(work.child);
  if (!work.bodies.empty()) {
    node.condition = work.condition;
    node.choice = work.choice;
    node.bodies = std::move(work.bodies);
    node.body_handles.clear();
    for (const auto& body : node.bodies) node.body_handles.push_back(reinterpret_cast<CUgraph>(body->handle));
  }
  node.for_each_inside([&](Graph& inside) { inside.within = node.graph; });
  node.parameter_pointers.clear();
}

}  // namespace xmig::client
