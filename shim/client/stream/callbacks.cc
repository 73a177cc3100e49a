// Host functions: the server says which record's turn it is, a thread of ours runs the program's function.
//
// What is run, and whether it was run, is decided here, from this process's own table: the server can post a position
// twice (a server that follows a lost one does), or one that never was.
#include "client/stream/callbacks.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>

#include "client/journal/append.h"
#include "client/journal/context.h"
#include "client/journal/diversion.h"
#include "client/journal/ring_writer.h"
#include "client/journal/streams.h"
#include "journal/futex.h"
#include "local.h"

namespace xmig::client {
namespace {

struct HostFunction {
  CUhostFn function = nullptr;
  CUstreamCallback callback = nullptr;  // instead of function
  void* user_data = nullptr;
  CUstream stream = nullptr;
};

std::mutex waiting_mutex;
std::map<uint64_t, HostFunction>& waiting = *new std::map<uint64_t, HostFunction>;  // by position; not run yet

std::atomic<int> unfinished{0};  // those, and the one that runs

std::optional<HostFunction> take(uint64_t position) {
  const std::lock_guard lock(waiting_mutex);
  const auto found = waiting.find(position);
  if (found == waiting.end()) return std::nullopt;
  const HostFunction function = found->second;
  waiting.erase(found);
  return function;
}

void run(const HostFunction& function) {
  if (function.function) {
    function.function(function.user_data);
  } else {
    const uint32_t fault = process.header->context_error.load(std::memory_order_relaxed);
    function.callback(function.stream, static_cast<CUresult>(fault), function.user_data);
  }
}

void serve(uint64_t position) {
  const std::optional<HostFunction> function = take(position);
  if (!function) return;  // posted again, but run already
  auto* const head = reinterpret_cast<journal::RecordHeader*>(process.ring + position % process.ring_bytes);
  // The record is ours to acknowledge whatever the server wrote: it cannot be trimmed before.
  head->state.store(journal::kRunningCallback, std::memory_order_release);
  run(*function);
  unfinished.fetch_sub(1, std::memory_order_release);
  head->state.store(journal::kAcknowledged, std::memory_order_seq_cst);
  journal::futex_wake(head->state);
}

void serve_for_ever() {
  journal::JournalHeader& header = *process.header;
  uint64_t taken = header.callbacks_taken.load();
  for (;;) {
    const uint32_t rung = header.callback_doorbell.load(std::memory_order_seq_cst);
    const uint64_t posted = header.callbacks_posted.load(std::memory_order_acquire);
    if (taken == posted) {
      journal::futex_wait(header.callback_doorbell, rung, std::chrono::seconds(60));
      continue;
    }
    const uint64_t position = header.callbacks[taken % journal::kCallbackSlots].load(std::memory_order_acquire);
    header.callbacks_taken.store(++taken, std::memory_order_release);
    serve(position);
  }
}

// The program's signals are for the program's threads.
bool start_thread() {
  static const bool started = [] {
    sigset_t all, before;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    const int error = ::pthread_create(
        &thread, nullptr,
        [](void*) -> void* {
          ::pthread_setname_np(::pthread_self(), "xmig-callbacks");
          serve_for_ever();
          return nullptr;
        },
        nullptr);
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (error == 0) ::pthread_detach(thread);
    return error == 0;
  }();
  return started;
}

CUresult launch(const HostFunction& function) {
  Thread& thread = this_thread();
  if (const CUresult error = enter(thread); error != CUDA_SUCCESS) return error;
  if (!valid_stream(function.stream)) return CUDA_ERROR_INVALID_HANDLE;
  const Current now = current(thread);
  if (now.error != CUDA_SUCCESS) return now.error;
  if (!start_thread()) return CUDA_ERROR_OUT_OF_MEMORY;
  const Args_xmHostFunc args{
      .function = reinterpret_cast<uint64_t>(function.function ? reinterpret_cast<void*>(function.function)
                                                               : reinterpret_cast<void*>(function.callback)),
      .user_data = reinterpret_cast<uint64_t>(function.user_data),
      .stream = reinterpret_cast<uint64_t>(function.stream),
      .callback = function.callback != nullptr,
  };
  if (diverting()) [[unlikely]] {
    if (function.callback) {
      const CUresult refused = diversion().refuse_waiting(thread, Op::xmHostFunc, &args);
      if (refused != CUDA_SUCCESS) return refused;
    } else if (const auto diverted = diversion().divert(thread, Op::xmHostFunc, &args, sizeof(args), {})) {
      return *diverted;
    }
  }
  const Shape shape{Op::xmHostFunc, 0, sizeof(args), 0, 0};
  // The table must know the position before the server can post it: both happen under the journal's lock.
  return write_record(thread, now.context, shape, [&](std::byte* arguments, std::byte*) {
           std::memcpy(arguments, &args, sizeof(args));
           const std::lock_guard lock(waiting_mutex);
           waiting.emplace(writer.tail, function);
           unfinished.fetch_add(1, std::memory_order_relaxed);
         }).error;
}

}  // namespace

bool host_functions_are_waiting() { return unfinished.load(std::memory_order_acquire) > 0; }

CUresult cuLaunchHostFunc(CUstream hStream, CUhostFn fn, void* userData) {
  if (!fn) return CUDA_ERROR_INVALID_VALUE;
  return launch({.function = fn, .user_data = userData, .stream = hStream});
}

CUresult cuStreamAddCallback(CUstream hStream, CUstreamCallback callback, void* userData, unsigned int flags) {
  if (!callback || flags) return CUDA_ERROR_INVALID_VALUE;
  return launch({.callback = callback, .user_data = userData, .stream = hStream});
}

}  // namespace xmig::client
