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
    case Op::xmNameNumbers:
    case Op::xmForgetNumbers:
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
    case Op::xmCommInit:
    case Op::xmCommSplit:
    case Op::xmCommEnd:
    case Op::cuFuncSetAttribute:
    case Op::cuEventRecordWithFlags: return true;
    default: return false;
  }
}

}  // namespace

void Executor::entered() { generation_ = job_.header().generation.load(); }

void Executor::start_at(const SnapshotContent& content, uint64_t executed) {
  current_.position = content.position;
  published_ = executed;
  current_.sequence = content.sequence;
  errors_.restore(content.failures);
}

Result<> Executor::make_objects(const SnapshotContent& content) {
  current_.mode = Mode::kRestore;
  for (const std::span<const std::byte> stored : content.objects) {
    if (Result<> made = make_object(stored); !made) return made;
  }
  current_.mode = Mode::kRun;
  for (const Variable& variable : content.variables) {
    if (handlers_.variables.add_twin(variable.module, variable.address, variable.name) == CUDA_SUCCESS) continue;
    return Error{"the variable " + variable.name + " of a module is not there any more"};
  }
  for (const RecordedEvent& recorded : content.events) handlers_.events.record_again(recorded);
  return {};
}

Result<> Executor::make_object(std::span<const std::byte> stored) {
  if (!current_.record.load_stored(stored) || current_.record.header().ordinal >= contexts_.count()) {
    return Error{"an object record of the last snapshot does not decode"};
  }
  contexts_.use(current_.record.header().ordinal);
  handlers_.streams.begin();
  const CUresult result = kHandlers[current_.record.header().op](handlers_, current_.record);
  faults_.check(result);
  if (result == CUDA_SUCCESS && !current_.broken) return {};
  if (current_.broken) return Error{*current_.broken};
  return Error{std::string("an object of the last snapshot cannot be made again: ") + current_.record.info().name + ": CUDA error " +
               std::to_string(result)};
}

Result<> Executor::execute_objects(uint64_t until) {
  current_.mode = Mode::kObjects;
  while (current_.position < until) {
    if (!load_next(until)) return Error{*current_.broken};
    const journal::RecordHeader& header = current_.record.header();
    const auto op = static_cast<Op>(header.op);
    const bool failing = errors_.of(header.ordinal) != 0;
    CUresult result = CUDA_SUCCESS;
    use_context();
    handlers_.streams.begin();
    if (op == Op::cuEventRecordWithFlags) {
      result = failing ? CUDA_SUCCESS : handlers_.events.on_cuEventRecordWithFlags(current_.record);
    } else if (changes_objects(op) && (!failing || keeps_books(op))) {
      result = kHandlers[header.op](handlers_, current_.record);
    }
    faults_.check(result);
    if (current_.broken) return Error{*current_.broken};
    current_.position += header.size;
    current_.sequence = header.sequence;
  }
  current_.mode = Mode::kRun;
  return {};
}

void Executor::begin_replay(uint64_t executed, std::optional<Delivery> deliver, std::optional<Careful> careful) {
  replay_began_ = now_ns();
  timing_.turn();
  journal::JournalHeader& header = job_.header();
  for (uint32_t ordinal = 0; ordinal < contexts_.count(); ++ordinal) {
    const Failure& failure = errors_.all()[ordinal];
    if (failure.error == 0 || header.context_error.load() != 0) continue;
    header.context_error_ordinal.store(ordinal);
    header.context_error_sequence.store(failure.sequence);
    header.context_error.store(failure.error, std::memory_order_release);
  }
  progress_.idle(current_.sequence);
  work_ = 0;
  quota_is_open_ = true;
  quota_until_ = header.tail.load();
  const uint64_t now = now_ns(), until = std::max(executed, current_.position);
  replay_.begin(now, until, deliver, careful);
  schedule_.start_replay(header.stall, now, until > current_.position);
}

}  // namespace xmig::server
