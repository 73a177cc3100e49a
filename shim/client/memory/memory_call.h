// What stands at the beginning of the memory half's driver functions.
#pragma once

#include <cuda.h>

#include "client/journal/append.h"

namespace xmig::client {

inline CUresult enter_with_context() {
  if (const CUresult result = enter(); result != CUDA_SUCCESS) return result;
  return current_ordinal() < 0 ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}

}  // namespace xmig::client
