#include "client/journal/append.h"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <utility>

#include "client/journal/diversion.h"
#include "client/journal/ring_writer.h"
#include "journal/clock.h"
#include "journal/futex.h"

namespace xmig::client {

constinit RingWriter writer;

namespace {

using journal::now_ns;
using journal::RecordHeader;

// The program's thread would spin in the genuine driver, too.
std::chrono::microseconds longest_spin() {
  return std::chrono::microseconds(journal::processors_to_spare() ? 50'000 : 100);
}
// To a server that this thread has woken on its own processor: so long, and what it loses if something else runs first. In ns.
constexpr uint64_t kGiveWay = 50'000;
constexpr uint64_t kLate = 200'000;
constexpr std::chrono::seconds kLook{1};  // how often a waiting thread looks whether the other side lives

// As in journal::ThreadSlot.
uint32_t processor() { return static_cast<uint32_t>(::sched_getcpu() + 1); }

// Has the server run since?
bool heard(const journal::JournalHeader& header, uint32_t rung) {
  return static_cast<int32_t>(header.heard.load(std::memory_order_seq_cst) - rung) >= 0;
}

void wake_usher(journal::JournalHeader& header) {
  header.caller.store(processor(), std::memory_order_relaxed);
  header.usher.fetch_add(1, std::memory_order_seq_cst);
  journal::futex_wake(header.usher, 1);
}

// And it was no good that the server slept where it did.
void call_usher(journal::JournalHeader& header) {
  header.late.fetch_add(1, std::memory_order_relaxed);
  wake_usher(header);
}

// This thread has rung for a server that can run on this processor only, and waits now: the server has the processor. It may be
// that the kernel does not let it, because this thread is of a class that goes before it, or that something else gets the
// processor first. The server is informed, and sleeps anywhere for a while.
void give_way(Thread& thread) {
  journal::JournalHeader& header = *process.header;
  const uint32_t rung = std::exchange(thread.rung, 0);
  if (heard(header, rung)) return;
  const uint64_t began = now_ns();
  journal::futex_wake(header.doorbell, 1);
  while (!heard(header, rung) && now_ns() < began + kGiveWay) ::sched_yield();
  if (!heard(header, rung)) return call_usher(header);
  const uint64_t came = header.heard_at.load(std::memory_order_relaxed);
  const uint64_t went = header.gave_way_at.load(std::memory_order_relaxed);
  const bool late = came > began + kLate || (went > began && now_ns() > went + kLate);
  if (late) header.late.fetch_add(1, std::memory_order_relaxed);
}

// Wait until the server has answered the record, or cannot any more.
CUresult wait_for_reply(Thread& thread, uint64_t position) {
  if (thread.rung != 0) [[unlikely]] give_way(thread);
  auto* const head = reinterpret_cast<RecordHeader*>(process.ring + position % process.ring_bytes);
  const auto replied = [head] {
    return (head->state.load(std::memory_order_acquire) & 0xff) == journal::kReplied;
  };
  if (journal::spin_until(replied, longest_spin())) return CUDA_SUCCESS;
  for (;;) {
    uint32_t state = head->state.load(std::memory_order_acquire);
    if ((state & 0xff) == journal::kReplied) return CUDA_SUCCESS;
    if (!(state & journal::kWaiter)) {
      if (!head->state.compare_exchange_weak(state, state | journal::kWaiter, std::memory_order_acq_rel)) continue;
      state |= journal::kWaiter;
    }
    journal::futex_wait(head->state, state, kLook);
    if (replied()) return CUDA_SUCCESS;
    if (const CUresult error = check_peers(); error != CUDA_SUCCESS) return error;
  }
}

// Copies the reply of an answered record out of the ring. The record is the server's to write: every length is checked.
void take_reply(Unanswered& entry, void* reply, size_t reply_bytes) {
  auto* const record = process.ring + entry.position % process.ring_bytes;
  const auto* const head = reinterpret_cast<const RecordHeader*>(record);
  entry.result = static_cast<CUresult>(head->result);
  entry.bytes = std::min({static_cast<size_t>(head->reply_bytes), static_cast<size_t>(entry.capacity), reply_bytes});
  if (entry.bytes) std::memcpy(reply, record + entry.reply_offset, entry.bytes);
}

void publish_waiting(Thread& thread) {
  uint64_t oldest = journal::kNotWaiting;
  for (uint32_t i = 0; i < thread.unanswered_count && oldest == journal::kNotWaiting; ++i) {
    if (!thread.unanswered[i].collected) oldest = thread.unanswered[i].position;
  }
  journal::ThreadSlot& slot = process.header->threads[thread.slot];
  slot.processor.store(processor(), std::memory_order_relaxed);
  slot.waiting.store(oldest, std::memory_order_release);
}

// The ring is full and this thread holds it up with replies it has not taken: take them now, for finish() to find.
CUresult collect_unanswered(Thread& thread) {
  for (uint32_t i = 0; i < thread.unanswered_count; ++i) {
    Unanswered& entry = thread.unanswered[i];
    if (entry.collected) continue;
    if (const CUresult error = wait_for_reply(thread, entry.position); error != CUDA_SUCCESS) return error;
    entry.reply = std::make_unique<std::byte[]>(entry.capacity);
    take_reply(entry, entry.reply.get(), entry.capacity);
    entry.collected = true;
  }
  publish_waiting(thread);
  return CUDA_SUCCESS;
}

size_t total(std::span<const Slice> slices) {
  size_t bytes = 0;
  for (const Slice& slice : slices) bytes += slice.bytes;
  return bytes;
}

// Appends for append(), call() and start(): arguments and payload are gathered from memory.
Written gather(const Admitted& admitted, Op op, uint16_t flags, const void* args, size_t args_bytes,
               std::span<const Slice> slices, size_t reply_bytes) {
  const size_t payload = total(slices);
  if (payload > journal::kMaxPayload || reply_bytes > journal::kMaxPayload) return {CUDA_ERROR_INVALID_VALUE};
  const Shape shape{op, flags, static_cast<uint32_t>(args_bytes), static_cast<uint32_t>(payload),
                    static_cast<uint32_t>(reply_bytes), (flags & journal::kSynchronous) != 0};
  return write_record(admitted.thread, admitted.context, shape, [&](std::byte* arguments, std::byte* to) {
    if (args_bytes) std::memcpy(arguments, args, args_bytes);
    for (const Slice& slice : slices) {
      if (slice.data && slice.bytes) std::memcpy(to, slice.data, slice.bytes);
      to += slice.bytes;
    }
  });
}

}  // namespace

void note_waiting(Thread& thread, uint64_t position, const Shape& shape) {
  Unanswered& entry = thread.unanswered[thread.unanswered_count++];
  entry.position = position;
  entry.reply_offset = shape.reply_offset();
  entry.capacity = shape.reply;
  entry.collected = false;
  publish_waiting(thread);
}

void ring_doorbell(journal::JournalHeader& header, Thread& thread, bool waited) {
  // Once for each sleep: until the server runs again, further records have nobody to wake.
  const uint32_t asleep = header.server_sleeping.exchange(journal::kAwake, std::memory_order_seq_cst);
  const uint32_t rung = header.doorbell.fetch_add(1, std::memory_order_seq_cst) + 1;
  const uint32_t here = processor();
  header.threads[thread.slot].processor.store(here, std::memory_order_relaxed);
  if (asleep < journal::kAsleepOn) {
    header.rung_at.store(now_ns(), std::memory_order_relaxed);
    return journal::futex_wake(header.doorbell, 1);
  }
  if (asleep - journal::kAsleepOn + 1 != here) return call_usher(header);
  thread.rung = rung;
  // It would take this thread's place, which a thread that waits has no use for. One that goes on may wait soon, and wakes the
  // server then; if it does not, the usher brings the server to another processor.
  if (waited) {
    journal::futex_wake(header.doorbell, 1);
  } else {
    wake_usher(header);
  }
}

// Where it fails, pages are mapped as they are written. Once round the ring, all of them are.
void map_ahead(uint64_t end) {
  constexpr uint64_t kAhead = 256 << 10;
  const uint64_t first = writer.mapped;
  writer.mapped = std::min((end + kAhead) / kAhead * kAhead, process.ring_bytes);
  ::madvise(process.ring + first, writer.mapped - first, MADV_POPULATE_WRITE);
  if (writer.mapped == process.ring_bytes) writer.mapped = ~uint64_t{0};
}

CUresult wait_for_room(Thread& thread, uint32_t size) {
  if (size > process.ring_bytes / 2) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult error = collect_unanswered(thread); error != CUDA_SUCCESS) return error;
  journal::JournalHeader& header = *process.header;
  header.trimmed_waiters.fetch_add(1, std::memory_order_seq_cst);
  CUresult error = CUDA_SUCCESS;
  for (;;) {
    const uint32_t seen = header.trimmed_futex.load(std::memory_order_seq_cst);
    const uint64_t used = header.tail.load(std::memory_order_relaxed) - header.trimmed.load(std::memory_order_acquire);
    if (used + size <= process.ring_bytes) break;
    // The server may sleep with everything executed: it is to see that somebody waits for a snapshot.
    ring_doorbell(header, thread, true);
    if (thread.rung != 0) give_way(thread);
    journal::futex_wait(header.trimmed_futex, seen, kLook);
    if (error = check_peers(); error != CUDA_SUCCESS) break;
  }
  header.trimmed_waiters.fetch_sub(1, std::memory_order_seq_cst);
  return error;
}

CUresult enter_slowly(Thread& thread) {
  const journal::JournalHeader& header = *process.header;
  const uint32_t fault = header.context_error.load(std::memory_order_acquire);
  if (fault && thread.context &&
      header.context_error_ordinal.load(std::memory_order_relaxed) == static_cast<uint32_t>(thread.context->ordinal)) {
    return static_cast<CUresult>(fault);
  }
  if (thread.slot == Thread::kNoSlot && !take_slot(thread)) return CUDA_ERROR_OUT_OF_MEMORY;
  return CUDA_SUCCESS;
}

CUresult enter() { return enter(this_thread()); }

CUresult append(Op op, const void* args, size_t args_bytes) { return append(op, args, args_bytes, {}); }

CUresult append(Op op, const void* args, size_t args_bytes, std::span<const Slice> slices) {
  const Admitted admitted = admit(op);
  if (admitted.error != CUDA_SUCCESS) return admitted.error;
  if (diverting()) [[unlikely]] {
    if (const auto diverted = diversion().divert(admitted.thread, op, args, args_bytes, slices)) return *diverted;
  }
  return gather(admitted, op, 0, args, args_bytes, slices, 0).error;
}

Pending start(Op op, const void* args, size_t args_bytes, std::span<const Slice> slices, size_t reply_bytes) {
  const Admitted admitted = admit(op);
  if (admitted.error != CUDA_SUCCESS) return {.error = admitted.error};
  if (diverting()) [[unlikely]] {
    const CUresult refused = diversion().refuse_waiting(admitted.thread, op, args);
    if (refused != CUDA_SUCCESS) return {.error = refused};
  }
  if (admitted.thread.unanswered_count == admitted.thread.unanswered.size()) return {.error = CUDA_ERROR_INVALID_VALUE};
  const Written written = gather(admitted, op, journal::kSynchronous, args, args_bytes, slices, reply_bytes);
  return {.position = written.error == CUDA_SUCCESS ? written.position : journal::kNotWaiting, .error = written.error};
}

CUresult finish(Pending& pending, void* reply, size_t reply_bytes, size_t* used) {
  if (used) *used = 0;
  if (pending.error != CUDA_SUCCESS) return pending.error;
  Thread& thread = this_thread();
  Unanswered& entry = thread.unanswered[0];
  if (!thread.unanswered_count || entry.position != pending.position) return CUDA_ERROR_INVALID_VALUE;
  CUresult error = CUDA_SUCCESS;
  if (entry.collected) {
    entry.bytes = std::min(entry.bytes, reply_bytes);
    if (entry.bytes) std::memcpy(reply, entry.reply.get(), entry.bytes);
  } else {
    error = wait_for_reply(thread, entry.position);
    if (error == CUDA_SUCCESS) take_reply(entry, reply, reply_bytes);
  }
  const CUresult result = error == CUDA_SUCCESS ? entry.result : error;
  if (used && error == CUDA_SUCCESS) *used = entry.bytes;
  entry.reply.reset();
  std::rotate(thread.unanswered.begin(), thread.unanswered.begin() + 1,
              thread.unanswered.begin() + thread.unanswered_count);
  --thread.unanswered_count;
  publish_waiting(thread);
  pending = {.position = journal::kNotWaiting, .error = CUDA_ERROR_INVALID_VALUE};
  return result;
}

CUresult call(Op op, const void* args, size_t args_bytes, void* reply, size_t reply_bytes) {
  Pending pending = start(op, args, args_bytes, {}, reply_bytes);
  return finish(pending, reply, reply_bytes);
}

CUresult open_device(int ordinal) {
  const uint32_t bit = 1u << ordinal;
  if (process.opened.load(std::memory_order_acquire) & bit) return CUDA_SUCCESS;
  const Args_xmOpen args{.ordinal = static_cast<uint32_t>(ordinal)};
  const WithContext inside(primary_context(ordinal));
  const CUresult result = call(Op::xmOpen, &args, sizeof(args), nullptr, 0);
  if (result == CUDA_SUCCESS) process.opened.fetch_or(bit, std::memory_order_release);
  return result;
}

int an_open_device() {
  const uint32_t opened = process.opened.load(std::memory_order_acquire);
  return opened ? std::countr_zero(opened) : 0;
}

uint64_t last_sequence() { return this_thread().last_sequence; }

int current_ordinal() {
  const Current now = current(this_thread());
  return now.context ? now.context->ordinal : -1;
}

uint64_t current_context() {
  const Current now = current(this_thread());
  return now.context ? journal::make_handle(journal::Kind::kContext, now.context->index) : 0;
}

PerThreadDefaultStream::PerThreadDefaultStream() { ++this_thread().per_thread_default; }
PerThreadDefaultStream::~PerThreadDefaultStream() { --this_thread().per_thread_default; }
CUstream default_stream() { return this_thread().per_thread_default ? CU_STREAM_PER_THREAD : CU_STREAM_LEGACY; }

std::byte* staging() { return process.staging; }

}  // namespace xmig::client
