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
  if (record.replied() && !wait->barrier) {
    wait->barrier = true;
    wait->from = record.answered_at();
  }
  record.defer();
  waits.start(std::move(wait));
  return CUDA_SUCCESS;
}

}  // namespace xmig::server
