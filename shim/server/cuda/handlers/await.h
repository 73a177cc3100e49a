// The call of a record waits for the device.
#pragma once

#include <memory>
#include <utility>

#include "server/cuda/handlers/streams.h"
#include "server/executor/waits.h"

namespace xmig::server {

// The answer comes when what `wait` names is done; execution goes on.
inline CUresult await(Waits& waits, const Streams& streams, Record& record, std::unique_ptr<Wait> wait) {
  wait->answer = Answer::to(record);
  wait->ordinal = streams.ordinal();
  wait->barrier |= record.replied();
  record.defer();
  waits.start(std::move(wait));
  return CUDA_SUCCESS;
}

}  // namespace xmig::server
