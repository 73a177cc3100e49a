// The driver's copy functions: each says which copy it means.
//
// Which memory a pointer means is seen from the pointer, as with unified addressing; a function's name only says where
// the program's own memory may not appear.
#include "client/copy.h"

#include <vector>

#include "client/context.h"
#include "client/memory_call.h"
#include "client/memory_map.h"
#include "client/message.h"
#include "local.h"

namespace xmig::client {

namespace {

uint64_t address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

enum Sides : unsigned {
  kAnywhere = 0,
  kSourceIsDevice = 1,
  kDestinationIsDevice = 2,
  kBothAreDevice = 3,
};

// Memory of ours: on the device, or pinned, which devices reach by the same address.
bool reachable(uint64_t pointer) {
  const Place place = memory_map().place(pointer, 1);
  return place == Place::kDevice || place == Place::kPinned;
}

CUresult copy_bytes(uint64_t destination, uint64_t source, size_t bytes, CUstream stream, bool blocking, Sides sides) {
  if (const CUresult result = enter_with_context(); result != CUDA_SUCCESS) return result;
  if (bytes) {
    if ((sides & kSourceIsDevice) && !reachable(source)) return CUDA_ERROR_INVALID_VALUE;
    if ((sides & kDestinationIsDevice) && !reachable(destination)) return CUDA_ERROR_INVALID_VALUE;
  }
  return copy({.destination = destination,
               .destination_pitch = bytes,
               .source = source,
               .source_pitch = bytes,
               .width = bytes,
               .height = 1,
               .stream = stream,
               .blocking = blocking});
}

// One side of a two- or three-dimensional copy.
struct Side {
  CUmemorytype type;
  const void* host;
  CUdeviceptr device;
  size_t x, y, z;
  size_t pitch, rows;  // rows: of one slice

