#include "client/journal/streams.h"

#include <algorithm>
#include <optional>

#include "client/journal/append.h"
#include "client/journal/context.h"
#include "client/journal/diversion.h"
#include "client/journal/handles.h"
#include "client/journal/ring_writer.h"
#include "client/memory/memory.h"
#include "local.h"
#include "records.h"

namespace xmig::client {
namespace {

using journal::Kind;

constinit std::atomic<uint64_t> next_id{3};  // 1 and 2: the default streams

}  // namespace

CUresult cuStreamCreateWithPriority(CUstream* phStream, unsigned int flags, int priority) {
  const Admitted admitted = admit(Op::cuStreamCreateWithPriority);
  if (admitted.error != CUDA_SUCCESS) return admitted.error;
  if (!phStream || (flags & ~static_cast<unsigned>(CU_STREAM_NON_BLOCKING))) return CUDA_ERROR_INVALID_VALUE;
  const int greatest = greatest_priority(admitted.context->ordinal);
  const uint64_t handle = create_handle(Kind::kStream);
  if (!handle) return CUDA_ERROR_OUT_OF_MEMORY;
  Stream& stream = stream_place(handle);
  stream.flags = flags;
  stream.priority = std::max(greatest, std::min(kLeastPriority, priority));  // as the driver does: clamped, not refused
  stream.id = next_id.fetch_add(1);
  stream.context = admitted.context;
  stream.synchronization_policy = CU_SYNC_POLICY_AUTO;
  stream.memory_domain = 0;
  stream.capture = 0;
  const CUresult result = record::cuStreamCreateWithPriority(handle, flags, stream.priority);
  if (result != CUDA_SUCCESS) {
    free_handle(handle);
    return result;
  }
  stream.alive.store(true, std::memory_order_release);
  *phStream = reinterpret_cast<CUstream>(handle);
  return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream* phStream, unsigned int Flags) {
  return client::cuStreamCreateWithPriority(phStream, Flags, 0);
}

CUresult cuStreamDestroy_v2(CUstream hStream) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  Stream* const stream = find_stream(hStream);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (diverting()) [[unlikely]] diversion().stream_destroyed(hStream);
  const WithContext own(*stream->context);  // it need not be current
  const CUresult result = record::cuStreamDestroy_v2(hStream);
  if (result != CUDA_SUCCESS) return result;
  memory_stream_destroyed(hStream);
  if (stream->alive.exchange(false)) free_handle(reinterpret_cast<uint64_t>(hStream));
  return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream hStream) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  if (!valid_stream(hStream)) return CUDA_ERROR_INVALID_HANDLE;
  std::optional<WithContext> own;
  if (const Stream* const stream = find_stream(hStream)) own.emplace(*stream->context);
  const CUresult result = record::cuStreamSynchronize(hStream);
  if (result == CUDA_SUCCESS) memory_stream_synchronized(hStream);
  return result;
}

CUresult cuStreamQuery(CUstream hStream) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  if (!valid_stream(hStream)) return CUDA_ERROR_INVALID_HANDLE;
  std::optional<WithContext> own;
  if (const Stream* const stream = find_stream(hStream)) own.emplace(*stream->context);
  const CUresult result = record::cuStreamQuery(hStream);
  if (result == CUDA_SUCCESS) memory_stream_synchronized(hStream);
  return result;
}

// --- what the client knows about a stream ---------------------------------------------------------------------

namespace {

struct Requested {
  const Stream* stream = nullptr;  // nullptr: a default stream
  Context* context = nullptr;
  CUresult error = CUDA_SUCCESS;
};
Requested requested(CUstream handle, const void* out) {
  if (const CUresult error = initialized(); error != CUDA_SUCCESS) return {.error = error};
  if (!out) return {.error = CUDA_ERROR_INVALID_VALUE};
  if (const Stream* const stream = find_stream(handle)) return {stream, stream->context};
  if (!special(handle)) return {.error = CUDA_ERROR_INVALID_HANDLE};
  const Current now = current(this_thread());
  return {nullptr, now.context, now.error};
}

}  // namespace

