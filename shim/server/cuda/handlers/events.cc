#include "server/cuda/handlers/events.h"

#include "server/cuda/handlers/await.h"

namespace xmig::server {

Events::Events(const Session& session, Streams& streams, Addresses& addresses, OutsideWaits& outside)
    : driver_(session.device.driver()),
      contexts_(session.services.contexts),
      faults_(session.services.faults),
      job_(session.services.job),
      objects_(session.objects),
      waits_(session.waits),
      current_(session.current),
      streams_(streams),
      addresses_(addresses),
      outside_(outside) {}

void Events::destroy_all() {
  objects_.events.for_each([&](uint32_t, const Event& event) { driver_.cuEventDestroy_v2(event.real); });
}

void Events::created(uint64_t handle, CUevent real, const Record& record) {
  Event* const slot = journal::handle_is(handle, journal::Kind::kEvent)
                          ? objects_.events.place(journal::handle_index(handle))
                          : nullptr;
  if (!slot) {
    driver_.cuEventDestroy_v2(real);
    return current_.garbage("a new event has a number that is taken, or none");
  }
  *slot = {real, {record.header().context, record.header().ordinal}, objects_.records.keep(record.sequence(), record.stored()), 0, {}};
}

void Events::record_again(const RecordedEvent& recorded) {
  Event* const event =
      recorded.index < journal::kMaxEvents ? objects_.events.find(static_cast<uint32_t>(recorded.index)) : nullptr;
  if (!event) return;
  contexts_.use(event->owner.ordinal);
  faults_.check(driver_.cuEventRecordWithFlags(event->real, nullptr, 0));
  event->recorded = recorded.sequence;
}

CUresult Events::on_cuStreamSynchronize(Record& record) {
  Args_cuStreamSynchronize args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  auto wait = std::make_unique<Wait>();
  CUstream stream = nullptr;
  if (!streams_.translate(args.hStream, &stream)) return CUDA_ERROR_INVALID_HANDLE;
  wait->streams.push_back(stream);
  return await(waits_, streams_, record, std::move(wait));
}

CUresult Events::on_cuCtxSynchronize(Record& record) {
  auto wait = std::make_unique<Wait>();
  wait->streams = streams_.busy(record.header().ordinal);
  return await(waits_, streams_, record, std::move(wait));
}

CUresult Events::on_cuEventSynchronize(Record& record) {
  Args_cuEventSynchronize args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  auto wait = std::make_unique<Wait>();
  if (!objects_.translate(args.hEvent, &wait->event)) return CUDA_ERROR_INVALID_HANDLE;
  const Event& event = *objects_.events.find(journal::handle_index(args.hEvent));
  if (event.publisher && *event.publisher == streams_.existing_publisher(record.header().ordinal)) {
    wait->streams.push_back(*event.publisher);  // who has waited finds it complete
  }
  // Then it holds whatever follows, whenever it was answered.
  wait->barrier = record.known();
  return await(waits_, streams_, record, std::move(wait));
}

// Calls that only look. Where a replay passes one that reported "complete", the program went on from there.
CUresult Events::on_cuStreamQuery(Record& record) {
  Args_cuStreamQuery args;
  CUstream stream = nullptr;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!streams_.translate(args.hStream, &stream)) return CUDA_ERROR_INVALID_HANDLE;
  if (!record.replied()) return driver_.cuStreamQuery(stream);
  if (record.header().result != CUDA_SUCCESS) return CUDA_ERROR_NOT_READY;
  auto wait = std::make_unique<Wait>();
  wait->streams.push_back(stream);
  return await(waits_, streams_, record, std::move(wait));
}

CUresult Events::on_cuEventElapsedTime_v2(Record& record) {
  Args_cuEventElapsedTime_v2 args;
  CUevent start = nullptr, end = nullptr;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!objects_.translate(args.hStart, &start) || !objects_.translate(args.hEnd, &end)) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  if (record.replied()) {
    if (record.header().result != CUDA_SUCCESS) return static_cast<CUresult>(record.header().result);
    for (const CUevent event : {start, end}) {
      auto wait = std::make_unique<Wait>();
      wait->event = event;
      await(waits_, streams_, record, std::move(wait));
    }
    return CUDA_SUCCESS;
  }
  Reply_cuEventElapsedTime_v2 reply{};
  // The program knows that both are complete, or all but: see record_event().
  for (const CUevent event : {start, end}) faults_.check(driver_.cuEventSynchronize(event));
  const CUresult result = driver_.cuEventElapsedTime_v2(&reply.pMilliseconds, start, end);
  if (result == CUDA_SUCCESS) record.set_reply(&reply, sizeof(reply));
  return result;
}

