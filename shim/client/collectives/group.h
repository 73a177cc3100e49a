// What a thread has put between ncclGroupStart and ncclGroupEnd: communicators to be made, operations to begin together.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "api/nccl.h"
#include "client/collectives/communicators.h"
#include "client/journal/context.h"
#include "journal/collectives.h"
#include "ops.h"

namespace xmig::client {

// A communicator that is about to be made.
struct Making {
  Op op = Op::kNone;
  std::vector<std::byte> arguments;
  std::string payload;
  Context* context = nullptr;
  uint64_t handle = 0;
  ncclComm_t* out = nullptr;
};

// Of the context's device, all of them at once.
CUresult append_group(std::span<const journal::CollectiveOperation> operations, Context& context);
// Which capture the stream takes part in, 0: none. An error: work in it would break one.
CUresult capture_of(const Communicator& communicator, CUstream stream, uint64_t& capture);
// At once, or at the end of the thread's group. `capture`: that of the operation's stream.
ncclResult_t make(Making making);
ncclResult_t begin(const journal::CollectiveOperation& operation, uint64_t capture);
// A call of the thread's group has failed: the group does nothing, and says so at its end.
void fail_group(ncclResult_t error);

}  // namespace xmig::client
