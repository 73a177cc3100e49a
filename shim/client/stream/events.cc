#include "client/stream/events.h"

#include <cstring>
#include <mutex>

#include "client/bootstrap/process.h"
#include "client/journal/append.h"
#include "client/journal/context.h"
#include "client/journal/diversion.h"
#include "client/journal/handles.h"
#include "client/journal/ring_writer.h"
#include "client/journal/streams.h"
#include "client/memory/memory.h"
#include "journal/lock.h"
#include "local.h"
#include "records.h"

namespace xmig::client {
namespace {

using journal::Kind;

struct Event {
  std::atomic<bool> alive{false};
  unsigned int flags = 0;      // before `alive`, as is
  Context* context = nullptr;
  journal::Lock lock;          // of what follows
  uint64_t recorded = 0;       // sequence of the last record of it; 0: never recorded
  uint64_t stream_key = 0;     // of the stream it was recorded in
  CapturedPlace place;         // recorded in a capture instead
  uint64_t noted = 0;          // the journal says that the program has seen this record complete
};

constinit Table<Event, number_limit(Kind::kEvent)> events;

Event* find_event(CUevent event) { return events.find(reinterpret_cast<uint64_t>(event), Kind::kEvent); }

// Has any event of this process ever been recorded in a capture?
constinit std::atomic<bool> captured_events{false};

CapturedPlace place_of(Event& event) {
  const std::lock_guard lock(event.lock);
  return event.place;
}

CUresult refuse_captured(Event& event) {
  const CapturedPlace place = place_of(event);
  return place.capture ? diversion().refuse_captured(place) : CUDA_SUCCESS;
}

// Asking is no way to learn about an event in a capture, and may disturb the capture of somebody else.
CUresult may_ask(Event& event) {
  if (captured_events.load(std::memory_order_relaxed)) [[unlikely]] {
    if (const CUresult error = refuse_captured(event); error != CUDA_SUCCESS) return error;
  }
  return diverting() ? diversion().check_unsafe_call() : CUDA_SUCCESS;
}

struct Seen {
  uint64_t recorded, stream_key, noted;
};
Seen look(Event& event) {
  const std::lock_guard lock(event.lock);
  return {event.recorded, event.stream_key, event.noted};
}

bool completed(CUevent handle, uint64_t recorded) {
  const uint32_t index = journal::handle_index(reinterpret_cast<uint64_t>(handle));
  return process.header->events[index].load(std::memory_order_acquire) >= recorded;
}

// The program learns here, from shared memory, that work is done, and will rely on it: it uses the memory again, on
// another stream. A replay must keep to that order, so the journal says so, once: as a wait that finds its event complete
// and whose reply nobody takes.
CUresult note_completed(Thread& thread, CUevent handle, Event& event, const Seen& seen) {
  if (seen.noted < seen.recorded) {
    const Args_cuEventSynchronize args{.hEvent = reinterpret_cast<uint64_t>(handle)};
    const Shape shape{Op::cuEventSynchronize, journal::kSynchronous | journal::kKnown, sizeof(args), 0, 0};
    const Written written = write_record(thread, event.context, shape, [&](std::byte* arguments, std::byte*) {
      std::memcpy(arguments, &args, sizeof(args));
    });
    if (written.error != CUDA_SUCCESS) return written.error;
    const std::lock_guard lock(event.lock);
    if (event.noted < seen.recorded) event.noted = seen.recorded;
  }
  memory_event_synchronized(seen.stream_key, seen.recorded);
  return CUDA_SUCCESS;
}

}  // namespace

bool valid_event(CUevent event) { return find_event(event) != nullptr; }

bool has_timing(CUevent handle) {
  const Event* const event = find_event(handle);
  return event && !(event->flags & CU_EVENT_DISABLE_TIMING);
}

void events_context_reset(const Context& context) {
  events.for_each([&](uint32_t number, Event& event) {
    if (event.context == &context && event.alive.exchange(false)) {
      free_handle(journal::make_handle(Kind::kEvent, number));
    }
  });
}

CUresult cuEventCreate(CUevent* phEvent, unsigned int Flags) {
  const Admitted admitted = admit(Op::cuEventCreate);
  if (admitted.error != CUDA_SUCCESS) return admitted.error;
  constexpr unsigned int kKnown = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
  if (!phEvent || (Flags & ~kKnown)) return CUDA_ERROR_INVALID_VALUE;
  if (Flags & CU_EVENT_INTERPROCESS) return CUDA_ERROR_NOT_SUPPORTED;
  const uint64_t handle = create_handle(Kind::kEvent);
  if (!handle) return CUDA_ERROR_OUT_OF_MEMORY;
  Event& event = events.place(journal::handle_index(handle));
  event.flags = Flags;
  event.context = admitted.context;
  {
    const std::lock_guard lock(event.lock);
    event.recorded = event.stream_key = event.noted = 0;
    event.place = {};
  }
  if (const CUresult result = record::cuEventCreate(handle, Flags); result != CUDA_SUCCESS) {
    free_handle(handle);
    return result;
  }
  event.alive.store(true, std::memory_order_release);
  *phEvent = reinterpret_cast<CUevent>(handle);
  return CUDA_SUCCESS;
}

CUresult cuEventDestroy_v2(CUevent hEvent) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  Event* const event = find_event(hEvent);
  if (!event) return CUDA_ERROR_INVALID_HANDLE;
  const WithContext own(*event->context);  // it need not be current, as everywhere where an event is all that is needed
  const CUresult result = record::cuEventDestroy_v2(hEvent);
  if (result == CUDA_SUCCESS && event->alive.exchange(false)) free_handle(reinterpret_cast<uint64_t>(hEvent));
  return result;
}

