// Streams, memory operations on streams, host functions.
#include "device/cpu/api.h"
#include "device/cpu/driver.h"

namespace xmig::device::cpu {
namespace {

CUresult create(CUstream* out, unsigned flags, int) {
  if (!out || (flags & ~CU_STREAM_NON_BLOCKING)) return CUDA_ERROR_INVALID_VALUE;
  return in_context([&](CpuDevice& device, Context& context, Lock&) {
    const StreamKind kind = flags & CU_STREAM_NON_BLOCKING ? StreamKind::kNonBlocking : StreamKind::kBlocking;
    *out = as_handle<CUstream>(device.streams.add(context.create_stream(kind)));
    return CUDA_SUCCESS;
  });
}

// Returns at once; what is enqueued is still done.
CUresult destroy(CUstream handle) {
  return api([&](CpuDevice& device, Lock&) -> CUresult {
    if (!device.streams.find(number(handle))) return CUDA_ERROR_INVALID_HANDLE;
    const std::shared_ptr<Stream> stream = device.streams.remove(number(handle));
    stream->close();
    return stream->context().error();
  });
}

CUresult synchronize(CUstream handle) {
  return on_stream(handle, [](CpuDevice&, Stream& stream, Lock& lock) {
    const std::shared_ptr<Stream> keep = stream.shared_from_this();
    return wait_for(stream.context().reach(stream), stream.context(), lock);
  });
}

CUresult query(CUstream handle) {
  return on_stream(handle, [](CpuDevice&, Stream& stream, Lock&) {
    for (const Reach& reach : stream.context().reach(stream))
      if (!reach.done()) return CUDA_ERROR_NOT_READY;
    // The last piece of work may have been the one that faulted.
    return stream.context().error();
  });
}

CUresult write_value(CUstream handle, CUdeviceptr address, uint64_t value, uint32_t bytes, unsigned flags) {
  if (flags & ~CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER) return CUDA_ERROR_INVALID_VALUE;
  return on_stream(handle, [&](CpuDevice& device, Stream& stream, Lock&) -> CUresult {
    if (address % bytes != 0 || !device.memory.is_device(address, bytes) ||
        !device.memory.accessible(stream.context().ordinal(), address, bytes, true))
      return CUDA_ERROR_INVALID_VALUE;
    return enqueue(stream, WriteValueWork{address, value, bytes});
  });
}

CUresult wait_value(CUstream handle, CUdeviceptr address, uint64_t value, uint32_t bytes, unsigned flags) {
  constexpr unsigned kCompare = CU_STREAM_WAIT_VALUE_NOR;  // the two low bits
  if (flags & ~kCompare) return flags & CU_STREAM_WAIT_VALUE_FLUSH ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
  return on_stream(handle, [&](CpuDevice& device, Stream& stream, Lock&) -> CUresult {
    if (address % bytes != 0 || !device.memory.is_device(address, bytes) ||
        !device.memory.accessible(stream.context().ordinal(), address, bytes, false))
      return CUDA_ERROR_INVALID_VALUE;
    return enqueue(stream, WaitValueWork{address, value, bytes, flags});
  });
}

CUresult write_value_32(CUstream s, CUdeviceptr a, cuuint32_t v, unsigned f) { return write_value(s, a, v, 4, f); }
CUresult write_value_64(CUstream s, CUdeviceptr a, cuuint64_t v, unsigned f) { return write_value(s, a, v, 8, f); }
CUresult wait_value_32(CUstream s, CUdeviceptr a, cuuint32_t v, unsigned f) { return wait_value(s, a, v, 4, f); }
CUresult wait_value_64(CUstream s, CUdeviceptr a, cuuint64_t v, unsigned f) { return wait_value(s, a, v, 8, f); }

// Always on the stream's own thread: the function may take locks that the caller holds.
CUresult launch_host(CUstream handle, CUhostFn function, void* user) {
  if (!function) return CUDA_ERROR_INVALID_VALUE;
  return on_stream(handle,
                   [&](CpuDevice&, Stream& stream, Lock&) { return enqueue(stream, HostWork{function, user}); });
}

}  // namespace

void add_stream_functions(DriverTable& table) {
  table.cuStreamCreateWithPriority = create;
  table.cuStreamDestroy_v2 = destroy;
  table.cuStreamSynchronize = synchronize;
  table.cuStreamQuery = query;
  table.cuStreamWriteValue32_v2 = write_value_32;
  table.cuStreamWriteValue64_v2 = write_value_64;
  table.cuStreamWaitValue32_v2 = wait_value_32;
  table.cuStreamWaitValue64_v2 = wait_value_64;
  table.cuLaunchHostFunc = launch_host;
}

}  // namespace xmig::device::cpu
