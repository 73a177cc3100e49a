#include "server/cuda/handlers/streams.h"

namespace xmig::server {

Streams::Streams(const Session& session)
    : driver_(session.device.driver()),
      contexts_(session.services.contexts),
      faults_(session.services.faults),
      objects_(session.objects),
      granules_(session.granules),
      progress_(session.progress),
      working_(session.working),
      current_(session.current),
      asides_(driver_, contexts_, working_),
      thread_streams_(size_t{journal::kMaxThreads} * contexts_.count()) {}

void Streams::destroy_all() {
  objects_.streams.for_each([&](uint32_t, const Stream& stream) { driver_.cuStreamDestroy_v2(stream.real); });
  for (const CUstream stream : thread_streams_) {
    if (stream) driver_.cuStreamDestroy_v2(stream);
  }
  asides_.close();
  for (const auto& ours : {publishers_, graph_streams_}) {
    for (const CUstream stream : ours) {
      if (stream) driver_.cuStreamDestroy_v2(stream);
    }
  }
}

const std::vector<CUstream>& Streams::busy(uint32_t ordinal) {
  return working_.ask(ordinal, [this](CUstream stream) {
    const CUresult result = driver_.cuStreamQuery(stream);
    faults_.check(result);
    return result != CUDA_SUCCESS;
  });
}

CUstream Streams::thread_stream(uint32_t ordinal) {
  CUstream& stream = thread_streams_[size_t{current_.record.header().thread} * contexts_.count() + ordinal];
  if (!stream) faults_.check(driver_.cuStreamCreateWithPriority(&stream, CU_STREAM_DEFAULT, 0));
  return stream;
}

bool Streams::translate(uint64_t handle, uint32_t ordinal, CUstream* real) {
  if (capture_) [[unlikely]] {
    *real = capture_->stream;
    return true;
  }
  if (handle <= reinterpret_cast<uint64_t>(CU_STREAM_LEGACY)) {
    *real = nullptr;
  } else if (handle == reinterpret_cast<uint64_t>(CU_STREAM_PER_THREAD)) {
    contexts_.use(ordinal);
    *real = thread_stream(ordinal);
    if (!*real) return false;
  } else {
    if (!journal::handle_is(handle, journal::Kind::kStream)) return false;
    const Stream* const stream = objects_.streams.find(journal::handle_index(handle));
    if (!stream) return false;
    *real = stream->real;
    ordinal = stream->owner.ordinal;
  }
  used_ = {*real, ordinal};
  working_.add(*real, ordinal);
  contexts_.use(ordinal);  // the program may name a stream of any device, whatever its current context is
  return true;
}

uint32_t Streams::home_of(uint64_t address) const {
  const bool shadow = address >= kShadowBase && address - kShadowBase < journal::kMaxDevices * kShadowSpan;
  const uint32_t home = shadow ? ordinal_of_address(address) : ordinal_of_device_address(address);
  return contexts_.is_open(home) ? home : ordinal();
}

void Streams::mark_work() {
  faults_.check(progress_.mark_all([this](uint32_t ordinal) { contexts_.use(ordinal); }));
}

CUstream Streams::publisher() {
  CUstream& stream = publishers_[ordinal()];
  if (!stream) faults_.check(driver_.cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0));
  working_.add(stream, ordinal());
  return stream;
}

CUresult Streams::for_graphs(uint32_t ordinal, CUstream* out) {
  CUstream& stream = graph_streams_[ordinal];
  const CUresult result =
      stream ? CUDA_SUCCESS : driver_.cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0);
  *out = stream;
  return result;
}

void Streams::created(uint64_t handle, CUstream real, const Record& record) {
  Stream* const slot = journal::handle_is(handle, journal::Kind::kStream)
                           ? objects_.streams.place(journal::handle_index(handle))
                           : nullptr;
  if (!slot) {
    driver_.cuStreamDestroy_v2(real);
    return current_.garbage("a new stream has a number that is taken, or none");
  }
  *slot = {real, {record.header().context, record.header().ordinal}, objects_.records.keep(record.sequence(), record.stored())};
}

// A stream of ours waits for its work, so that who waits for the whole context waits for it as well; events whose completion it
// still has to publish are handed to that one.
void Streams::leave(CUstream gone) {
  progress_.destroyed(gone);
  working_.forget(gone);
  asides_.drop(gone);
  if (last_.stream == gone) last_.stream = nullptr;
  granules_.forget(gone);
  used_.reset();
  std::optional<CUstream> heir;
  if (driver_.cuStreamQuery(gone) != CUDA_SUCCESS) {
    heir = publisher();
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

CUresult Streams::on_cuStreamDestroy_v2(Record& record) {
  Args_cuStreamDestroy_v2 args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!journal::handle_is(args.hStream, journal::Kind::kStream)) return CUDA_ERROR_INVALID_HANDLE;
  const uint32_t index = journal::handle_index(args.hStream);
  const Stream* const stream = objects_.streams.find(index);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  leave(stream->real);
  const CUresult result = driver_.cuStreamDestroy_v2(stream->real);
  objects_.streams.erase(index);
  return result;
}

}  // namespace xmig::server
