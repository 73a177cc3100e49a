// Recovery: the job of a server that is gone, continued.
//
// Memory is mapped, the last cut's objects are made again, its content is put back, and then the records since are
// simply executed. What the program has already is compared (Record::replied, CopyState, CallbackState).
//
// If the lost server was taking a cut (`cutting`), the device memory is the state at that cut, and the shadow is not to
// be trusted: then only the objects are brought forward to it, and the cut is taken again.
#include <algorithm>
#include <cstring>

#include "server/clock.h"
#include "server/executor/executor.h"

namespace xmig::server {

using journal::kGranule;

namespace {

constexpr uint64_t kLongRestore = 10'000'000;  // ns

// Which records of the ring change what a cut keeps beside memory.
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

bool Executor::recover(std::vector<Hosted> given, std::optional<Delivery> deliver, std::optional<Careful> careful,
                       Entry& entry, std::string& why) {
  const uint64_t began = now_ns();
  journal::JournalHeader& header = job_.header();
  const uint64_t tail = header.tail.load();
  const uint64_t executed = std::min(header.executed.load(), tail);
  if (header.magic != journal::kMagic || header.version != journal::kLayoutVersion ||
      header.device_count != contexts_.count()) {
    why = "the journal is not one of this server's kind";
    return false;
  }
  if (!keeps_promises(trouble_)) {
    why = trouble_.text;
    return false;
  }
  const bool ahead = !entry.is_open();
  if (!ahead && !enter(entry, began, why)) return false;

  CutContent content;
  if (const uint64_t cut = header.cut.load(); cut != 0) {
    auto read = read_cut_file(job_.fds().cut[cut & 1].get(), why);
    if (!read || read->number != cut >> 1) {
      why = "the last cut cannot be read: " + (read ? std::string("it has another number") : why);
      return false;
    }
    content = std::move(*read);
  }
  const uint64_t cutting = comes_without_memory_ ? 0 : header.cutting.load();
  const bool cut_again = cutting != 0 && cutting - 1 > content.position;
  const bool memory_is_state = cutting != 0 && cutting - 1 >= content.position;
  if (content.position > tail || tail - content.position > job_.journal().ring_bytes() ||
      (cut_again && cutting - 1 > tail)) {
    why = "the journal does not reach back to the last cut";
    return false;
  }

  if (const CUresult result = physical_.reserve(contexts_.count()); result != CUDA_SUCCESS) {
    why = "the device's address ranges cannot be reserved (CUDA error " + std::to_string(result) + ")";
    return false;
  }
  if (!adopt(std::move(given), why)) return false;
  if (comes_without_memory_) {
    begin_arrival(content);
    if (!make_missing(content, why)) return false;
  }
  std::vector<Extent> fresh;
  if (!hosting_.restore(content.memory, fresh)) {
    why = "physical memory of the last cut is missing";
    return false;
  }
  // What the lost server's device work may still write is a snapshot's: variables are among that, and objects read them.
  if (ahead && cutting != 0 && !enter(entry, began, why)) return false;
  if (entry.is_open()) daemon_.phase("mapped");
  const uint64_t mapped = now_ns();

  position_ = cut_position_ = content.position;
  published_ = executed;
  sequence_ = content.sequence;
  cut_number_ = content.number;
  trimmed_ = std::min(header.trimmed.load(), content.position);
  failures_ = content.failures;
  for (const Failure& failure : failures_) any_failure_ |= failure.error != 0;
  if (!take_over_chunks(content, why) || !keep_copies(content.position, tail, why)) return false;
  if (!restore_objects(content, why)) return false;
  uint64_t made = now_ns();
  if (ahead && cutting == 0) {
    if (!enter(entry, began, why)) return false;
    daemon_.phase("mapped");
    made = now_ns();
  }
  if (comes_without_memory_) {
    if (!fill(why)) return false;
  } else if (!memory_is_state) {
    restore_memory(fresh);
  }
  if (!restore_variables(why)) return false;
  daemon_.phase("restored");
  if (const uint64_t now = now_ns(); !ahead && now - mapped > kLongRestore) {
    log_(Level::kInfo, "after " + in_ms(mapped - began) + " to map memory, restoring took " + in_ms(made - mapped) + " for " +
                           std::to_string(content.objects.size()) + " objects and " + in_ms(now - made) + " for memory");
  }

  if (cut_again) {
    if (!replay_objects(cutting - 1, why)) return false;
    if (!take_cut("the lost server was taking it")) {
      why = "the cut that the lost server was taking cannot be taken again: " + cut_trouble_;
      return false;
    }
  }
  header.cutting.store(0);
  header.cut_position.store(cut_position_);
  for (uint32_t ordinal = 0; ordinal < contexts_.count(); ++ordinal) {
    const Failure& failure = failures_[ordinal];
    if (failure.error == 0 || header.context_error.load() != 0) continue;
    header.context_error_ordinal.store(ordinal);
    header.context_error_sequence.store(failure.sequence);
    header.context_error.store(failure.error, std::memory_order_release);
  }
  deliver_ = deliver;
  careful_ = careful;
  progress_.idle(sequence_);
  redo_times_ = RedoTimes(now_ns());
  redoing_ = true;
  redo_until_ = std::max(executed, position_);
  policy_.start_redo(now_ns());
  stall_.start_replay(header.stall, stall_bound_, now_ns(), redo_until_ > position_);
  return true;
}

// From here on this server writes what is shared.
bool Executor::enter(Entry& entry, uint64_t began, std::string& why) {
  if (!entry.is_open()) log_(Level::kInfo, "prepared a recovery in " + in_ms(now_ns() - began));
  if (!entry.wait()) {
    why = "the server ends before the one before it";
    return false;
  }
  journal::JournalHeader& header = job_.header();
  header.state.store(static_cast<uint32_t>(journal::ServerState::kRecovering));
  generation_ = header.generation.load();
  describe_peers();
  return true;
}

bool Executor::adopt(std::vector<Hosted> given, std::string& why) {
  contexts_.use(0);
  const std::lock_guard lock(hosted_mutex_);
  physical_.keep_ahead(given);
  for (Hosted& memory : given) {
    if (adopt_one(std::move(memory), why) != CUDA_SUCCESS) return false;
  }
  return true;
}

// hosted_mutex_ is held.
CUresult Executor::adopt_one(Hosted memory, std::string& why) {
  const uint64_t id = memory.id;
  if (static_cast<uint32_t>(memory.ordinal) >= contexts_.count()) {
    why = "memory of a device that this server does not have";
    return CUDA_ERROR_INVALID_VALUE;
  }
  contexts_.use(static_cast<uint32_t>(memory.ordinal));
  CUresult result = memory.foreign ? injector_.at_import(++imports_) : CUDA_SUCCESS;
  if (result == CUDA_SUCCESS) {
    switch (memory.kind) {
      case HostedKind::kDevice: result = hosting_.adopt(std::move(memory)); break;
      case HostedKind::kShadow: result = shadow_.adopt(std::move(memory)); break;
      case HostedKind::kImage: result = images_.adopt(std::move(memory)); break;
    }
  }
  faults_.check(result);
  if (result != CUDA_SUCCESS) {
    why = "memory " + std::to_string(id) + " cannot be mapped (CUDA error " + std::to_string(result) + ")";
  }
  return result;
}

bool Executor::restore_objects(const CutContent& content, std::string& why) {
  for (const LiveRange& range : content.live) {
    if (!hosting_.backed(range.address, range.bytes) || !live_.add(range)) {
      why = "an allocation of the last cut has no memory";
      return false;
    }
  }
  for (const Images::State& image : content.images) {
    if (!images_.restore(image)) {
      why = "module image " + std::to_string(image.number) + " is missing";
      return false;
    }
  }
  discard_what_was_not_kept();
  mode_ = Mode::kRestore;
  for (const std::span<const std::byte> stored : content.objects) {
    if (!record_.load_stored(stored) || record_.header().ordinal >= contexts_.count()) {
      why = "an object record of the last cut does not decode";
      return false;
    }
    contexts_.use(record_.header().ordinal);
    used_stream_.reset();
    const CUresult result = kHandlers[record_.header().op](*this, record_);
    faults_.check(result);
    if (result != CUDA_SUCCESS || broken_) {
      why = std::string("an object of the last cut cannot be made again: ") + record_.info().name +
            ": CUDA error " + std::to_string(result);
      return false;
    }
  }
  mode_ = Mode::kRun;
  for (const Variable& variable : content.variables) {
    if (add_twin(variable.module, variable.address, variable.name) == CUDA_SUCCESS) continue;
    why = "the variable " + variable.name + " of a module is not there any more";
    return false;
  }
  for (const RecordedEvent& recorded : content.events) {
    Event* const event =
        recorded.index < journal::kMaxEvents ? objects_.events.find(static_cast<uint32_t>(recorded.index)) : nullptr;
    if (!event) continue;
    // It was complete at the cut. Times between such events and later ones are lost.
    contexts_.use(event->owner.ordinal);
    faults_.check(driver_.cuEventRecordWithFlags(event->real, nullptr, 0));
    event->recorded = recorded.sequence;
  }
  return true;
}

bool Executor::take_over_chunks(CutContent& content, std::string& why) {
  uint64_t last = 0;
  for (const ChunkState& chunk : content.chunks) {
    const bool in_order = chunk.address > last && chunk.address % kGranule == 0;
    const bool kept = chunk.slot == 0 || shadow_.take(chunk.slot);
    if (!in_order || !hosting_.backed(chunk.address, kGranule) || !kept) {
      why = "a chunk of the last cut has no memory, or no shadow";
      return false;
    }
    last = chunk.address;
  }
  chunks_ = std::move(content.chunks);
  return true;
}

// What was live at the cut and is in no chunk of it had been given back by the program's allocator.
void Executor::discard_what_was_not_kept() {
  const std::vector<uint64_t> granules = live_.listed().granules;  // a copy: the list changes with what it says
  auto chunk = chunks_.cbegin();
  for (const uint64_t granule : granules) {
    while (chunk != chunks_.cend() && chunk->address < granule) ++chunk;
    if (chunk == chunks_.cend() || chunk->address != granule) live_.discard(granule, kGranule);
  }
}

void Executor::restore_memory(const std::vector<Extent>& fresh) {
  // Grown since the cut: the redo must find it as the first run did.
  for (const Extent& extent : fresh) {
    contexts_.use(ordinal_of_device_address(extent.address));
    faults_.check(driver_.cuMemsetD8Async(extent.address, 0, extent.bytes, nullptr));
  }
  for (uint32_t ordinal = 0; ordinal < contexts_.count(); ++ordinal) {
    contexts_.use(ordinal);
    faults_.check(driver_.cuCtxSynchronize());
  }
  std::vector<uint64_t> granules, hashes;
  for (const ChunkState& chunk : chunks_) granules.push_back(chunk.address);
  if (!hash_chunks(granules, hashes)) {
    faults_.give_up(sequence_, "the device could not hash its memory");
  }
  std::vector<std::pair<uint64_t, uint64_t>> moves;
  for (size_t i = 0; i < granules.size(); ++i) {
    if (hashes[i] == chunks_[i].hash) continue;
    if (chunks_[i].slot != 0) {
      moves.emplace_back(chunks_[i].address, chunks_[i].slot);
    } else {
      contexts_.use(ordinal_of_device_address(chunks_[i].address));
      faults_.check(driver_.cuMemsetD8Async(chunks_[i].address, 0, kGranule, nullptr));
    }
  }
  for (uint32_t ordinal = 0; ordinal < contexts_.count(); ++ordinal) {
    contexts_.use(ordinal);
    faults_.check(driver_.cuCtxSynchronize());
  }
  if (!copy_chunks(moves)) {
    faults_.give_up(sequence_, "the device could not copy from the shadow");
  }
}

// Bytes that copies have left on the device, for the redo.
bool Executor::keep_copies(uint64_t from, uint64_t until, std::string& why) {
  for (uint64_t at = from; at < until;) {
    journal::RecordHeader record;
    std::memcpy(static_cast<void*>(&record), job_.journal().at(at), sizeof(record));
    if (record.size < sizeof(record) || record.size % 8 != 0 || record.size > until - at) break;  // the redo will say so
    const auto op = static_cast<Op>(record.op);
    const bool copied = (record.state.load() & 0xff) == journal::kCopied && record.reply_hash != 0;
    // One byte at least: how many there are is checked when the record's turn comes.
    if (copied && (op == Op::xmCopyFromPinned || op == Op::xmCopyToPinned) && !copy_log_.keep(record.reply_hash, 1, at)) {
      why = "what a copy brought is not there any more";
      return false;
    }
    at += record.size;
  }
  return true;
}

// The device's work up to `until` was done by the lost server; what remains are this process's own objects.
bool Executor::replay_objects(uint64_t until, std::string& why) {
  mode_ = Mode::kObjects;
  while (position_ < until) {
    if (!load_next(until)) {
      why = *broken_;
      return false;
    }
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
    if (broken_) {
      why = *broken_;
      return false;
    }
    position_ += header.size;
    sequence_ = header.sequence;
  }
  mode_ = Mode::kRun;
  return true;
}

}  // namespace xmig::server
