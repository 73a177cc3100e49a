// Copies between contexts. What a pointer means is seen from the pointer; that the server copies between devices in any case is
// its own business (server/cuda/handlers/copies.cc). Left to do here are the checks, and the order that the forms without Async promise.
#include <vector>

#include "client/copy/copy_calls.h"
#include "client/journal/context.h"
#include "client/memory/memory_call.h"
#include "local.h"

namespace xmig::client {

namespace {

Context* living(CUcontext context) {
  Context* const found = find_context(context);
  return found && found->alive.load() ? found : nullptr;
}

CUresult check_peers_of(CUcontext destination, CUcontext source) {
  if (const CUresult result = enter_with_context(); result != CUDA_SUCCESS) return result;
  return living(destination) && living(source) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

// The default streams of two contexts: `after`, in its own, waits for what `before` has.
CUresult follow(Context& after, Context& before) {
  CUevent mark = nullptr;
  CUresult result;
  {
    const WithContext inside(before);
    result = client::cuEventCreate(&mark, CU_EVENT_DISABLE_TIMING);
    if (result == CUDA_SUCCESS) result = client::cuEventRecord(mark, default_stream());
  }
  if (result == CUDA_SUCCESS) {
    const WithContext inside(after);
    result = client::cuStreamWaitEvent(default_stream(), mark, 0);
  }
  if (mark) client::cuEventDestroy_v2(mark);
  return result;
}

// A copy without Async follows the work of the current context and of both others, and goes before what they get later; the
// program does not wait for it.
template <typename Work>
CUresult in_order_with(CUcontext destination, CUcontext source, Work&& work) {
  if (const CUresult result = enter_with_context(); result != CUDA_SUCCESS) return result;
  Context& here = *current(this_thread()).context;
  std::vector<Context*> others;
  for (const CUcontext handle : {destination, source}) {
    Context* const other = living(handle);
    if (!other || other == &here || (!others.empty() && others[0] == other)) continue;
    others.push_back(other);
    if (const CUresult result = follow(here, *other); result != CUDA_SUCCESS) return result;
  }
  CUresult result = work();
  for (Context* const other : others) {
    if (result == CUDA_SUCCESS) result = follow(*other, here);
  }
  return result;
}

CUresult copy_3d_peer(const char* function, const CUDA_MEMCPY3D_PEER* c, CUstream stream, bool blocking) {
  if (!c || c->srcLOD || c->dstLOD) return CUDA_ERROR_INVALID_VALUE;
  const auto bad = [](CUmemorytype type, CUcontext context) { return type == CU_MEMORYTYPE_DEVICE && !living(context); };
  if (bad(c->srcMemoryType, c->srcContext) || bad(c->dstMemoryType, c->dstContext)) return CUDA_ERROR_INVALID_CONTEXT;
  return copy_box(function,
                  {.source = {c->srcMemoryType, c->srcHost, c->srcDevice, c->srcXInBytes, c->srcY, c->srcZ, c->srcPitch,
                              c->srcHeight},
                   .destination = {c->dstMemoryType, c->dstHost, c->dstDevice, c->dstXInBytes, c->dstY, c->dstZ,
                                   c->dstPitch, c->dstHeight},
                   .width = c->WidthInBytes,
                   .height = c->Height,
                   .depth = c->Depth},
                  stream, blocking);
}

}  // namespace

// Addresses say which device they are on; the contexts are only checked.
CUresult cuMemcpyPeerAsync(CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice, CUcontext srcContext,
                           size_t ByteCount, CUstream hStream) {
  if (const CUresult result = check_peers_of(dstContext, srcContext); result != CUDA_SUCCESS) return result;
  return copy_bytes(dstDevice, srcDevice, ByteCount, hStream, false, kBothAreDevice);
}

CUresult cuMemcpyPeer(CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice, CUcontext srcContext,
                      size_t ByteCount) {
  if (const CUresult result = check_peers_of(dstContext, srcContext); result != CUDA_SUCCESS) return result;
  return in_order_with(dstContext, srcContext, [&] {
    return copy_bytes(dstDevice, srcDevice, ByteCount, default_stream(), true, kBothAreDevice);
  });
}

CUresult cuMemcpy3DPeerAsync(const CUDA_MEMCPY3D_PEER* pCopy, CUstream hStream) {
  return copy_3d_peer("cuMemcpy3DPeerAsync", pCopy, hStream, false);
}

CUresult cuMemcpy3DPeer(const CUDA_MEMCPY3D_PEER* pCopy) {
  if (!pCopy) return CUDA_ERROR_INVALID_VALUE;
  const auto of = [](CUmemorytype type, CUcontext context) { return type == CU_MEMORYTYPE_DEVICE ? context : nullptr; };
  return in_order_with(of(pCopy->dstMemoryType, pCopy->dstContext), of(pCopy->srcMemoryType, pCopy->srcContext), [&] {
    return copy_3d_peer("cuMemcpy3DPeer", pCopy, default_stream(), true);
  });
}

}  // namespace xmig::client
