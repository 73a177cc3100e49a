// The program's contexts: their limits, and what is left when one goes. The executor's thread alone.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "server/cuda/handlers/graphs.h"
#include "server/cuda/handlers/modules.h"
#include "server/cuda/handlers/peers.h"
#include "server/cuda/handlers/session.h"
#include "server/cuda/handlers/streams.h"

namespace xmig::server {

class ProgramContexts {
 public:
  ProgramContexts(const Session& session, Streams& streams, Modules& modules, Graphs& graphs, Peers& peers);
  ProgramContexts(const ProgramContexts&) = delete;

  CUresult on_xmOpen(Record& record);
  CUresult on_xmLimit(Record& record);
  CUresult on_xmContextReset(Record& record);

 private:
  void reset(uint32_t context);

  const DriverTable& driver_;
  Contexts& contexts_;
  Job& job_;
  LiveSet& live_;
  Objects& objects_;
  const Current& current_;
  ProgramErrors& errors_;
  Streams& streams_;
  Modules& modules_;
  Graphs& graphs_;
  Peers& peers_;
};

}  // namespace xmig::server
