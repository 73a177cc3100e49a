#include "client/collectives/group.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "client/collectives/captured.h"
#include "client/graph/capture.h"
#include "client/journal/append.h"
#include "client/journal/diversion.h"
#include "nccl_client.h"

namespace xmig::client {
namespace {

using journal::CollectiveOperation;
using journal::CommunicatorReply;

constexpr size_t kMostOperations = journal::kMaxPayload / sizeof(CollectiveOperation);
constexpr size_t kMostAtOnce = 2 * journal::kStagingSlots;  // records of a thread that are not answered

struct Group {
  int depth = 0;
  ncclResult_t error = ncclSuccess;  // the first: the group does nothing then
  std::vector<Making> makings;
  std::vector<CollectiveOperation> operations;
  uint64_t capture = 0;  // of all operations
};
constinit thread_local Group* open_group = nullptr;  // between ncclGroupStart and ncclGroupEnd

constinit std::atomic<uint64_t> next_id{1};

Communicator& place(uint64_t handle);

ncclResult_t taken(const Making& making, CUresult error, CommunicatorReply& reply) {
  reply.text[sizeof(reply.text) - 1] = 0;
  if (error != CUDA_SUCCESS) {
    free_handle(making.handle);
    return failed(as_nccl(error), "the communicator was not made: CUDA error %d", error);
  }
  if (reply.result != ncclSuccess) {
    free_handle(making.handle);
    const bool known = reply.result > 0 && reply.result < ncclInProgress;
    return failed(known ? static_cast<ncclResult_t>(reply.result) : ncclInternalError, "%s", reply.text);
  }
  if (reply.ranks == 0) {
    free_handle(making.handle);
    *making.out = nullptr;
    return ncclSuccess;
  }
  Communicator& communicator = place(making.handle);
  communicator.context = making.context;
  communicator.rank = reply.rank;
  communicator.ranks = reply.ranks;
  communicator.id.store(next_id.fetch_add(1, std::memory_order_relaxed), std::memory_order_relaxed);
  {
    const std::lock_guard lock(communicator.mutex);
    communicator.operators.clear();
  }
  communicator.alive.store(true, std::memory_order_release);
  *making.out = as_handle(making.handle);
  return ncclSuccess;
}

// All that are to be made wait for their ranks at the same time: one may be another's.
ncclResult_t make_all(std::vector<Making>& makings) {
  if (makings.size() > kMostAtOnce) {
    for (const Making& making : makings) free_handle(making.handle);
    return failed(ncclInvalidUsage, "a group makes at most %zu communicators, not %zu", kMostAtOnce, makings.size());
  }
  std::vector<Pending> pending;
  for (const Making& making : makings) {
    const WithContext of_it(*making.context);
    const Slice slice{making.payload.data(), making.payload.size()};
    pending.push_back(start(making.op, making.arguments.data(), making.arguments.size(), {&slice, 1}, sizeof(CommunicatorReply)));
  }
  ncclResult_t result = ncclSuccess;
  for (size_t i = 0; i < makings.size(); ++i) {
    CommunicatorReply reply{};
    const CUresult error = finish(pending[i], &reply, sizeof(reply));
    const ncclResult_t one = taken(makings[i], error, reply);
    if (result == ncclSuccess) result = one;
  }
  return result;
}

ncclResult_t begin_all(const std::vector<CollectiveOperation>& operations, uint64_t capture) {
  if (operations.size() > kMostOperations) {
    return failed(ncclInvalidUsage, "a group has at most %zu operations, not %zu", kMostOperations, operations.size());
  }
  const Communicator* const first = find_communicator(as_handle(operations[0].communicator));
  if (!first) return failed(ncclInvalidArgument, "a communicator was destroyed before its group ended");
  if (diverting() || capture != 0) [[unlikely]] {
    for (const CollectiveOperation& operation : operations) {
      const Communicator* const of_it = find_communicator(as_handle(operation.communicator));
      if (!of_it) return failed(ncclInvalidArgument, "a communicator was destroyed before its group ended");
      uint64_t now = 0;
      const CUresult result = capture_of(*of_it, reinterpret_cast<CUstream>(operation.stream), now);
      if (result != CUDA_SUCCESS) return as_nccl(result);
      if (now != capture) return failed(ncclInvalidUsage, "a capture began or ended between the calls of a group and its end");
    }
    if (capture != 0) return as_nccl(capture_group(capture, operations));
  }
  return as_nccl(append_group(operations, *first->context));
}

ncclResult_t end(Group& group) {
  if (group.error != ncclSuccess) {
    for (const Making& making : group.makings) free_handle(making.handle);
    return group.error;
  }
  if (!group.makings.empty()) {
    if (const ncclResult_t result = make_all(group.makings); result != ncclSuccess) return result;
  }
  return group.operations.empty() ? ncclSuccess : begin_all(group.operations, group.capture);
}

Table<Communicator, journal::kMaxCommunicators>& table() {
  static auto& all = *new Table<Communicator, journal::kMaxCommunicators>;
  return all;
}

Communicator& place(uint64_t handle) { return table().place(journal::handle_index(handle)); }

}  // namespace

Communicator* find_communicator(ncclComm_t handle) { return table().find(number(handle), journal::Kind::kCommunicator); }

ncclResult_t make(Making making) {
  if (open_group) {
    open_group->makings.push_back(std::move(making));
    return ncclSuccess;
  }
  std::vector<Making> one;
  one.push_back(std::move(making));
  return make_all(one);
}

CUresult append_group(std::span<const CollectiveOperation> operations, Context& context) {
  const WithContext of_it(context);
  const Args_xmCommGroup args{static_cast<uint32_t>(operations.size()), 0};
  const Slice slice{operations.data(), operations.size_bytes()};
  return append(Op::xmCommGroup, &args, sizeof(args), {&slice, 1});
}

CUresult capture_of(const Communicator& communicator, CUstream stream, uint64_t& capture) {
  capture = 0;
  if (!diverting()) return CUDA_SUCCESS;
  const WithContext of_it(*communicator.context);  // whose default stream of this thread is meant
  return find_capture(stream, capture);
}

ncclResult_t begin(const CollectiveOperation& operation, uint64_t capture) {
  if (!open_group) return begin_all({operation}, capture);
  if (!open_group->operations.empty() && open_group->capture != capture) {
    return failed(ncclInvalidUsage, "the streams of a group are either all captured by the same graph, or none of them is");
  }
  open_group->capture = capture;
  open_group->operations.push_back(operation);
  return ncclSuccess;
}

void fail_group(ncclResult_t error) {
  if (open_group && open_group->error == ncclSuccess) open_group->error = error;
}

ncclResult_t ncclGroupStart() {
  if (!open_group) open_group = new Group;
  ++open_group->depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (!open_group) return failed(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  if (--open_group->depth > 0) return ncclSuccess;
  const std::unique_ptr<Group> group(std::exchange(open_group, nullptr));
  return end(*group);
}

// How long a group would take nobody here knows; it ends all the same.
ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t*) {
  refused_nccl("ncclGroupSimulateEnd");
  if (!open_group || --open_group->depth > 0) return ncclInvalidUsage;
  const std::unique_ptr<Group> group(std::exchange(open_group, nullptr));
  for (const Making& making : group->makings) free_handle(making.handle);
  return ncclInvalidUsage;
}

}  // namespace xmig::client
