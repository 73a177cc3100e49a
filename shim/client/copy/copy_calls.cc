// The driver's copy functions: each says which copy it means.
//
// Which memory a pointer means is seen from the pointer, as with unified addressing; a function's name only says where
// the program's own memory may not appear.
#include "client/copy/copy_calls.h"

#include "client/bootstrap/message.h"
#include "client/copy/copy.h"
#include "client/memory/memory_call.h"
#include "client/memory/memory_map.h"
#include "local.h"

namespace xmig::client {

namespace {

uint64_t address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

// Memory of ours: on the device, or pinned, which devices reach by the same address.
bool reachable(uint64_t pointer) {
  const Place place = memory_map().place(pointer, 1);
  return place == Place::kDevice || place == Place::kPinned;
}

}  // namespace

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

CUresult Side::resolve(const char* function, uint64_t* start) const {
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

namespace {

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
