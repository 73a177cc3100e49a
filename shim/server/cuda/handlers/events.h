// Events, values in memory, and the calls that wait for the device. The executor's thread alone, but for OutsideWaits.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "server/cuda/handlers/addresses.h"
#include "server/cuda/handlers/outside_waits.h"
#include "server/cuda/handlers/session.h"
#include "server/cuda/handlers/streams.h"

namespace xmig::server {

class Events {
 public:
  Events(const Session& session, Streams& streams, Addresses& addresses, OutsideWaits& outside);
  Events(const Events&) = delete;
  void destroy_all();

  void created(uint64_t handle, CUevent real, const Record& record);
  // It was complete at the snapshot that a recovery begins at. Times between such events and later ones are lost.
  void record_again(const RecordedEvent& recorded);

  CUresult on_cuCtxSynchronize(Record& record);
  CUresult on_cuStreamSynchronize(Record& record);
  CUresult on_cuEventSynchronize(Record& record);
  CUresult on_cuStreamQuery(Record& record);
  CUresult on_cuEventElapsedTime_v2(Record& record);
  CUresult on_cuEventRecordWithFlags(Record& record);
  CUresult on_cuStreamWaitValue32_v2(Record& record);
  CUresult on_cuStreamWaitValue64_v2(Record& record);

 private:
  template <typename Args, typename Call>
  CUresult wait_for_value(Record& record, Call&& call);
  CUresult record_event(Event& event, uint32_t index, CUstream stream, unsigned int flags, uint64_t sequence);

  const DriverTable& driver_;
  Contexts& contexts_;
  Faults& faults_;
  Job& job_;
  Objects& objects_;
  Waits& waits_;
  Current& current_;
  Streams& streams_;
  Addresses& addresses_;
  OutsideWaits& outside_;
};

}  // namespace xmig::server
