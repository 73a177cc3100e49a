// Which of a job's devices reach each other's memory.
#pragma once

#include "common/result.h"
#include "server/services.h"

namespace xmig::server {

// Tells the program how it is on these devices.
void describe_peers(const Services& services);
// The program may have been informed that its devices reach each other: on these they must, too.
Result<> keeps_promises(const Services& services);

}  // namespace xmig::server
