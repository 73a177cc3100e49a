// Functions of the program that run in stream order: the stream waits here while a thread of the client runs them.
//
// The record's state decides (CallbackState): posting a position twice, as a server may that follows a lost one, runs
// the function once.
//
// The executor's thread enqueues them; the driver's threads post them to the program, one at a time, under `mutex_`.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <mutex>

#include "server/cuda/handlers/outside_waits.h"
#include "server/cuda/handlers/session.h"
#include "server/cuda/handlers/streams.h"

namespace xmig::server {

class HostFunctions {
 public:
  HostFunctions(const Session& session, Streams& streams, OutsideWaits& outside);
  HostFunctions(const HostFunctions&) = delete;

  CUresult on_xmHostFunc(Record& record);

 private:
  struct Call;
  void post(uint64_t position);

  const DriverTable& driver_;
  Job& job_;
  Waits& waits_;
  const Current& current_;
  Streams& streams_;
  OutsideWaits& outside_;
  std::mutex mutex_;  // over the header's callbacks
};

}  // namespace xmig::server
