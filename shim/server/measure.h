// What this machine's device and buses can: `xmig-server --measure DEVICE MIB` prints it as one line of JSON. For
// `make gpu`, and for whoever wonders why a snapshot or a suspension takes as long as it does.
#pragma once

#include <cstdint>
#include <string>

namespace xmig::server {

// `device`: "cuda:0". 0, or the exit status after a sentence on standard error.
int measure(const std::string& device, uint64_t mib);

}  // namespace xmig::server
