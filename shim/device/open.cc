#include <stdexcept>

#include "device/cpu/cpu_device.h"
#include "device/device.h"
#include "device/null/null_device.h"
#ifdef XMIG_DEVICE_CUDA
#include "device/cuda/open_cuda.h"
#endif

namespace xmig::device {

std::unique_ptr<Device> open(std::string_view kind, std::span<const int> ordinals, uint64_t memory_bytes) {
  if (kind == "cpu") return open_cpu(ordinals, memory_bytes);
  if (kind == "null") return open_null(ordinals, memory_bytes);
#ifdef XMIG_DEVICE_CUDA
  if (kind == "cuda") return open_cuda(ordinals);
  throw std::runtime_error("there is no device kind \"" + std::string(kind) + "\"; say cpu, null or cuda");
#else
  throw std::runtime_error("there is no device kind \"" + std::string(kind) +
                           "\" in this build; say cpu or null (as in --device cpu:0)");
#endif
}

}  // namespace xmig::device
