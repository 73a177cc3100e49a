// Functions of the program that run in stream order: the stream waits here while a thread of the client runs them.
//
// The record's state decides (CallbackState): posting a position twice, as a server may that follows a lost one, runs
// the function once.
#include <chrono>
#include <thread>

#include "journal/futex.h"
#include "server/executor/executor.h"

namespace xmig::server {

using namespace std::chrono_literals;

struct Executor::HostCall {
  Executor& executor;
  journal::RecordHeader* shared;
  uint64_t position;

  static void CUDA_CB run(void* self) {
    const std::unique_ptr<HostCall> call(static_cast<HostCall*>(self));
    std::atomic<uint32_t>& state = call->shared->state;
    uint32_t seen = state.load(std::memory_order_acquire);
    if (seen == journal::kNotPosted) {
      state.store(journal::kPosted, std::memory_order_release);
      seen = journal::kPosted;
    }
    if (seen == journal::kPosted) call->executor.post_callback(call->position);
    while ((seen = state.load(std::memory_order_acquire)) != journal::kAcknowledged) {
      journal::futex_wait(state, seen, 1s);  // if the program dies, the control thread ends this process
    }
    call->executor.outside_waits_.fetch_sub(1, std::memory_order_release);
  }
};

CUresult Executor::on_xmHostFunc(Record& record) {
  Args_xmHostFunc args;
  CUstream stream = nullptr;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!translate(journal::Kind::kStream, args.stream, &stream)) return CUDA_ERROR_INVALID_HANDLE;
  if (record.state() != journal::kNotPosted) {
    // It may have reported to the program that the stream came to here.
    auto reached = std::make_unique<Wait>();
    reached->barrier = true;
    reached->ordinal = record.header().ordinal;
    reached->streams.push_back(stream);
    waits_.start(std::move(reached));
    waits_.arm();
  }
  auto call = std::make_unique<HostCall>(HostCall{*this, record.shared(), record_position_});
  outside_waits_.fetch_add(1, std::memory_order_relaxed);
  const CUresult result = driver_.cuLaunchHostFunc(stream, &HostCall::run, call.get());
  if (result == CUDA_SUCCESS) {
    call.release();
  } else {
    outside_waits_.fetch_sub(1, std::memory_order_relaxed);
  }
  return result;
}

void Executor::post_callback(uint64_t position) {
  const std::lock_guard lock(callback_mutex_);
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