CUresult cuEventRecordWithFlags(CUevent hEvent, CUstream hStream, unsigned int flags) {
  Thread& thread = this_thread();
  if (const CUresult error = enter(thread); error != CUDA_SUCCESS) return error;
  Event* const event = find_event(hEvent);
  if (!event || !valid_stream(hStream)) return CUDA_ERROR_INVALID_HANDLE;
  if (flags & ~static_cast<unsigned int>(CU_EVENT_RECORD_EXTERNAL)) return CUDA_ERROR_INVALID_VALUE;
  const Stream* const stream = find_stream(hStream);
  if (const Context* of_stream = stream ? stream->context : thread.context; of_stream != event->context) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  if (diverting()) [[unlikely]] {
    CUresult result = CUDA_SUCCESS;
    CapturedPlace place;
    if (diversion().record_event(hStream, hEvent, flags, place, result)) {
      const std::lock_guard lock(event->lock);
      if (place.capture) {
        event->place = std::move(place);
        captured_events.store(true, std::memory_order_relaxed);
      }
      return result;
    }
  }
  if (const CUresult result = record::cuEventRecordWithFlags(hEvent, hStream, flags); result != CUDA_SUCCESS) {
    return result;
  }
  const uint64_t key = memory_stream_key(hStream);
  const std::lock_guard lock(event->lock);
  event->place = {};
  if (thread.last_sequence > event->recorded) {
    event->recorded = thread.last_sequence;
    event->stream_key = key;
  }
  return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent hEvent, CUstream hStream) {
  return client::cuEventRecordWithFlags(hEvent, hStream, CU_EVENT_RECORD_DEFAULT);
}

CUresult cuStreamWaitEvent(CUstream hStream, CUevent hEvent, unsigned int Flags) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  Event* const event = find_event(hEvent);
  if (!event || !valid_stream(hStream)) return CUDA_ERROR_INVALID_HANDLE;
  if (Flags & ~static_cast<unsigned int>(CU_EVENT_WAIT_EXTERNAL)) return CUDA_ERROR_INVALID_VALUE;
  if (diverting() || captured_events.load(std::memory_order_relaxed)) [[unlikely]] {
    const CapturedPlace place = place_of(*event);
    CUresult result = CUDA_SUCCESS;
    if (diversion().wait_for_event(hStream, hEvent, Flags, place, look(*event).recorded != 0, result)) return result;
  }
  if (look(*event).recorded == 0) return CUDA_SUCCESS;
  // Also when it has completed already: at a replay it has not.
  return record::cuStreamWaitEvent(hStream, hEvent, Flags);
}

CUresult cuEventQuery(CUevent hEvent) {
  Thread& thread = this_thread();
  if (const CUresult error = enter(thread); error != CUDA_SUCCESS) return error;
  Event* const event = find_event(hEvent);
  if (!event) return CUDA_ERROR_INVALID_HANDLE;
  if (const CUresult error = may_ask(*event); error != CUDA_SUCCESS) return error;
  const Seen seen = look(*event);
  if (seen.recorded == 0) return CUDA_SUCCESS;
  if (completed(hEvent, seen.recorded)) return note_completed(thread, hEvent, *event, seen);
  const CUresult error = check_peers();  // a program may ask for ever
  return error == CUDA_SUCCESS ? CUDA_ERROR_NOT_READY : error;
}

CUresult cuEventSynchronize(CUevent hEvent) {
  Thread& thread = this_thread();
  if (const CUresult error = enter(thread); error != CUDA_SUCCESS) return error;
  Event* const event = find_event(hEvent);
  if (!event) return CUDA_ERROR_INVALID_HANDLE;
  if (const CUresult error = may_ask(*event); error != CUDA_SUCCESS) return error;
  const Seen seen = look(*event);
  if (seen.recorded == 0) return CUDA_SUCCESS;
  if (completed(hEvent, seen.recorded)) return note_completed(thread, hEvent, *event, seen);
  const WithContext own(*event->context);
  const CUresult result = record::cuEventSynchronize(hEvent);
  if (result == CUDA_SUCCESS) memory_event_synchronized(seen.stream_key, seen.recorded);
  return result;
}

CUresult cuEventElapsedTime_v2(float* pMilliseconds, CUevent hStart, CUevent hEnd) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  if (!pMilliseconds) return CUDA_ERROR_INVALID_VALUE;
  Event* const start = find_event(hStart);
  Event* const end = find_event(hEnd);
  if (!start || !end || ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING)) return CUDA_ERROR_INVALID_HANDLE;
  for (Event* const event : {start, end}) {
    if (const CUresult error = refuse_captured(*event); error != CUDA_SUCCESS) return error;
  }
  const Seen first = look(*start), last = look(*end);
  if (first.recorded == 0 || last.recorded == 0) return CUDA_ERROR_INVALID_HANDLE;
  if (!completed(hStart, first.recorded) || !completed(hEnd, last.recorded)) {
    const CUresult error = check_peers();
    return error == CUDA_SUCCESS ? CUDA_ERROR_NOT_READY : error;
  }
  const WithContext own(*start->context);
  return record::cuEventElapsedTime_v2(pMilliseconds, hStart, hEnd);
}

CUresult cuEventElapsedTime(float* pMilliseconds, CUevent hStart, CUevent hEnd) {
  return client::cuEventElapsedTime_v2(pMilliseconds, hStart, hEnd);
}

}  // namespace xmig::client
