#include "client/driver/context.h"
#include "client/graph/capture.h"
#include "client/memory/memory.h"
#include "client/memory/memory_progress.h"
#include "local.h"
#include "records.h"

namespace xmig::client {

StreamHome stream_home(CUstream stream) {
  CUcontext handle = nullptr;
  const bool special = !stream || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD;
  if (special || client::cuStreamGetCtx(stream, &handle) != CUDA_SUCCESS) return {current_context(), current_ordinal()};
  const Context* const context = find_context(handle);
  return {reinterpret_cast<uint64_t>(handle), context ? context->ordinal : -1};
}

CUresult cuCtxSynchronize() {
  if (const Context* const now = this_thread().context; diverting() && now) [[unlikely]] {
    if (const CUresult refused = check_waiting_for_context(*now); refused != CUDA_SUCCESS) return refused;
  }
  const CUresult result = record::cuCtxSynchronize();
  if (result == CUDA_SUCCESS) memory_context_synchronized();
  return result;
}

CUresult synchronize_context(uint64_t handle) {
  Context* const context = find_context(reinterpret_cast<CUcontext>(handle));
  if (!context || !context->alive.load(std::memory_order_acquire)) return CUDA_SUCCESS;
  const WithContext scope(*context);
  return client::cuCtxSynchronize();
}

}  // namespace xmig::client
