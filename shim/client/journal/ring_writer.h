// The one way into the journal: room is found, the caller writes its bytes where they will stay, the tail moves.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "client/bootstrap/process.h"
#include "client/journal/append.h"
#include "client/journal/context.h"
#include "client/journal/thread.h"
#include "journal/layout.h"
#include "journal/lock.h"
#include "ops.h"

namespace xmig::client {

struct RingWriter {
  journal::Lock lock;
  // Under the lock. `tail` is what the shared header says too, but that one could be written by others.
  uint64_t tail = 0;
  uint64_t offset = 0;  // tail % ring_bytes
  uint64_t trimmed = 0;  // as last seen
  uint64_t mapped = 0;   // the ring has been mapped up to here: no page faults until then
  uint64_t sequence = 1;
};
extern constinit RingWriter writer;

struct Shape {
  Op op;
  uint16_t flags;
  uint32_t args;
  uint32_t payload;
  uint32_t reply;
  bool waited = false;  // synchronous, and this thread will take the reply

  constexpr uint32_t payload_offset() const {
    return static_cast<uint32_t>(journal::align8(sizeof(journal::RecordHeader) + args));
  }
  constexpr uint32_t reply_offset() const {
    return payload_offset() + static_cast<uint32_t>(journal::align8(payload));
  }
  constexpr uint32_t size() const { return reply_offset() + static_cast<uint32_t>(journal::align8(reply)); }
};

struct Written {
  CUresult error = CUDA_SUCCESS;
  uint64_t position = 0;
  uint64_t sequence = 0;
};

// Waits, without the lock, until the server has trimmed so much that a record of `size` bytes fits.
CUresult wait_for_room(Thread& thread, uint32_t size);
// The thread's slot of a record that will be waited for: written before the tail moves past it.
void note_waiting(Thread& thread, uint64_t position, const Shape& shape);
// `waited`: the thread waits for the server now.
void ring_doorbell(journal::JournalHeader& header, Thread& thread, bool waited);
// Under the lock: have the pages of the next records, which end at `end`, mapped by one call instead of a fault for each.
void map_ahead(uint64_t end);

// `fill(arguments, payload)` writes the record's arguments and payload, under the lock. The caller has checked that the
// thread may call the driver, and has a slot.
template <typename Fill>
Written write_record(Thread& thread, const Context* context, const Shape& shape, Fill&& fill) {
  journal::JournalHeader& header = *process.header;
  const uint32_t size = shape.size();
  Written written;
  writer.lock.lock();
  while (writer.tail + size - writer.trimmed > process.ring_bytes) [[unlikely]] {
    writer.trimmed = header.trimmed.load(std::memory_order_acquire);
    if (writer.trimmed <= writer.tail && writer.tail + size - writer.trimmed <= process.ring_bytes) break;
    writer.lock.unlock();
    written.error = wait_for_room(thread, size);
    if (written.error != CUDA_SUCCESS) return written;
    writer.lock.lock();
  }
  if (writer.tail + size > writer.mapped) [[unlikely]] map_ahead(writer.tail + size);
  std::byte* const record = process.ring + writer.offset;
  auto* const head = reinterpret_cast<journal::RecordHeader*>(record);
  head->size = size;
  head->op = static_cast<uint16_t>(shape.op);
  head->flags = shape.flags;
  head->sequence = writer.sequence;
  head->thread = thread.slot;
  head->ordinal = static_cast<uint16_t>(context->ordinal);
  head->answered = 0;
  head->context = context->index;
  head->payload = shape.payload;
  head->reply = shape.reply;
  head->state.store(0, std::memory_order_relaxed);
  head->result = 0;
  head->reply_bytes = 0;
  head->reply_hash = 0;
  fill(record + sizeof(journal::RecordHeader), record + shape.payload_offset());

  written.position = writer.tail;
  written.sequence = thread.last_sequence = writer.sequence++;
  if (shape.waited) note_waiting(thread, written.position, shape);
  writer.tail += size;
  writer.offset += size;
  if (writer.offset >= process.ring_bytes) writer.offset -= process.ring_bytes;
  header.next_sequence.store(writer.sequence, std::memory_order_relaxed);
  // Sequentially consistent, as is the server's "set server_sleeping, then look at tail": one of the two sees what the
  // other did.
  header.tail.store(writer.tail, std::memory_order_seq_cst);
  writer.lock.unlock();
  if (header.server_sleeping.load(std::memory_order_seq_cst)) [[unlikely]] ring_doorbell(header, thread, shape.waited);
  return written;
}

// enter(), and a slot for the thread. Inline: it stands before every launch.
CUresult enter_slowly(Thread& thread);
inline CUresult enter(Thread& thread) {
  if (const CUresult error = initialized(); error != CUDA_SUCCESS) [[unlikely]] return error;
  const bool fault = process.header->context_error.load(std::memory_order_relaxed) != 0;
  if (fault || thread.slot == Thread::kNoSlot) [[unlikely]] return enter_slowly(thread);
  return CUDA_SUCCESS;
}
// As enter(), also where the context has a sticky fault.
inline CUresult enter_in_any_case(Thread& thread) {
  if (const CUresult error = initialized(); error != CUDA_SUCCESS) return error;
  return thread.slot == Thread::kNoSlot && !take_slot(thread) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

// The server takes records of these without a context; they name what they are about themselves.
constexpr bool needs_context(Op op) {
  switch (op) {
    case Op::xmOpen:
    case Op::xmGrow:
    case Op::xmShrink:
    case Op::xmUnpin:
    case Op::xmAlloc:
    case Op::xmFree:
    case Op::xmDiscard:
    case Op::xmReuse:
    case Op::xmNameNumbers:
    case Op::xmForgetNumbers:
    case Op::xmContextReset:
    case Op::xmImage:
    case Op::xmImageFile:
    case Op::xmModuleInfo:
    case Op::xmBindGlobal:
    case Op::cuModuleUnload:
      return false;
    default:
      return true;
  }
}

// May this thread put such a record into the journal, and of which context is it? Inline, as enter() is.
struct Admitted {
  Thread& thread;
  Context* context;
  CUresult error;
};
inline Admitted admit(Op op) {
  Thread& thread = this_thread();
  // A reset is the way out of a sticky fault.
  const CUresult error = op == Op::xmContextReset ? enter_in_any_case(thread) : enter(thread);
  if (error != CUDA_SUCCESS) [[unlikely]] return {thread, nullptr, error};
  const Current now = current(thread);
  if (now.context) [[likely]] return {thread, now.context, CUDA_SUCCESS};
  if (op == Op::xmOpen) return {thread, thread.context, CUDA_SUCCESS};  // it is not alive yet
  if (needs_context(op)) return {thread, nullptr, now.error};
  const int ordinal = an_open_device();
  return {thread, &primary_context(ordinal), open_device(ordinal)};
}

}  // namespace xmig::client
