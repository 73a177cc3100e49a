// Events, as far as the client needs to know them.
#pragma once

namespace xmig::client {

struct Context;

// The context was reset: its events are gone.
void events_context_reset(const Context& context);

}  // namespace xmig::client
