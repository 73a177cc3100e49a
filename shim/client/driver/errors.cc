// Names and texts of errors.
#include <algorithm>
#include <iterator>

#include "error_names.h"
#include "local.h"

namespace xmig::client {
namespace {

const ErrorName* find(CUresult error) {
  const auto* const end = std::end(kErrorNames);
  const auto* const found =
      std::find_if(kErrorNames, end, [&](const ErrorName& entry) { return entry.error == error; });
  return found == end ? nullptr : found;
}

}  // namespace

CUresult cuGetErrorName(CUresult error, const char** pStr) {
  if (!pStr) return CUDA_ERROR_INVALID_VALUE;
  const ErrorName* const found = find(error);
  *pStr = found ? found->name : nullptr;
  return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult error, const char** pStr) {
  if (!pStr) return CUDA_ERROR_INVALID_VALUE;
  const ErrorName* const found = find(error);
  *pStr = found ? found->text : nullptr;
  return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

}  // namespace xmig::client
