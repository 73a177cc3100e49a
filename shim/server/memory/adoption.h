// Memory that another server has made becomes this one's.
#pragma once

#include <cstdint>

#include "common/result.h"
#include "server/channel/hosted.h"
#include "server/memory/process_memory.h"
#include "server/services.h"

namespace xmig::server {

class Adoption {
 public:
  Adoption(const Services& services, ProcessMemory& memory) : services_(services), memory_(memory) {}

  // ProcessMemory::mutex is held. The error's code is `no_peer` where the driver says that the memory's device is out of this one's
  // reach: then host memory is a way round it; from everything else that can be wrong it is not.
  Result<> adopt(Hosted memory);

 private:
  const Services services_;
  ProcessMemory& memory_;
  uint64_t imports_ = 0;  // of another device's memory
};

}  // namespace xmig::server
