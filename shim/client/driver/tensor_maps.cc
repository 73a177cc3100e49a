// Tensor maps: descriptions of tensors that kernels hand to the hardware. What their bytes mean only the driver knows,
// so the server's makes them; the address in them is the same in both processes.
#include <cstring>

#include "client/journal/append.h"
#include "journal/tensor_map.h"
#include "local.h"
#include "ops.h"

namespace xmig::client {
namespace {

using journal::TensorMapForm;

constexpr uint64_t kAlignment = 64;  // what cuda.h demands of callers; its type is aligned to more since CUDA 13

CUresult make(CUtensorMap* map, const Args_xmTensorMap& args) {
  if (!map || reinterpret_cast<uint64_t>(map) % kAlignment != 0) return CUDA_ERROR_INVALID_VALUE;
  CUtensorMap made{};
  const CUresult result = call(Op::xmTensorMap, &args, sizeof(args), &made, sizeof(made));
  if (result == CUDA_SUCCESS) std::memcpy(map, &made, sizeof(made));
  return result;
}

// What the three encoders share. False: the arguments cannot be read.
bool describe(Args_xmTensorMap& args, const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* steps) {
  if (args.rank == 0 || args.rank > journal::kMaxTensorRank || !sizes || !steps || (args.rank > 1 && !strides)) {
    return false;
  }
  std::memcpy(args.sizes, sizes, args.rank * sizeof(*sizes));
  if (args.rank > 1) std::memcpy(args.strides, strides, (args.rank - 1) * sizeof(*strides));
  std::memcpy(args.steps, steps, args.rank * sizeof(*steps));
  return true;
}

Args_xmTensorMap common(TensorMapForm form, CUtensorMapDataType type, cuuint32_t rank, void* address,
                        CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                        CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  Args_xmTensorMap args{};
  args.form = static_cast<uint32_t>(form);
  args.type = type;
  args.rank = rank;
  args.interleave = interleave;
  args.swizzle = swizzle;
  args.promotion = promotion;
  args.fill = fill;
  args.address = reinterpret_cast<uint64_t>(address);
  return args;
}

}  // namespace

CUresult cuTensorMapEncodeTiled(CUtensorMap* tensorMap, CUtensorMapDataType tensorDataType, cuuint32_t tensorRank,
                                void* globalAddress, const cuuint64_t* globalDim, const cuuint64_t* globalStrides,
                                const cuuint32_t* boxDim, const cuuint32_t* elementStrides,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion l2Promotion, CUtensorMapFloatOOBfill oobFill) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  Args_xmTensorMap args = common(TensorMapForm::kTiled, tensorDataType, tensorRank, globalAddress, interleave, swizzle,
                                 l2Promotion, oobFill);
  if (!boxDim || !describe(args, globalDim, globalStrides, elementStrides)) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(args.box, boxDim, tensorRank * sizeof(*boxDim));
  return make(tensorMap, args);
}

CUresult cuTensorMapEncodeIm2col(CUtensorMap* tensorMap, CUtensorMapDataType tensorDataType, cuuint32_t tensorRank,
                                 void* globalAddress, const cuuint64_t* globalDim, const cuuint64_t* globalStrides,
                                 const int* pixelBoxLowerCorner, const int* pixelBoxUpperCorner,
                                 cuuint32_t channelsPerPixel, cuuint32_t pixelsPerColumn,
                                 const cuuint32_t* elementStrides, CUtensorMapInterleave interleave,
                                 CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2Promotion,
                                 CUtensorMapFloatOOBfill oobFill) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  Args_xmTensorMap args = common(TensorMapForm::kIm2col, tensorDataType, tensorRank, globalAddress, interleave, swizzle,
                                 l2Promotion, oobFill);
  if (!pixelBoxLowerCorner || !pixelBoxUpperCorner || tensorRank < 3 ||
      !describe(args, globalDim, globalStrides, elementStrides)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  std::memcpy(args.lower, pixelBoxLowerCorner, (tensorRank - 2) * sizeof(int));
  std::memcpy(args.upper, pixelBoxUpperCorner, (tensorRank - 2) * sizeof(int));
  args.channels = channelsPerPixel;
  args.pixels = pixelsPerColumn;
  return make(tensorMap, args);
}

CUresult cuTensorMapEncodeIm2colWide(CUtensorMap* tensorMap, CUtensorMapDataType tensorDataType,
                                     cuuint32_t tensorRank, void* globalAddress, const cuuint64_t* globalDim,
                                     const cuuint64_t* globalStrides, int pixelBoxLowerCornerWidth,
                                     int pixelBoxUpperCornerWidth, cuuint32_t channelsPerPixel,
                                     cuuint32_t pixelsPerColumn, const cuuint32_t* elementStrides,
                                     CUtensorMapInterleave interleave, CUtensorMapIm2ColWideMode mode,
                                     CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2Promotion,
                                     CUtensorMapFloatOOBfill oobFill) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  Args_xmTensorMap args = common(TensorMapForm::kIm2colWide, tensorDataType, tensorRank, globalAddress, interleave,
                                 swizzle, l2Promotion, oobFill);
  if (!describe(args, globalDim, globalStrides, elementStrides)) return CUDA_ERROR_INVALID_VALUE;
  args.lower[0] = pixelBoxLowerCornerWidth;
  args.upper[0] = pixelBoxUpperCornerWidth;
  args.channels = channelsPerPixel;
  args.pixels = pixelsPerColumn;
  args.mode = mode;
  return make(tensorMap, args);
}

CUresult cuTensorMapReplaceAddress(CUtensorMap* tensorMap, void* globalAddress) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  if (!tensorMap) return CUDA_ERROR_INVALID_VALUE;
  Args_xmTensorMap args{};
  args.form = static_cast<uint32_t>(TensorMapForm::kReplace);
  args.address = reinterpret_cast<uint64_t>(globalAddress);
  std::memcpy(args.map, tensorMap, sizeof(args.map));
  return make(tensorMap, args);
}

}  // namespace xmig::client
