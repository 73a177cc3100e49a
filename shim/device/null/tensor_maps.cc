#include "device/null/tensor_maps.h"

#include <cstdint>
#include <cstring>

#include "journal/tensor_map.h"
#include "xxhash.h"

namespace xmig::device {
namespace {

struct Made {
  uint64_t address;
  uint64_t arguments;  // a hash of them
  uint64_t reserved[14];
};
static_assert(sizeof(Made) == sizeof(CUtensorMap));

bool good_address(const void* address, CUtensorMapInterleave interleave) {
  const uint64_t alignment = interleave == CU_TENSOR_MAP_INTERLEAVE_32B ? 32 : 16;
  return reinterpret_cast<uint64_t>(address) % alignment == 0;
}

// What all encoders demand of a tensor.
bool good_tensor(CUtensorMapDataType type, cuuint32_t rank, const void* address, const cuuint64_t* sizes,
                 const cuuint64_t* strides, const cuuint32_t* steps, CUtensorMapInterleave interleave) {
  constexpr uint64_t kMaxSize = 1ull << 32, kMaxStride = 1ull << 40;
  if (type < 0 || type > CU_TENSOR_MAP_DATA_TYPE_16U6_ALIGN16B || rank == 0 || rank > journal::kMaxTensorRank ||
      !good_address(address, interleave)) {
    return false;
  }
  for (cuuint32_t i = 0; i < rank; ++i) {
    if (sizes[i] == 0 || sizes[i] > kMaxSize || steps[i] == 0 || steps[i] > 8) return false;
    if (i + 1 < rank && (strides[i] % 16 != 0 || strides[i] >= kMaxStride)) return false;
  }
  return true;
}

template <typename... Values>
CUresult make(CUtensorMap* map, const void* address, const Values&... values) {
  Made made{reinterpret_cast<uint64_t>(address), 0, {}};
  ((made.arguments = XXH3_64bits_withSeed(&values, sizeof(values), made.arguments)), ...);
  std::memcpy(map, &made, sizeof(made));
  return CUDA_SUCCESS;
}

uint64_t hash(const void* values, size_t bytes) { return XXH3_64bits(values, bytes); }

}  // namespace

void add_tensor_map_functions(DriverTable& t) {
  t.cuTensorMapEncodeTiled = [](CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    if (!good_tensor(type, rank, address, sizes, strides, steps, interleave)) return CUDA_ERROR_INVALID_VALUE;
    for (cuuint32_t i = 0; i < rank; ++i) {
      if (box[i] == 0 || box[i] > 256) return CUDA_ERROR_INVALID_VALUE;
    }
    return make(map, address, type, rank, hash(sizes, rank * 8), hash(strides, (rank - 1) * 8), hash(box, rank * 4),
                hash(steps, rank * 4), interleave, swizzle, promotion, fill);
  };
  t.cuTensorMapEncodeIm2col = [](CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                 const cuuint64_t* sizes, const cuuint64_t* strides, const int* lower,
                                 const int* upper, cuuint32_t channels, cuuint32_t pixels, const cuuint32_t* steps,
                                 CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                 CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    if (rank < 3 || !good_tensor(type, rank, address, sizes, strides, steps, interleave) || channels > 256 ||
        pixels > 1024) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    return make(map, address, type, rank, hash(sizes, rank * 8), hash(strides, (rank - 1) * 8),
                hash(lower, (rank - 2) * 4), hash(upper, (rank - 2) * 4), channels, pixels, hash(steps, rank * 4),
                interleave, swizzle, promotion, fill);
  };
  // Of compute capability 10 and later only.
  t.cuTensorMapEncodeIm2colWide = [](CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                     const cuuint64_t*, int, int, cuuint32_t, cuuint32_t, const cuuint32_t*,
                                     CUtensorMapInterleave, CUtensorMapIm2ColWideMode, CUtensorMapSwizzle,
                                     CUtensorMapL2promotion,
                                     CUtensorMapFloatOOBfill) { return CUDA_ERROR_NOT_SUPPORTED; };
  t.cuTensorMapReplaceAddress = [](CUtensorMap* map, void* address) {
    if (!good_address(address, CU_TENSOR_MAP_INTERLEAVE_NONE)) return CUDA_ERROR_INVALID_VALUE;
    Made made;
    std::memcpy(&made, map, sizeof(made));
    made.address = reinterpret_cast<uint64_t>(address);
    std::memcpy(map, &made, sizeof(made));
    return CUDA_SUCCESS;
  };
}

}  // namespace xmig::device
