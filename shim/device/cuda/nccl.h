// Collectives of GPUs: the program's own NCCL, opened by its full path in the server.
//
// The library is loaded with the first communicator and never unloaded; all communicators of a program use the same file. What may
// wait for other ranks (making, ending, aborting a communicator) is done on threads of its own, so that the executor never does.
#pragma once

#include <memory>

#include "device/collectives.h"
#include "driver_table.h"

namespace xmig::device {

std::unique_ptr<Collectives> nccl_collectives(const DriverTable& driver);

}  // namespace xmig::device
