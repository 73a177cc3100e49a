// Events. An event is the position of its last record in a stream; recording again leaves earlier waits as they were.
#include "device/cpu/api.h"
#include "device/cpu/clock.h"
#include "device/cpu/driver.h"
#include "device/cpu/events.h"

namespace xmig::device::cpu {

CUresult record_event(Event& event, Stream& stream) {
  Context& context = stream.context();
  if (event.context.get() != &context) return CUDA_ERROR_INVALID_HANDLE;
  auto recording = std::make_shared<Recording>();
  if (context.idle(stream)) {
    recording->nanoseconds = monotonic_nanoseconds();
    recording->reach = {stream.shared_from_this(), stream.enqueued()};
  } else {
    const uint64_t position = context.submit(stream, RecordWork{recording}, t_sequence);
    recording->reach = {stream.shared_from_this(), position};
  }
  event.last = std::move(recording);
  return CUDA_SUCCESS;
}

namespace {

CUresult create(CUevent* out, unsigned flags) {
  constexpr unsigned kKnown = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
  if (!out || (flags & ~kKnown) || ((flags & CU_EVENT_INTERPROCESS) && !(flags & CU_EVENT_DISABLE_TIMING)))
    return CUDA_ERROR_INVALID_VALUE;
  if (flags & CU_EVENT_INTERPROCESS) return CUDA_ERROR_NOT_SUPPORTED;
  return in_context([&](CpuDevice& device, Context& context, Lock&) {
    *out = as_handle<CUevent>(device.events.add({context.shared_from_this(), flags, nullptr}));
    return CUDA_SUCCESS;
  });
}

CUresult destroy(CUevent handle) {
  return api([&](CpuDevice& device, Lock&) -> CUresult {
    if (!device.events.find(number(handle))) return CUDA_ERROR_INVALID_HANDLE;
    return device.events.remove(number(handle)).context->error();
  });
}

// body(Event&, Lock&), if the event is there and its context usable.
template <typename Body>
CUresult of_event(CUevent handle, Body&& body) {
  return api([&](CpuDevice& device, Lock& lock) -> CUresult {
    Event* event = device.events.find(number(handle));
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    if (const CUresult error = event->context->error(); error != CUDA_SUCCESS) return error;
    return body(*event, lock);
  });
}

CUresult record(CUevent handle, CUstream stream_handle, unsigned flags) {
  if (flags & ~CU_EVENT_RECORD_EXTERNAL) return CUDA_ERROR_INVALID_VALUE;
  if (flags & CU_EVENT_RECORD_EXTERNAL) return CUDA_ERROR_ILLEGAL_STATE;  // only while capturing
  return on_stream(stream_handle, [&](CpuDevice& device, Stream& stream, Lock&) -> CUresult {
    Event* event = device.events.find(number(handle));
    return event ? record_event(*event, stream) : CUDA_ERROR_INVALID_HANDLE;
  });
}

CUresult query(CUevent handle) {
  return of_event(handle, [](Event& event, Lock&) {
    if (event.last && !event.last->reach.done()) return CUDA_ERROR_NOT_READY;
    return event.context->error();  // the work before it may have been the one that faulted
  });
}

CUresult synchronize(CUevent handle) {
  return of_event(handle, [](Event& event, Lock& lock) -> CUresult {
    if (!event.last) return CUDA_SUCCESS;
    const std::shared_ptr<Context> context = event.context;
    const bool spinning = !(event.flags & CU_EVENT_BLOCKING_SYNC);
    return wait_for({event.last->reach}, *context, lock, spinning);
  });
}

CUresult wait(CUstream stream_handle, CUevent handle, unsigned flags) {
  if (flags & ~CU_EVENT_WAIT_EXTERNAL) return CUDA_ERROR_INVALID_VALUE;
  if (flags & CU_EVENT_WAIT_EXTERNAL) return CUDA_ERROR_ILLEGAL_STATE;
  return on_stream(stream_handle, [&](CpuDevice& device, Stream& stream, Lock&) -> CUresult {
    const Event* event = device.events.find(number(handle));
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    if (!event->last) return CUDA_SUCCESS;
    const bool nothing_to_wait_for = event->last->reach.done() || event->last->reach.stream.get() == &stream;
    // In the legacy stream it orders the context's streams all the same, unless there is nothing to order.
    const bool orders = stream.kind() == StreamKind::kLegacy && !stream.context().idle(stream);
    if (nothing_to_wait_for && !orders) return CUDA_SUCCESS;
    return enqueue(stream, WaitWork{event->last->reach});
  });
}

CUresult elapsed(float* milliseconds, CUevent start, CUevent end) {
  if (!milliseconds) return CUDA_ERROR_INVALID_VALUE;
  return api([&](CpuDevice& device, Lock&) -> CUresult {
    const Event* from = device.events.find(number(start));
    const Event* to = device.events.find(number(end));
    if (!from || !to) return CUDA_ERROR_INVALID_HANDLE;
    for (const Event* event : {from, to}) {
      if (event->context->error() != CUDA_SUCCESS) return event->context->error();
      if (!event->last || (event->flags & CU_EVENT_DISABLE_TIMING)) return CUDA_ERROR_INVALID_HANDLE;
    }
    if (!from->last->reach.done() || !to->last->reach.done()) return CUDA_ERROR_NOT_READY;
    *milliseconds = static_cast<float>(static_cast<double>(to->last->nanoseconds - from->last->nanoseconds) / 1e6);
    return CUDA_SUCCESS;
  });
}

}  // namespace

void add_event_functions(DriverTable& table) {
  table.cuEventCreate = create;
  table.cuEventDestroy_v2 = destroy;
  table.cuEventRecordWithFlags = record;
  table.cuEventQuery = query;
  table.cuEventSynchronize = synchronize;
  table.cuStreamWaitEvent = wait;
  table.cuEventElapsedTime_v2 = elapsed;
}

}  // namespace xmig::device::cpu
