// The limits of a context, for devices that have none: kept, checked and rounded as a GPU's driver does it.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <array>
#include <cstddef>

namespace xmig::device {

class Limits {
 public:
  // `memory_bytes`: of the device.
  explicit Limits(size_t memory_bytes) : memory_bytes_(memory_bytes) {
    values_[CU_LIMIT_STACK_SIZE] = 1024;
    values_[CU_LIMIT_PRINTF_FIFO_SIZE] = 8650752;
    values_[CU_LIMIT_MALLOC_HEAP_SIZE] = 8 << 20;
    values_[CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT] = 2048;
    values_[CU_LIMIT_MAX_L2_FETCH_GRANULARITY] = 64;
  }

  CUresult get(size_t* value, CUlimit limit) const {
    if (!value || limit >= CU_LIMIT_MAX) return CUDA_ERROR_INVALID_VALUE;
    if (!known(limit)) return CUDA_ERROR_UNSUPPORTED_LIMIT;
    *value = values_[limit];
    return CUDA_SUCCESS;
  }

  CUresult set(CUlimit limit, size_t value) {
    if (limit >= CU_LIMIT_MAX) return CUDA_ERROR_INVALID_VALUE;
    if (!known(limit)) return CUDA_ERROR_UNSUPPORTED_LIMIT;
    switch (limit) {
      case CU_LIMIT_STACK_SIZE:
        if (value > kMostStack) return CUDA_ERROR_INVALID_VALUE;
        value = (value + 15) / 16 * 16;
        break;
      case CU_LIMIT_PRINTF_FIFO_SIZE:
      case CU_LIMIT_MALLOC_HEAP_SIZE:
        if (value > memory_bytes_) return CUDA_ERROR_OUT_OF_MEMORY;
        break;
      case CU_LIMIT_MAX_L2_FETCH_GRANULARITY: value = std::min<size_t>(value, 128); break;
      case CU_LIMIT_SHMEM_SIZE:
      case CU_LIMIT_CIG_ENABLED: return CUDA_ERROR_UNSUPPORTED_LIMIT;  // to be read only
      default: break;
    }
    values_[limit] = value;
    return CUDA_SUCCESS;
  }

 private:
  static constexpr size_t kMostStack = 512 << 10;  // bytes of local memory that a thread can have

  // Those of devices of today: there is no depth of synchronisation any more.
  static bool known(CUlimit limit) {
    return limit >= 0 && limit <= CU_LIMIT_CIG_ENABLED && limit != CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH;
  }

  size_t memory_bytes_;
  std::array<size_t, CU_LIMIT_MAX> values_{};
};

}  // namespace xmig::device
