// What an xmTensorMap record asks for.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace xmig::journal {

enum class TensorMapForm : uint32_t { kTiled, kIm2col, kIm2colWide, kReplace };

inline constexpr uint32_t kMaxTensorRank = 5;
inline constexpr uint32_t kMaxTensorCorners = kMaxTensorRank - 2;
static_assert(sizeof(CUtensorMap) == 16 * sizeof(uint64_t));

}  // namespace xmig::journal
