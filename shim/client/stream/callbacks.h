// Host functions, as far as others need to know of them.
#pragma once

namespace xmig::client {

// Is there any that has not come to its end?
bool host_functions_are_waiting();

}  // namespace xmig::client
