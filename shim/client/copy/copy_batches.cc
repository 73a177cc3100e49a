// Copies in batches: each is a copy of its own in the stream, which is one of the orders that a batch allows.
//
// The whole batch is checked before the first copy goes. What a copy says of its source is honoured: bytes of the program's own
// pageable memory are taken at the call, and where they are requested in stream order only after the stream's work so far.
#include <cstdint>
#include <optional>

#include "client/bootstrap/message.h"
#include "client/copy/copy_calls.h"
#include "client/journal/streams.h"
#include "client/memory/memory_call.h"
#include "client/memory/memory_map.h"
#include "local.h"

namespace xmig::client {

namespace {

constexpr size_t kNoCopy = SIZE_MAX;  // an error is not one copy's

bool known_order(CUmemcpySrcAccessOrder order) {
  return order >= CU_MEMCPY_SRC_ACCESS_ORDER_STREAM && order <= CU_MEMCPY_SRC_ACCESS_ORDER_ANY;
}
bool known_flags(unsigned int flags) { return (flags & ~unsigned{CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE}) == 0; }

// Before the first copy: batches are not for the legacy stream.
CUresult begin(CUstream stream) {
  if (const CUresult result = enter_with_context(); result != CUDA_SUCCESS) return result;
  if (resolve(stream) == CU_STREAM_LEGACY) return CUDA_ERROR_INVALID_VALUE;
  return valid_stream(stream) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

// Once for a batch: what the stream has so far may write what the copy is to read.
class InOrder {
 public:
  explicit InOrder(CUstream stream) : stream_(stream) {}
  CUresult before_reading(uint64_t source, CUmemcpySrcAccessOrder order) {
    if (done_ || order != CU_MEMCPY_SRC_ACCESS_ORDER_STREAM || memory_map().place(source, 1) != Place::kPageable) {
      return CUDA_SUCCESS;
    }
    done_ = true;
    return client::cuStreamSynchronize(stream_);
  }

 private:
  CUstream stream_;
  bool done_ = false;
};

CUresult copy_batch(const CUdeviceptr* to, const CUdeviceptr* from, const size_t* sizes, size_t count,
                    const CUmemcpyAttributes* attributes, const size_t* first, size_t attribute_count, CUstream stream,
                    size_t& failed) {
  failed = kNoCopy;
  if (const CUresult result = begin(stream); result != CUDA_SUCCESS) return result;
  if (!count || !to || !from || !sizes || !attributes || !first || !attribute_count || attribute_count > count ||
      first[0] != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  for (size_t i = 0; i < attribute_count; ++i) {
    const bool rising = i == 0 || first[i] > first[i - 1];
    if (!rising || first[i] >= count || !known_order(attributes[i].srcAccessOrder) || !known_flags(attributes[i].flags)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  for (failed = 0; failed < count; ++failed) {
    const bool there = sizes[failed] && memory_map().place(to[failed], sizes[failed]) != Place::kInvalid &&
                       memory_map().place(from[failed], sizes[failed]) != Place::kInvalid;
    if (!there) return CUDA_ERROR_INVALID_VALUE;
  }
  InOrder order(stream);
  size_t attribute = 0;
  for (failed = 0; failed < count; ++failed) {
    while (attribute + 1 < attribute_count && first[attribute + 1] <= failed) ++attribute;
    CUresult result = order.before_reading(from[failed], attributes[attribute].srcAccessOrder);
    if (result == CUDA_SUCCESS) result = copy_bytes(to[failed], from[failed], sizes[failed], stream, false, kAnywhere);
    if (result != CUDA_SUCCESS) return result;
  }
  failed = kNoCopy;
  return CUDA_SUCCESS;
}

// Of one operand; nothing if it is an array, or not well formed.
std::optional<Side> side_of(const CUmemcpy3DOperand& operand, const CUextent3D& extent) {
  if (operand.type != CU_MEMCPY_OPERAND_TYPE_POINTER) return std::nullopt;
  const auto& pointer = operand.op.ptr;
  const bool fits = (!pointer.rowLength || pointer.rowLength >= extent.width) &&
                    (!pointer.layerHeight || pointer.layerHeight >= extent.height);
  if (!pointer.ptr || !fits) return std::nullopt;
  return Side{CU_MEMORYTYPE_UNIFIED, nullptr, pointer.ptr, 0, 0, 0, pointer.rowLength, pointer.layerHeight};
}

CUresult check_box(const CUDA_MEMCPY3D_BATCH_OP& op) {
  if (op.src.type == CU_MEMCPY_OPERAND_TYPE_ARRAY || op.dst.type == CU_MEMCPY_OPERAND_TYPE_ARRAY) {
    say("cuMemcpy3DBatchAsync: CUDA arrays are not supported under xMIG");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  const bool sound = op.extent.width && op.extent.height && op.extent.depth && known_order(op.srcAccessOrder) &&
                     known_flags(op.flags) && side_of(op.src, op.extent) && side_of(op.dst, op.extent) &&
                     memory_map().place(op.src.op.ptr.ptr, 1) != Place::kInvalid &&
                     memory_map().place(op.dst.op.ptr.ptr, 1) != Place::kInvalid;
  return sound ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult copy_boxes(size_t count, const CUDA_MEMCPY3D_BATCH_OP* ops, unsigned long long flags, CUstream stream, size_t& failed) {
  failed = kNoCopy;
  if (const CUresult result = begin(stream); result != CUDA_SUCCESS) return result;
  if (!count || !ops || flags) return CUDA_ERROR_INVALID_VALUE;
  for (failed = 0; failed < count; ++failed) {
    if (const CUresult result = check_box(ops[failed]); result != CUDA_SUCCESS) return result;
  }
  InOrder order(stream);
  for (failed = 0; failed < count; ++failed) {
    const CUDA_MEMCPY3D_BATCH_OP& op = ops[failed];
    CUresult result = order.before_reading(op.src.op.ptr.ptr, op.srcAccessOrder);
    if (result == CUDA_SUCCESS) {
      result = copy_box("cuMemcpy3DBatchAsync",
                        {.source = *side_of(op.src, op.extent),
                         .destination = *side_of(op.dst, op.extent),
                         .width = op.extent.width,
                         .height = op.extent.height,
                         .depth = op.extent.depth},
                        stream, false);
    }
    if (result != CUDA_SUCCESS) return result;
  }
  failed = kNoCopy;
  return CUDA_SUCCESS;
}

}  // namespace

CUresult cuMemcpyBatchAsync_v2(CUdeviceptr* dsts, CUdeviceptr* srcs, size_t* sizes, size_t count, CUmemcpyAttributes* attrs,
                               size_t* attrsIdxs, size_t numAttrs, CUstream hStream) {
  size_t failed = kNoCopy;
  return copy_batch(dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, hStream, failed);
}

CUresult cuMemcpyBatchAsync(CUdeviceptr* dsts, CUdeviceptr* srcs, size_t* sizes, size_t count, CUmemcpyAttributes* attrs,
                            size_t* attrsIdxs, size_t numAttrs, size_t* failIdx, CUstream hStream) {
  size_t failed = kNoCopy;
  const CUresult result = copy_batch(dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, hStream, failed);
  if (failIdx && result != CUDA_SUCCESS) *failIdx = failed;
  return result;
}

CUresult cuMemcpy3DBatchAsync_v2(size_t numOps, CUDA_MEMCPY3D_BATCH_OP* opList, unsigned long long flags, CUstream hStream) {
  size_t failed = kNoCopy;
  return copy_boxes(numOps, opList, flags, hStream, failed);
}

CUresult cuMemcpy3DBatchAsync(size_t numOps, CUDA_MEMCPY3D_BATCH_OP* opList, size_t* failIdx, unsigned long long flags,
                              CUstream hStream) {
  size_t failed = kNoCopy;
  const CUresult result = copy_boxes(numOps, opList, flags, hStream, failed);
  if (failIdx && result != CUDA_SUCCESS) *failIdx = failed;
  return result;
}

}  // namespace xmig::client
