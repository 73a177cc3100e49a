// Events, as far as the client needs to know them.
//
// What lies in this folder: what programs do with streams and put into them: streams (stream_calls; their table is in
// journal/streams.h), events, kernel launches, host functions (callbacks). An event is under its own lock, the host functions that
// wait for their turn under the one in callbacks.cc.
#pragma once

#include <cuda.h>

namespace xmig::client {

struct Context;

bool valid_event(CUevent event);
bool has_timing(CUevent event);

// The context was reset: its events are gone.
void events_context_reset(const Context& context);

}  // namespace xmig::client
