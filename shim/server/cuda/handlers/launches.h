// Kernel launches. The executor's thread alone.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "server/cuda/handlers/addresses.h"
#include "server/cuda/handlers/session.h"
#include "server/cuda/handlers/streams.h"
#include "server/cuda/handlers/variables.h"

namespace xmig::server {

class Launches {
 public:
  Launches(const Session& session, Streams& streams, const Variables& variables, Addresses& addresses);
  Launches(const Launches&) = delete;

  CUresult on_xmLaunch(Record& record);
  CUresult on_xmFirstLaunch(Record& record);
  CUresult on_xmClusters(Record& record);

 private:
  Kernel* find_kernel(uint64_t handle);
  CUresult launch(Record& record, const Args_xmLaunch& args);

  const DriverTable& driver_;
  const Contexts& contexts_;
  Objects& objects_;
  Streams& streams_;
  const Variables& variables_;
  Addresses& addresses_;
};

}  // namespace xmig::server
