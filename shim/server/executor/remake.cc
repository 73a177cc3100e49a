// For a recovery: the program's objects are made again, and execution begins at the last snapshot.
#include <algorithm>

#include "server/clock.h"
#include "server/executor/executor.h"

namespace xmig::server {
namespace {

// Which records of the ring change what a snapshot keeps beside memory.
bool changes_objects(Op op) {
  switch (op) {
    case Op::cuStreamCreateWithPriority:
    case Op::cuStreamDestroy_v2:
    case Op::cuEventCreate:
    case Op::cuEventDestroy_v2:
    case Op::xmContextReset:
    case Op::xmLimit:
    case Op::xmPeer:
    case Op::xmGrow:
    case Op::xmShrink:
    case Op::xmPin:
    case Op::xmUnpin:
    case Op::xmAlloc:
    case Op::xmFree:
    case Op::xmDiscard:
    case Op::xmReuse:
    case Op::xmImage:
    case Op::xmImageFile:
    case Op::xmModuleLoad:
    case Op::xmBindGlobal:
    case Op::xmTwin:
    case Op::xmVariables:
    case Op::xmKernel:
    case Op::cuModuleUnload:
    case Op::xmGraph:
    case Op::xmGraphDestroy:
    case Op::cuFuncSetAttribute:
    case Op::cuEventRecordWithFlags: return true;
    default: return false;
  }
}

}  // namespace

void Executor::entered() { generation_ = job_.header().generation.load(); }

void Executor::start_at(const SnapshotContent& content, uint64_t executed) {
  position_ = content.position;
  published_ = executed;
  sequence_ = content.sequence;
  failures_ = content.failures;
  for (const Failure& failure : failures_) any_failure_ |= failure.error != 0;
}

Result<> Executor::make_objects(const SnapshotContent& content) {
  mode_ = Mode::kRestore;
  for (const std::span<const std::byte> stored : content.objects) {
    if (Result<> made = make_object(stored); !made) return made;
  }
  mode_ = Mode::kRun;
  for (const Variable& variable : content.variables) {
    if (add_twin(variable.module, variable.address, variable.name) == CUDA_SUCCESS) continue;
    return Error{"the variable " + variable.name + " of a module is not there any more"};
  }
  for (const RecordedEvent& recorded : content.events) record_again(recorded);
  return {};
}

Result<> Executor::make_object(std::span<const std::byte> stored) {
  if (!record_.load_stored(stored) || record_.header().ordinal >= contexts_.count()) {
    return Error{"an object record of the last snapshot does not decode"};
  }
  contexts_.use(record_.header().ordinal);
  used_stream_.reset();
  const CUresult result = kHandlers[record_.header().op](*this, record_);
  faults_.check(result);
  if (result == CUDA_SUCCESS && !broken_) return {};
  return Error{std::string("an object of the last snapshot cannot be made again: ") + record_.info().name + ": CUDA error " +
               std::to_string(result)};
}

// It was complete at the snapshot. Times between such events and later ones are lost.
void Executor::record_again(const RecordedEvent& recorded) {
  Event* const event =
      recorded.index < journal::kMaxEvents ? objects_.events.find(static_cast<uint32_t>(recorded.index)) : nullptr;
  if (!event) return;
  contexts_.use(event->owner.ordinal);
  faults_.check(driver_.cuEventRecordWithFlags(event->real, nullptr, 0));
  event->recorded = recorded.sequence;
}

Result<> Executor::execute_objects(uint64_t until) {
  mode_ = Mode::kObjects;
  while (position_ < until) {
    if (!load_next(until)) return Error{*broken_};
    const journal::RecordHeader& header = record_.header();
    const auto op = static_cast<Op>(header.op);
    const bool failing = failures_[header.ordinal].error != 0;
    CUresult result = CUDA_SUCCESS;
    contexts_.use(header.ordinal);
    used_stream_.reset();
    if (op == Op::cuEventRecordWithFlags) {
      result = failing ? CUDA_SUCCESS : on_cuEventRecordWithFlags(record_);
    } else if (changes_objects(op) && (!failing || keeps_books(op))) {
      result = kHandlers[header.op](*this, record_);
    }
    faults_.check(result);
    if (broken_) return Error{*broken_};
    position_ += header.size;
    sequence_ = header.sequence;
  }
  mode_ = Mode::kRun;
  return {};
}

void Executor::begin_replay(uint64_t executed, std::optional<Delivery> deliver, std::optional<Careful> careful) {
  journal::JournalHeader& header = job_.header();
  for (uint32_t ordinal = 0; ordinal < contexts_.count(); ++ordinal) {
    const Failure& failure = failures_[ordinal];
    if (failure.error == 0 || header.context_error.load() != 0) continue;
    header.context_error_ordinal.store(ordinal);
    header.context_error_sequence.store(failure.sequence);
    header.context_error.store(failure.error, std::memory_order_release);
  }
  progress_.idle(sequence_);
  const uint64_t now = now_ns(), until = std::max(executed, position_);
  replay_.begin(now, until, deliver, careful);
  schedule_.start_replay(header.stall, now, until > position_);
}

}  // namespace xmig::server
