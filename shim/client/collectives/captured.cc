#include "client/collectives/captured.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "client/bootstrap/message.h"
#include "client/collectives/communicators.h"
#include "client/collectives/group.h"
#include "client/graph/capture.h"
#include "client/journal/context.h"
#include "client/journal/streams.h"

namespace xmig::client {
namespace {

using journal::CollectiveOperation;

class Captured final : public Collectives {
 public:
  explicit Captured(std::span<const CollectiveOperation> operations) : operations_(operations.begin(), operations.end()) {
    for (const CollectiveOperation& operation : operations) {
      const Communicator* const one = find_communicator(as_handle(operation.communicator));
      of_.push_back({one, one->id.load(std::memory_order_relaxed), one->context});
      if (std::find(contexts_.begin(), contexts_.end(), one->context) == contexts_.end()) contexts_.push_back(one->context);
    }
  }

  CUresult check() const override {
    for (const Of& one : of_) {
      if (one.communicator->alive.load(std::memory_order_acquire) && one.communicator->id.load(std::memory_order_relaxed) == one.id) {
        continue;
      }
      complain("a graph was launched whose collectives are of a communicator that was destroyed since: destroy the graph first");
      return CUDA_ERROR_INVALID_HANDLE;
    }
    return CUDA_SUCCESS;
  }
  std::span<Context* const> contexts() const override { return contexts_; }
  uint64_t communicator() const override { return of_[0].id; }
  CUresult begin(const std::function<CUstream(const Context&)>& stream_of) const override {
    std::vector<CollectiveOperation> operations = operations_;
    for (size_t i = 0; i < operations.size(); ++i) operations[i].stream = number(stream_of(*of_[i].context));
    return append_group(operations, *contexts_[0]);
  }

 private:
  struct Of {
    const Communicator* communicator;  // its place, which stays
    uint64_t id;
    Context* context;
  };
  std::vector<CollectiveOperation> operations_;
  std::vector<Of> of_;  // of each operation
  std::vector<Context*> contexts_;
};

}  // namespace

CUresult capture_group(uint64_t capture, std::span<const CollectiveOperation> operations) {
  auto captured = std::make_shared<const Captured>(operations);
  std::vector<CUstream> streams;
  for (const CollectiveOperation& operation : operations) streams.push_back(reinterpret_cast<CUstream>(operation.stream));
  const WithContext of_it(*captured->contexts()[0]);
  return capture_collectives(capture, streams, std::move(captured));
}

}  // namespace xmig::client
