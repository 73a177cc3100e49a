// Waits and writes of single words in a stream's order (cuStreamBatchMemOp and its kin).
#pragma once

#include <cuda.h>

namespace xmig::client {

// All of them, or none if one cannot be done.
CUresult append_memory_operations(CUstream stream, unsigned int count, const CUstreamBatchMemOpParams* all,
                                  unsigned int flags);

}  // namespace xmig::client
