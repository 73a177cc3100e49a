// Events, as far as the client needs to know them.
#pragma once

#include <cuda.h>

namespace xmig::client {

struct Context;

bool valid_event(CUevent event);
bool has_timing(CUevent event);

// The context was reset: its events are gone.
void events_context_reset(const Context& context);

}  // namespace xmig::client