template <typename Args, typename Call>
CUresult Events::wait_for_value(Record& record, Call&& call) {
  Args args;
  CUstream stream = nullptr;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!streams_.translate(args.stream, &stream)) return CUDA_ERROR_INVALID_HANDLE;
  if (!addresses_.live(args.addr, sizeof(args.value))) return CUDA_ERROR_INVALID_VALUE;
  outside_.values = true;
  return streams_.where_it_is(args.addr, stream,
                     [&](CUstream there) { return call(there, args.addr, args.value, args.flags); });
}

CUresult Events::on_cuStreamWaitValue32_v2(Record& record) {
  return wait_for_value<Args_cuStreamWaitValue32_v2>(record, driver_.cuStreamWaitValue32_v2);
}

CUresult Events::on_cuStreamWaitValue64_v2(Record& record) {
  return wait_for_value<Args_cuStreamWaitValue64_v2>(record, driver_.cuStreamWaitValue64_v2);
}

CUresult Events::on_cuEventRecordWithFlags(Record& record) {
  Args_cuEventRecordWithFlags args;
  CUstream stream = nullptr;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!streams_.translate(args.hStream, &stream)) return CUDA_ERROR_INVALID_HANDLE;
  if (!journal::handle_is(args.hEvent, journal::Kind::kEvent)) return CUDA_ERROR_INVALID_HANDLE;
  const uint32_t index = journal::handle_index(args.hEvent);
  Event* const event = objects_.events.find(index);
  if (!event) return CUDA_ERROR_INVALID_HANDLE;
  return record_event(*event, index, stream, args.flags, record.sequence());
}

// The device itself writes the record's sequence where the client looks, and before the event: who has waited for the
// event, or for anything behind it, finds it complete. Two records of one event on two streams could write in the wrong
// order, and the client would wait for ever: then a stream of ours waits for both, and writes.
CUresult Events::record_event(Event& event, uint32_t index, CUstream stream, unsigned int flags, uint64_t sequence) {
  std::atomic<uint64_t>& word = job_.header().events[index];
  const auto address = static_cast<CUdeviceptr>(reinterpret_cast<uintptr_t>(&word));
  const uint64_t published = word.load(std::memory_order_acquire);
  const bool pending = event.publisher && event.recorded > published;
  const bool elsewhere = pending && *event.publisher != stream;
  const bool seen = published >= sequence;  // a replay: the program has seen this one complete
  CUresult result = CUDA_SUCCESS;
  if (!seen && !elsewhere) {
    result = driver_.cuStreamWriteValue64_v2(stream, address, sequence, CU_STREAM_WRITE_VALUE_DEFAULT);
  }
  if (result == CUDA_SUCCESS) result = driver_.cuEventRecordWithFlags(event.real, stream, flags);
  if (result != CUDA_SUCCESS) return result;
  event.recorded = sequence;
  if (seen) return CUDA_SUCCESS;
  if (!elsewhere) {
    event.publisher = stream;
    return CUDA_SUCCESS;
  }
  const CUstream publisher = streams_.publisher();
  CUevent before = nullptr;
  faults_.check(driver_.cuEventCreate(&before, CU_EVENT_DISABLE_TIMING));
  faults_.check(driver_.cuEventRecordWithFlags(before, *event.publisher, 0));
  faults_.check(driver_.cuStreamWaitEvent(publisher, before, 0));
  faults_.check(driver_.cuStreamWaitEvent(publisher, event.real, 0));
  driver_.cuEventDestroy_v2(before);
  event.publisher = publisher;
  faults_.check(driver_.cuStreamWriteValue64_v2(publisher, address, sequence, CU_STREAM_WRITE_VALUE_DEFAULT));
  return CUDA_SUCCESS;
}

}  // namespace xmig::server
