#include "client/journal/context.h"
#include "client/journal/diversion.h"
#include "client/journal/streams.h"
#include "client/memory/memory.h"
#include "client/memory/memory_progress.h"
#include "local.h"
#include "records.h"

namespace xmig::client {

StreamHome stream_home(CUstream stream) {
  const Stream* const known = find_stream(stream);
  if (!known) return {current_context(), current_ordinal()};
  return {reinterpret_cast<uint64_t>(known->context->handle()), known->context->ordinal};
}

CUresult cuCtxSynchronize() {
  if (const Context* const now = this_thread().context; diverting() && now) [[unlikely]] {
    if (const CUresult refused = diversion().check_waiting_for_context(*now); refused != CUDA_SUCCESS) return refused;
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
