// Page-locked host memory: part of a memfd that client and server have mapped at the same address.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "client/memory/memory_ranges.h"

namespace xmig::client {

// The pages of an allocation that nobody uses any more go back to the system.
void give_pinned(const FreeRange& block);
// cuMemFreeHost without waiting, for memory that nothing which was appended needs any more.
CUresult free_idle_pinned(uint64_t address);

}  // namespace xmig::client
