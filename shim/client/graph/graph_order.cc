#include "client/graph/graph_order.h"

#include "client/journal/context.h"
#include "client/journal/streams.h"
#include "client/journal/thread.h"
#include "client/memory/memory.h"
#include "local.h"

namespace xmig::client {

CUresult LaunchOrder::before(CUstream stream) {
  const uint64_t key = memory_stream_key(stream);
  if (key == key_) return CUDA_SUCCESS;
  if (key_) {
    if (const CUresult error = follow(stream); error != CUDA_SUCCESS) return error;
  }
  const Stream* const known = find_stream(stream);
  key_ = key;
  stream_ = stream;
  stream_id_ = known ? known->id : 0;
  context_ = known ? known->context : this_thread().context;
  return CUDA_SUCCESS;
}

CUresult LaunchOrder::follow(CUstream stream) {
  {
    const WithContext own(*context_);
    if (current(this_thread()).error != CUDA_SUCCESS) return CUDA_SUCCESS;  // nothing runs there any more
    const Stream* const last = find_stream(stream_);
    const bool there = last ? last->id == stream_id_ : special(stream_) && memory_stream_key(stream_) == key_;
    // A stream that is gone, or another thread's, cannot be named any more.
    if (!there) return client::cuCtxSynchronize();
  }
  if (const CUresult error = mark_.record(*context_, stream_); error != CUDA_SUCCESS) return error;
  return mark_.await(stream);
}

}  // namespace xmig::client
