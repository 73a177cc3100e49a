// How every driver function of the cpu device begins: the device, its lock, the context or stream meant, and the
// sticky error. No exception leaves.
#pragma once

#include <algorithm>
#include <exception>
#include <mutex>
#include <new>

#include "device/cpu/cpu_device.h"
#include "device/cpu/log.h"
#include "device/cpu/progress.h"

namespace xmig::device::cpu {

using Lock = std::unique_lock<std::mutex>;

// body(CpuDevice&, Lock&)
template <typename Body>
CUresult api(Body&& body) noexcept {
  CpuDevice* device = CpuDevice::opened();
  if (!device) return CUDA_ERROR_DEINITIALIZED;
  try {
    Lock lock(device->mutex);
    if (!device->initialised) return CUDA_ERROR_NOT_INITIALIZED;
    return body(*device, lock);
  } catch (const std::bad_alloc&) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  } catch (const std::exception& e) {
    XMIG_CPU_LOG("%s", e.what());
    return CUDA_ERROR_OPERATING_SYSTEM;
  }
}

// The calling thread's current context, if it is usable. body(CpuDevice&, Context&, Lock&)
template <typename Body>
CUresult in_context(Body&& body) noexcept {
  return api([&](CpuDevice& device, Lock& lock) -> CUresult {
    if (t_ordinal < 0) return CUDA_ERROR_INVALID_CONTEXT;
    const std::shared_ptr<Context> context = device.ordinals[t_ordinal].context;
    if (context->error() != CUDA_SUCCESS) return context->error();
    return body(device, *context, lock);
  });
}

// The stream that a handle or one of the three special values means; nullptr: none. The per-thread default stream is
// one blocking stream per context: the executor is one thread, and the client has streams of its own for its threads.
inline std::shared_ptr<Stream> find_stream(CpuDevice& device, CUstream handle) {
  if (number(handle) <= number(CU_STREAM_PER_THREAD)) {
    if (t_ordinal < 0) return nullptr;
    Context& context = *device.ordinals[t_ordinal].context;
    return handle == CU_STREAM_PER_THREAD ? context.per_thread() : context.legacy();
  }
  const auto* found = device.streams.find(number(handle));
  return found ? *found : nullptr;
}

// body(CpuDevice&, Stream&, Lock&), if the stream is there and its context usable.
template <typename Body>
CUresult on_stream(CUstream handle, Body&& body) noexcept {
  return api([&](CpuDevice& device, Lock& lock) -> CUresult {
    const std::shared_ptr<Stream> stream = find_stream(device, handle);
    if (!stream)
      return number(handle) <= number(CU_STREAM_PER_THREAD) ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_INVALID_HANDLE;
    if (const CUresult error = stream->context().error(); error != CUDA_SUCCESS) return error;
    return body(device, *stream, lock);
  });
}

inline CUresult enqueue(Stream& stream, Work work) {
  if (stream.capturing) {
    stream.capturing->work.push_back(std::move(work));
    return CUDA_SUCCESS;
  }
  stream.context().submit(stream, std::move(work), t_sequence);
  return CUDA_SUCCESS;
}

// Waits without the lock.
inline CUresult wait_for(const std::vector<Reach>& reach, const Context& context, Lock& lock, bool spinning = true) {
  lock.unlock();
  Progress::instance().wait(
      [&] {
        return context.dropping() ||
               std::all_of(reach.begin(), reach.end(), [](const Reach& r) { return r.done(); });
      },
      spinning);
  if (context.error() != CUDA_SUCCESS) return context.error();
  return context.abandoned() ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_SUCCESS;
}

}  // namespace xmig::device::cpu