CUresult cuStreamGetPriority(CUstream hStream, int* priority) {
  const Requested found = requested(hStream, priority);
  if (found.error == CUDA_SUCCESS) *priority = found.stream ? found.stream->priority : 0;
  return found.error;
}

CUresult cuStreamGetFlags(CUstream hStream, unsigned int* flags) {
  const Requested found = requested(hStream, flags);
  if (found.error == CUDA_SUCCESS) *flags = found.stream ? found.stream->flags : 0;
  return found.error;
}

CUresult cuStreamGetId(CUstream hStream, unsigned long long* streamId) {
  const Requested found = requested(hStream, streamId);
  if (found.error != CUDA_SUCCESS) return found.error;
  *streamId = found.stream ? found.stream->id : hStream == CU_STREAM_PER_THREAD ? 2 : 1;
  return CUDA_SUCCESS;
}

CUresult cuStreamGetCtx(CUstream hStream, CUcontext* pctx) {
  const Requested found = requested(hStream, pctx);
  if (found.error == CUDA_SUCCESS) *pctx = found.context->handle();
  return found.error;
}

CUresult cuStreamGetCtx_v2(CUstream hStream, CUcontext* pCtx, CUgreenCtx* pGreenCtx) {
  const CUresult result = client::cuStreamGetCtx(hStream, pCtx);
  if (result == CUDA_SUCCESS && pGreenCtx) *pGreenCtx = nullptr;
  return result;
}

CUresult cuStreamGetDevice(CUstream hStream, CUdevice* device) {
  const Requested found = requested(hStream, device);
  if (found.error == CUDA_SUCCESS) *device = found.context->ordinal;
  return found.error;
}

// --- attributes: kept, since they are hints and the program may ask for them ----------------------------------

CUresult cuStreamGetAttribute(CUstream hStream, CUstreamAttrID attr, CUstreamAttrValue* value) {
  const Requested found = requested(hStream, value);
  if (found.error != CUDA_SUCCESS) return found.error;
  *value = {};
  switch (attr) {
    case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:
      return CUDA_SUCCESS;
    case CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY:
      value->syncPolicy = CU_SYNC_POLICY_AUTO;
      if (found.stream) {
        value->syncPolicy = static_cast<CUsynchronizationPolicy>(found.stream->synchronization_policy.load());
      }
      return CUDA_SUCCESS;
    case CU_LAUNCH_ATTRIBUTE_PRIORITY:
      value->priority = found.stream ? found.stream->priority : 0;
      return CUDA_SUCCESS;
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
      value->memSyncDomain =
          static_cast<CUlaunchMemSyncDomain>(found.stream ? found.stream->memory_domain.load() : 0);
      return CUDA_SUCCESS;
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
      value->memSyncDomainMap = {.default_ = 0, .remote = 1};
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult cuStreamSetAttribute(CUstream hStream, CUstreamAttrID attr, const CUstreamAttrValue* value) {
  const Requested found = requested(hStream, value);
  if (found.error != CUDA_SUCCESS) return found.error;
  Stream* const stream = find_stream(hStream);
  switch (attr) {
    case CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY:
      if (stream) stream->synchronization_policy = value->syncPolicy;
      return CUDA_SUCCESS;
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
      if (stream) stream->memory_domain = value->memSyncDomain;
      return CUDA_SUCCESS;
    case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:  // how long lines stay in a cache: no result depends on it
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult cuStreamCopyAttributes(CUstream dstStream, CUstream srcStream) {
  if (const CUresult error = initialized(); error != CUDA_SUCCESS) return error;
  if (!valid_stream(dstStream) || !valid_stream(srcStream)) return CUDA_ERROR_INVALID_HANDLE;
  const Stream* const from = find_stream(srcStream);
  Stream* const to = find_stream(dstStream);
  if (from && to) {
    to->synchronization_policy = from->synchronization_policy.load();
    to->memory_domain = from->memory_domain.load();
  }
  return CUDA_SUCCESS;
}

}  // namespace xmig::client
