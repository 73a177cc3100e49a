// Driver functions that are not in the API table.
#pragma once

#include <cuda.h>

namespace xmig::client {

// Names the function in the job's log, once for each, and returns CUDA_ERROR_NOT_SUPPORTED. `name` is a literal.
CUresult unsupported(const char* name);

}  // namespace xmig::client
