// Page-locked host memory: part of a memfd that client and server have mapped at the same address.
#pragma once

#include "client/memory_ranges.h"

namespace xmig::client {

// The pages of an allocation that nobody uses any more go back to the system.
void give_pinned(const FreeRange& block);

}  // namespace xmig::client
