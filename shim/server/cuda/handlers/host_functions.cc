#include "server/cuda/handlers/host_functions.h"

#include <chrono>
#include <thread>

#include "journal/futex.h"

namespace xmig::server {

using namespace std::chrono_literals;

HostFunctions::HostFunctions(const Session& session, Streams& streams, OutsideWaits& outside)
    : driver_(session.device.driver()),
      job_(session.services.job),
      waits_(session.waits),
      current_(session.current),
      streams_(streams),
      outside_(outside) {}

struct HostFunctions::Call {
  HostFunctions& functions;
  journal::RecordHeader* shared;
  uint64_t position;

  static void CUDA_CB run(void* self) {
    const std::unique_ptr<Call> call(static_cast<Call*>(self));
    std::atomic<uint32_t>& state = call->shared->state;
    uint32_t seen = state.load(std::memory_order_acquire);
    if (seen == journal::kNotPosted) {
      call->shared->answered = journal::tail_mark(call->functions.job_.header().tail.load(std::memory_order_acquire));
      state.store(journal::kPosted, std::memory_order_release);
      seen = journal::kPosted;
    }
    if (seen == journal::kPosted) call->functions.post(call->position);
    while ((seen = state.load(std::memory_order_acquire)) != journal::kAcknowledged) {
      journal::futex_wait(state, seen, 1s);  // if the program dies, the control thread ends this process
    }
    call->functions.outside_.functions.fetch_sub(1, std::memory_order_release);
  }
};

CUresult HostFunctions::on_xmHostFunc(Record& record) {
  Args_xmHostFunc args;
  CUstream stream = nullptr;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!streams_.translate(args.stream, &stream)) return CUDA_ERROR_INVALID_HANDLE;
  if (record.state() != journal::kNotPosted) {
    // It may have let the program know that the stream came to here.
    auto reached = std::make_unique<Wait>();
    reached->barrier = true;
    reached->from = record.answered_at();
    reached->ordinal = record.header().ordinal;
    reached->streams.push_back(stream);
    waits_.start(std::move(reached));
    waits_.arm();
  }
  auto call = std::make_unique<Call>(Call{*this, record.shared(), current_.position});
  outside_.functions.fetch_add(1, std::memory_order_relaxed);
  const CUresult result = driver_.cuLaunchHostFunc(stream, &Call::run, call.get());
  if (result == CUDA_SUCCESS) {
    call.release();
  } else {
    outside_.functions.fetch_sub(1, std::memory_order_relaxed);
  }
  return result;
}

void HostFunctions::post(uint64_t position) {
  const std::lock_guard lock(mutex_);
  journal::JournalHeader& header = job_.header();
  const uint64_t posted = header.callbacks_posted.load(std::memory_order_relaxed);
  while (posted - header.callbacks_taken.load(std::memory_order_acquire) >= journal::kCallbackSlots) {
    std::this_thread::sleep_for(100us);  // more streams wait for the program than it has slots; it takes them in order
  }
  header.callbacks[posted % journal::kCallbackSlots].store(position, std::memory_order_relaxed);
  header.callbacks_posted.store(posted + 1, std::memory_order_release);
  header.callback_doorbell.fetch_add(1, std::memory_order_seq_cst);
  journal::futex_wake(header.callback_doorbell);
}

}  // namespace xmig::server
