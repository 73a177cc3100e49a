#include "client/journal/handles.h"

#include <utility>

namespace xmig::client {

std::optional<uint32_t> Numbers::take() {
  const std::lock_guard lock(mutex_);
  const bool fresh = next_ < limit_;
  if (!free_.empty() && (!fresh || free_.size() > kMinimumQueue)) {
    const uint32_t number = free_.front();
    free_.pop_front();
    return number;
  }
  if (!fresh) return std::nullopt;
  return std::exchange(next_, next_ + step_);
}

void Numbers::give(uint32_t number) {
  const std::lock_guard lock(mutex_);
  free_.push_back(number);
}

namespace {

using journal::Kind;

constexpr uint32_t kKinds = 13;

Numbers& numbers(Kind kind) {
  static Numbers* const all[kKinds] = {
      new Numbers(1),
      new Numbers(number_limit(Kind::kContext)),
      // PyTorch takes a stream that it is given (ExternalStream) for an address, and tells it from its own by the last bit.
      new Numbers(number_limit(Kind::kStream), 2),
      new Numbers(number_limit(Kind::kEvent)),
      new Numbers(number_limit(Kind::kModule)),
      new Numbers(number_limit(Kind::kFunction)),
      new Numbers(number_limit(Kind::kPool)),
      new Numbers(number_limit(Kind::kMemory)),
      new Numbers(number_limit(Kind::kGraph)),
      new Numbers(number_limit(Kind::kGraphExec)),
      new Numbers(number_limit(Kind::kGraphNode)),
      new Numbers(number_limit(Kind::kLibrary)),
      new Numbers(number_limit(Kind::kCommunicator)),
  };
  return *all[static_cast<uint32_t>(kind)];
}

}  // namespace

uint64_t create_handle(Kind kind) {
  const std::optional<uint32_t> number = numbers(kind).take();
  return number ? journal::make_handle(kind, *number) : 0;
}

void free_handle(uint64_t handle) {
  numbers(static_cast<Kind>((handle >> 40) & 0xff)).give(journal::handle_index(handle));
}

}  // namespace xmig::client
