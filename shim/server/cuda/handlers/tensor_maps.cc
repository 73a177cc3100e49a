#include "server/cuda/handlers/tensor_maps.h"

#include <cstring>

#include "journal/tensor_map.h"
#include "ops.h"

namespace xmig::server {

CUresult TensorMaps::on_xmTensorMap(Record& record) {
  using journal::TensorMapForm;
  Args_xmTensorMap args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  CUtensorMap map{};
  void* const address = reinterpret_cast<void*>(args.address);
  const auto type = static_cast<CUtensorMapDataType>(args.type);
  const auto interleave = static_cast<CUtensorMapInterleave>(args.interleave);
  const auto swizzle = static_cast<CUtensorMapSwizzle>(args.swizzle);
  const auto promotion = static_cast<CUtensorMapL2promotion>(args.promotion);
  const auto fill = static_cast<CUtensorMapFloatOOBfill>(args.fill);
  if (args.rank > journal::kMaxTensorRank) return CUDA_ERROR_INVALID_VALUE;
  CUresult result = CUDA_ERROR_INVALID_VALUE;
  switch (static_cast<TensorMapForm>(args.form)) {
    case TensorMapForm::kTiled:
      result = driver_.cuTensorMapEncodeTiled(&map, type, args.rank, address, args.sizes, args.strides, args.box,
                                              args.steps, interleave, swizzle, promotion, fill);
      break;
    case TensorMapForm::kIm2col:
      result = driver_.cuTensorMapEncodeIm2col(&map, type, args.rank, address, args.sizes, args.strides, args.lower,
                                               args.upper, args.channels, args.pixels, args.steps, interleave, swizzle,
                                               promotion, fill);
      break;
    case TensorMapForm::kIm2colWide:
      result = driver_.cuTensorMapEncodeIm2colWide(&map, type, args.rank, address, args.sizes, args.strides,
                                                   args.lower[0], args.upper[0], args.channels, args.pixels, args.steps,
                                                   interleave, static_cast<CUtensorMapIm2ColWideMode>(args.mode),
                                                   swizzle, promotion, fill);
      break;
    case TensorMapForm::kReplace:
      std::memcpy(&map, args.map, sizeof(map));
      result = driver_.cuTensorMapReplaceAddress(&map, address);
      break;
  }
  if (result == CUDA_SUCCESS) record.set_reply(&map, sizeof(map));
  return result;
}

}  // namespace xmig::server
