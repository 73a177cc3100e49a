// Memory that the program maps itself (cuMemCreate, cuMemMap).
#pragma once

#include <cstdint>

namespace xmig::client {

// The server has forgotten what was allocated in a context that was reset. Mappings belong to no context: say again
// that they are live.
void restate_mappings(uint64_t context);

}  // namespace xmig::client
