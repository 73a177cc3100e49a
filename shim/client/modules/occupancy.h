// How many blocks of a kernel fit on a multiprocessor.
#pragma once

namespace xmig::client {

struct Function;

// Something was set on the function: what was computed for it may not hold any more.
void forget_occupancy(const Function& function);

}  // namespace xmig::client
