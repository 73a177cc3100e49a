// The memsets without Async: the asynchronous ones on the default stream, checked before they go.
#include <algorithm>

#include "client/memory/memory_call.h"
#include "client/memory/memory_map.h"
#include "local.h"
#include "records.h"

namespace xmig::client {

namespace {

// `width` counts elements of T. `append` puts the record for device memory into the journal.
template <typename T, typename Append>
CUresult set(CUdeviceptr destination, size_t pitch, T value, size_t width, size_t height, Append&& append) {
  if (const CUresult result = enter_with_context(); result != CUDA_SUCCESS) return result;
  if (!width || !height) return CUDA_SUCCESS;
  size_t bytes = 0;
  if (destination % sizeof(T) || __builtin_mul_overflow(width, sizeof(T), &bytes)) return CUDA_ERROR_INVALID_VALUE;
  if (height == 1) pitch = bytes;
  if (pitch < bytes || pitch % sizeof(T)) return CUDA_ERROR_INVALID_VALUE;
  const Place place = memory_map().place(destination, pitch, bytes, height);
  if (place == Place::kDevice) return append();
  if (place != Place::kPinned) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = client::cuStreamSynchronize(default_stream()); result != CUDA_SUCCESS) return result;
  for (size_t row = 0; row < height; ++row) {
    std::fill_n(reinterpret_cast<T*>(destination + row * pitch), width, value);
  }
  return CUDA_SUCCESS;
}

}  // namespace

CUresult cuMemsetD8_v2(CUdeviceptr dstDevice, unsigned char uc, size_t N) {
  return set(dstDevice, 0, uc, N, 1,
             [&] { return record::cuMemsetD8Async(dstDevice, uc, N, default_stream()); });
}

CUresult cuMemsetD16_v2(CUdeviceptr dstDevice, unsigned short us, size_t N) {
  return set(dstDevice, 0, us, N, 1,
             [&] { return record::cuMemsetD16Async(dstDevice, us, N, default_stream()); });
}

CUresult cuMemsetD32_v2(CUdeviceptr dstDevice, unsigned int ui, size_t N) {
  return set(dstDevice, 0, ui, N, 1,
             [&] { return record::cuMemsetD32Async(dstDevice, ui, N, default_stream()); });
}

CUresult cuMemsetD2D8_v2(CUdeviceptr dstDevice, size_t dstPitch, unsigned char uc, size_t Width, size_t Height) {
  return set(dstDevice, dstPitch, uc, Width, Height,
             [&] { return record::cuMemsetD2D8Async(dstDevice, dstPitch, uc, Width, Height, default_stream()); });
}

CUresult cuMemsetD2D16_v2(CUdeviceptr dstDevice, size_t dstPitch, unsigned short us, size_t Width, size_t Height) {
  return set(dstDevice, dstPitch, us, Width, Height,
             [&] { return record::cuMemsetD2D16Async(dstDevice, dstPitch, us, Width, Height, default_stream()); });
}

CUresult cuMemsetD2D32_v2(CUdeviceptr dstDevice, size_t dstPitch, unsigned int ui, size_t Width, size_t Height) {
  return set(dstDevice, dstPitch, ui, Width, Height,
             [&] { return record::cuMemsetD2D32Async(dstDevice, dstPitch, ui, Width, Height, default_stream()); });
}

}  // namespace xmig::client
