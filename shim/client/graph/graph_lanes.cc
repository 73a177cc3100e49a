#include "client/graph/graph_lanes.h"

#include <optional>

#include "client/journal/context.h"
#include "client/journal/streams.h"
#include "client/journal/thread.h"
#include "client/stream/events.h"
#include "local.h"
#include "records.h"

namespace xmig::client {

Mark::~Mark() {
  if (valid_event(event_)) client::cuEventDestroy_v2(event_);
}

CUresult Mark::record(Context& context, CUstream stream) {
  const WithContext own(context);
  if (!valid_event(event_) || context_ != &context) {
    if (valid_event(event_)) client::cuEventDestroy_v2(event_);
    event_ = nullptr;
    const CUresult error = client::cuEventCreate(&event_, CU_EVENT_DISABLE_TIMING);
    if (error != CUDA_SUCCESS) return error;
    context_ = &context;
  }
  return record::cuEventRecordWithFlags(event_, stream, CU_EVENT_RECORD_DEFAULT);
}

CUresult Mark::await(CUstream stream) const {
  std::optional<WithContext> own;
  if (const Stream* const known = find_stream(stream)) own.emplace(*known->context);
  return record::cuStreamWaitEvent(stream, event_, CU_EVENT_WAIT_DEFAULT);
}

bool Lanes::Own::there() const {
  const Stream* const known = find_stream(stream);
  return known && known->id == id;
}

Lanes::~Lanes() {
  for (const auto& [of, own] : own_) {
    if (own.there()) client::cuStreamDestroy_v2(own.stream);
  }
}

CUresult Lanes::find(Context& context, uint64_t communicator, CUstream& stream) {
  Own& own = own_[{&context, communicator}];
  if (!own.there()) {
    const WithContext of_it(context);
    if (const CUresult error = client::cuStreamCreate(&own.stream, CU_STREAM_NON_BLOCKING); error != CUDA_SUCCESS) return error;
    own.id = find_stream(own.stream)->id;
  }
  stream = own.stream;
  return CUDA_SUCCESS;
}

}  // namespace xmig::client
