// Events, values in memory, and the calls that wait for the device.
#include <algorithm>

#include "server/executor/executor.h"

namespace xmig::server {

CUresult Executor::on_cuStreamSynchronize(Record& record) {
  Args_cuStreamSynchronize args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  auto wait = std::make_unique<Wait>();
  CUstream stream = nullptr;
  if (!translate(journal::Kind::kStream, args.hStream, &stream)) return CUDA_ERROR_INVALID_HANDLE;
  wait->streams.push_back(stream);
  return await(record, std::move(wait));
}

CUresult Executor::on_cuCtxSynchronize(Record& record) {
  auto wait = std::make_unique<Wait>();
  wait->streams = busy_streams(record.header().ordinal);
  return await(record, std::move(wait));
}

CUresult Executor::on_cuEventSynchronize(Record& record) {
  Args_cuEventSynchronize args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  auto wait = std::make_unique<Wait>();
  if (!translate(journal::Kind::kEvent, args.hEvent, &wait->event)) return CUDA_ERROR_INVALID_HANDLE;
  const Event& event = *objects_.events.find(journal::handle_index(args.hEvent));
  if (event.publisher && *event.publisher == publishers_[record.header().ordinal]) {
    wait->streams.push_back(*event.publisher);  // who has waited finds it complete
  }
  // The program may have seen it complete in shared memory, without a reply.
  const uint32_t index = journal::handle_index(args.hEvent);
  wait->barrier = job_.header().events[index].load(std::memory_order_acquire) >= event.recorded;
  return await(record, std::move(wait));
}

// Calls that only look. Where a replay passes one that reported "complete", the program went on from there.
CUresult Executor::on_cuStreamQuery(Record& record) {
  Args_cuStreamQuery args;
  CUstream stream = nullptr;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!translate(journal::Kind::kStream, args.hStream, &stream)) return CUDA_ERROR_INVALID_HANDLE;
  if (!record.replied()) return driver_.cuStreamQuery(stream);
  if (record.header().result != CUDA_SUCCESS) return CUDA_ERROR_NOT_READY;
  auto wait = std::make_unique<Wait>();
  wait->streams.push_back(stream);
  return await(record, std::move(wait));
}

CUresult Executor::on_cuEventElapsedTime_v2(Record& record) {
  Args_cuEventElapsedTime_v2 args;
  CUevent start = nullptr, end = nullptr;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!translate(journal::Kind::kEvent, args.hStart, &start) || !translate(journal::Kind::kEvent, args.hEnd, &end)) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  if (record.replied()) {
    if (record.header().result != CUDA_SUCCESS) return static_cast<CUresult>(record.header().result);
    for (const CUevent event : {start, end}) {
      auto wait = std::make_unique<Wait>();
      wait->event = event;
      await(record, std::move(wait));
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

CUresult Executor::await(Record& record, std::unique_ptr<Wait> wait) {
  wait->answer = Answer::to(record);
  wait->ordinal = stream_ordinal();
  wait->barrier |= record.replied();
  record.defer();
  waits_.start(std::move(wait));
  return CUDA_SUCCESS;
}

template <typename Args, typename Call>
CUresult Executor::wait_for_value(Record& record, Call&& call) {
  Args args;
  CUstream stream = nullptr;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!translate(journal::Kind::kStream, args.stream, &stream)) return CUDA_ERROR_INVALID_HANDLE;
  if (!live(args.addr, sizeof(args.value))) return CUDA_ERROR_INVALID_VALUE;
  value_waits_ = true;
  return where_it_is(args.addr, stream,
                     [&](CUstream there) { return call(there, args.addr, args.value, args.flags); });
}

CUresult Executor::on_cuStreamWaitValue32_v2(Record& record) {
  return wait_for_value<Args_cuStreamWaitValue32_v2>(record, driver_.cuStreamWaitValue32_v2);
}

CUresult Executor::on_cuStreamWaitValue64_v2(Record& record) {
  return wait_for_value<Args_cuStreamWaitValue64_v2>(record, driver_.cuStreamWaitValue64_v2);
}

CUresult Executor::on_cuEventRecordWithFlags(Record& record) {
  Args_cuEventRecordWithFlags args;
  CUstream stream = nullptr;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!translate(journal::Kind::kStream, args.hStream, &stream)) return CUDA_ERROR_INVALID_HANDLE;
  if (!journal::handle_is(args.hEvent, journal::Kind::kEvent)) return CUDA_ERROR_INVALID_HANDLE;
  const uint32_t index = journal::handle_index(args.hEvent);
  Event* const event = objects_.events.find(index);
  if (!event) return CUDA_ERROR_INVALID_HANDLE;
  return record_event(*event, index, stream, args.flags, record.sequence());
}

// The device itself writes the record's sequence where the client looks, and before the event: who has waited for the
// event, or for anything behind it, finds it complete. Two records of one event on two streams could write in the wrong
// order, and the client would wait for ever: then a stream of ours waits for both, and writes.
CUresult Executor::record_event(Event& event, uint32_t index, CUstream stream, unsigned int flags, uint64_t sequence) {
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
  const CUstream publisher = publisher_stream();
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

CUstream Executor::publisher_stream() {
  CUstream& stream = publishers_[stream_ordinal()];
  if (!stream) faults_.check(driver_.cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0));
  working_.add(stream, stream_ordinal());
  return stream;
}

// A stream is about to be destroyed: its work goes on. A stream of ours waits for it, so that who waits for the whole
// context waits for it as well; events whose completion it still has to publish are handed to that one.
void Executor::leave_work(CUstream gone) {
  progress_.destroyed(gone);
  working_.forget(gone);
  drop_asides(gone);
  if (last_stream_ == gone) last_stream_ = nullptr;
  granules_.forget(gone);
  used_stream_.reset();
  std::optional<CUstream> heir;
  if (driver_.cuStreamQuery(gone) != CUDA_SUCCESS) {
    heir = publisher_stream();
    CUevent last = nullptr;
    faults_.check(driver_.cuEventCreate(&last, CU_EVENT_DISABLE_TIMING));
    faults_.check(driver_.cuEventRecordWithFlags(last, gone, 0));
    faults_.check(driver_.cuStreamWaitEvent(*heir, last, 0));
    driver_.cuEventDestroy_v2(last);
  }
  objects_.events.for_each([&](uint32_t, Event& event) {
    if (event.publisher == gone) event.publisher = heir;
  });
}

}  // namespace xmig::server