  // Its first byte, in *start.
  CUresult resolve(const char* function, uint64_t* start) const {
    if (type == CU_MEMORYTYPE_ARRAY) {
      say("%s: CUDA arrays are not supported under xMIG", function);
      return CUDA_ERROR_NOT_SUPPORTED;
    }
    const bool on_host = type == CU_MEMORYTYPE_HOST;
    if (!on_host && type != CU_MEMORYTYPE_DEVICE && type != CU_MEMORYTYPE_UNIFIED) return CUDA_ERROR_INVALID_VALUE;
    *start = on_host ? address(host) : device;
    if (type == CU_MEMORYTYPE_DEVICE && !reachable(device)) return CUDA_ERROR_INVALID_VALUE;
    uint64_t offset = 0;
    const bool overflow = !*start || __builtin_mul_overflow(z, rows, &offset) ||
                          __builtin_add_overflow(offset, y, &offset) ||
                          __builtin_mul_overflow(offset, pitch, &offset) ||
                          __builtin_add_overflow(offset, x, &offset) || __builtin_add_overflow(*start, offset, start);
    return overflow ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
  }
};

struct Box {
  Side source, destination;
  size_t width, height, depth;
};

CUresult copy_box(const char* function, Box box, CUstream stream, bool blocking) {
  if (const CUresult result = enter_with_context(); result != CUDA_SUCCESS) return result;
  if (!box.width || !box.height || !box.depth) return CUDA_SUCCESS;
  for (Side* side : {&box.source, &box.destination}) {
    if (!side->pitch) side->pitch = box.width + side->x;
    if (!side->rows) side->rows = box.height + side->y;
    const bool fits = box.width <= side->pitch && side->x <= side->pitch - box.width && box.height <= side->rows &&
                      side->y <= side->rows - box.height;
    if (!fits && (box.height > 1 || box.depth > 1)) return CUDA_ERROR_INVALID_VALUE;
  }
  Copy slice{.destination_pitch = box.destination.pitch,
             .source_pitch = box.source.pitch,
             .width = box.width,
             .height = box.height,
             .stream = stream,
             .blocking = blocking};
  if (const CUresult result = box.source.resolve(function, &slice.source); result != CUDA_SUCCESS) return result;
  const CUresult resolved = box.destination.resolve(function, &slice.destination);
  if (resolved != CUDA_SUCCESS) return resolved;
  if (box.source.rows == box.height && box.destination.rows == box.height) {
    if (__builtin_mul_overflow(slice.height, box.depth, &slice.height)) return CUDA_ERROR_INVALID_VALUE;
    return copy(slice);
  }
  for (size_t z = 0; z < box.depth; ++z) {
    if (const CUresult result = copy(slice); result != CUDA_SUCCESS) return result;
    slice.source += box.source.rows * box.source.pitch;
    slice.destination += box.destination.rows * box.destination.pitch;
  }
  return CUDA_SUCCESS;
}

CUresult copy_2d(const char* function, const CUDA_MEMCPY2D* c, CUstream stream, bool blocking) {
  if (!c) return CUDA_ERROR_INVALID_VALUE;
  return copy_box(function,
                  {.source = {c->srcMemoryType, c->srcHost, c->srcDevice, c->srcXInBytes, c->srcY, 0, c->srcPitch, 0},
                   .destination = {c->dstMemoryType, c->dstHost, c->dstDevice, c->dstXInBytes, c->dstY, 0, c->dstPitch,
                                   0},
                   .width = c->WidthInBytes,
                   .height = c->Height,
                   .depth = 1},
                  stream, blocking);
}

CUresult copy_3d(const char* function, const CUDA_MEMCPY3D* c, CUstream stream, bool blocking) {
  if (!c || c->srcLOD || c->dstLOD) return CUDA_ERROR_INVALID_VALUE;
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

// --- between contexts ---------------------------------------------------------------------------------------------

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

CUresult cuMemcpy(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount) {
  return copy_bytes(dst, src, ByteCount, default_stream(), true, kAnywhere);
}

CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream) {
  return copy_bytes(dst, src, ByteCount, hStream, false, kAnywhere);
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr dstDevice, const void* srcHost, size_t ByteCount) {
  return copy_bytes(dstDevice, address(srcHost), ByteCount, default_stream(), true, kDestinationIsDevice);
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dstDevice, const void* srcHost, size_t ByteCount, CUstream hStream) {
  return copy_bytes(dstDevice, address(srcHost), ByteCount, hStream, false, kDestinationIsDevice);
}

CUresult cuMemcpyDtoH_v2(void* dstHost, CUdeviceptr srcDevice, size_t ByteCount) {
  return copy_bytes(address(dstHost), srcDevice, ByteCount, default_stream(), true, kSourceIsDevice);
}

CUresult cuMemcpyDtoHAsync_v2(void* dstHost, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream) {
  return copy_bytes(address(dstHost), srcDevice, ByteCount, hStream, false, kSourceIsDevice);
}

CUresult cuMemcpyDtoD_v2(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount) {
  return copy_bytes(dstDevice, srcDevice, ByteCount, default_stream(), true, kBothAreDevice);
}

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

CUresult cuMemcpy2D_v2(const CUDA_MEMCPY2D* pCopy) { return copy_2d("cuMemcpy2D", pCopy, default_stream(), true); }

CUresult cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D* pCopy) {
  return copy_2d("cuMemcpy2DUnaligned", pCopy, default_stream(), true);
}

CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D* pCopy, CUstream hStream) {
  return copy_2d("cuMemcpy2DAsync", pCopy, hStream, false);
}

CUresult cuMemcpy3D_v2(const CUDA_MEMCPY3D* pCopy) { return copy_3d("cuMemcpy3D", pCopy, default_stream(), true); }

CUresult cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D* pCopy, CUstream hStream) {
  return copy_3d("cuMemcpy3DAsync", pCopy, hStream, false);
}

}  // namespace xmig::client
