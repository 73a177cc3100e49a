#include <stdexcept>

#include "device/cpu/cpu_device.h"
#include "device/cuda/open_cuda.h"
#include "device/device.h"
#include "device/null/null_device.h"

namespace xmig::device {

std::unique_ptr<Device> open(std::string_view kind, std::span<const int> ordinals, uint64_t memory_bytes) {
  if (kind == "cpu") return open_cpu(ordinals, memory_bytes);
  if (kind == "null") return open_null(ordinals, memory_bytes);
  if (kind == "cuda") return open_cuda(ordinals);
  throw std::runtime_error("there is no device kind \"" + std::string(kind) + "\"; say cpu, null or cuda (as in --device cpu:0)");
}

}  // namespace xmig::device
