// Waits and writes of single words, several in one call or in one node of a graph: a record each, in their order.
#include "client/memory/memory_operations.h"

#include "client/bootstrap/message.h"
#include "client/bootstrap/process.h"
#include "client/journal/append.h"
#include "client/journal/streams.h"
#include "client/memory/memory_map.h"
#include "local.h"
#include "records.h"

namespace xmig::client {
namespace {

bool is_word(CUdeviceptr address, size_t bytes) {
  const Place place = memory_map().place(address, bytes);
  return address % bytes == 0 && (place == Place::kDevice || place == Place::kPinned);
}

// What the device does not promise fails here, as natively: later it would be an error of the stream.
CUresult check_wait(unsigned int flags) {
  const int ordinal = current_ordinal();
  if (ordinal < 0) return CUDA_SUCCESS;  // without a context: the record says so
  const auto promised = [&](CUdevice_attribute what) { return attribute(ordinal, what) != 0; };
  const bool flushes = flags & CU_STREAM_WAIT_VALUE_FLUSH;
  const bool nor = (flags & CU_STREAM_WAIT_VALUE_NOR) == CU_STREAM_WAIT_VALUE_NOR;
  if (flushes && !promised(CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES)) return CUDA_ERROR_NOT_SUPPORTED;
  if (nor && !promised(CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR)) return CUDA_ERROR_NOT_SUPPORTED;
  return CUDA_SUCCESS;
}

CUresult check_word(CUdeviceptr address, size_t bytes) {
  return is_word(address, bytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult check_wait(const CUstreamBatchMemOpParams& one, size_t bytes) {
  const CUresult error = check_wait(one.waitValue.flags);
  return error != CUDA_SUCCESS ? error : check_word(one.waitValue.address, bytes);
}

// Can it be done? So that nothing of a batch is done that is not done whole.
CUresult check(const CUstreamBatchMemOpParams& one) {
  switch (one.operation) {
    case CU_STREAM_MEM_OP_WAIT_VALUE_32: return check_wait(one, 4);
    case CU_STREAM_MEM_OP_WRITE_VALUE_32: return check_word(one.waitValue.address, 4);
    case CU_STREAM_MEM_OP_WAIT_VALUE_64: return check_wait(one, 8);
    case CU_STREAM_MEM_OP_WRITE_VALUE_64: return check_word(one.waitValue.address, 8);
    // What comes after a record sees what was written before it, whoever wrote it.
    case CU_STREAM_MEM_OP_BARRIER:
    case CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES: return CUDA_SUCCESS;
    default:
      say("operation %d of cuStreamBatchMemOp is not supported under xMIG", static_cast<int>(one.operation));
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

CUresult append_one(const CUstreamBatchMemOpParams& one, CUstream stream) {
  const auto& wait = one.waitValue;
  const auto& write = one.writeValue;
  switch (one.operation) {
    case CU_STREAM_MEM_OP_WAIT_VALUE_32:
      return record::cuStreamWaitValue32_v2(stream, wait.address, wait.value, wait.flags);
    case CU_STREAM_MEM_OP_WAIT_VALUE_64:
      return record::cuStreamWaitValue64_v2(stream, wait.address, wait.value64, wait.flags);
    case CU_STREAM_MEM_OP_WRITE_VALUE_32:
      return record::cuStreamWriteValue32_v2(stream, write.address, write.value, write.flags);
    case CU_STREAM_MEM_OP_WRITE_VALUE_64:
      return record::cuStreamWriteValue64_v2(stream, write.address, write.value64, write.flags);
    default: return CUDA_SUCCESS;
  }
}

}  // namespace

CUresult append_memory_operations(CUstream stream, unsigned int count, const CUstreamBatchMemOpParams* all,
                                  unsigned int flags) {
  if (!count || !all || flags) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned int i = 0; i < count; ++i) {
    if (const CUresult error = check(all[i]); error != CUDA_SUCCESS) return error;
  }
  for (unsigned int i = 0; i < count; ++i) {
    if (const CUresult error = append_one(all[i], stream); error != CUDA_SUCCESS) return error;
  }
  return CUDA_SUCCESS;
}

CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  if (const CUresult error = check_wait(flags); error != CUDA_SUCCESS) return error;
  return record::cuStreamWaitValue32_v2(stream, addr, value, flags);
}

CUresult cuStreamWaitValue64_v2(CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  if (const CUresult error = check_wait(flags); error != CUDA_SUCCESS) return error;
  return record::cuStreamWaitValue64_v2(stream, addr, value, flags);
}

CUresult cuStreamBatchMemOp_v2(CUstream stream, unsigned int count, CUstreamBatchMemOpParams* paramArray,
                               unsigned int flags) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  if (!valid_stream(stream)) return CUDA_ERROR_INVALID_HANDLE;
  return append_memory_operations(stream, count, paramArray, flags);
}

}  // namespace xmig::client
