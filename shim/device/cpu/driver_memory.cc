// Memory, copies and fills. The calls that manage memory go on working after a sticky fault: they do not touch the
// context, and clearing up must be possible.
#include <sys/mman.h>

#include <cstring>
#include <optional>

#include "device/cpu/api.h"
#include "device/cpu/driver.h"
#include "device/cpu/guard.h"
#include "journal/layout.h"

namespace xmig::device::cpu {
namespace {

bool is_posix(CUmemAllocationHandleType type) { return type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR; }

bool is_our_device(const CpuDevice& device, const CUmemLocation& location) {
  return location.type == CU_MEM_LOCATION_TYPE_DEVICE && location.id >= 0 &&
         static_cast<size_t>(location.id) < device.ordinals.size();
}

CUresult get_info(size_t* free, size_t* total) {
  return in_context([&](CpuDevice& device, Context& context, Lock&) {
    const Capacity& capacity = device.memory.capacity(context.ordinal());
    const uint64_t used = std::min<uint64_t>(capacity.used, capacity.total);
    if (free) *free = capacity.total - used;
    if (total) *total = capacity.total;
    return CUDA_SUCCESS;
  });
}

CUresult address_reserve(CUdeviceptr* out, size_t bytes, size_t alignment, CUdeviceptr hint, unsigned long long flags) {
  if (!out || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  return api([&](CpuDevice& device, Lock&) {
    uint64_t address = 0;
    const CUresult result = device.memory.reserve(&address, bytes, alignment, hint);
    if (result == CUDA_SUCCESS) *out = address;
    return result;
  });
}

CUresult address_free(CUdeviceptr address, size_t bytes) {
  return api([&](CpuDevice& device, Lock&) { return device.memory.unreserve(address, bytes); });
}

CUresult create(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* prop,
                unsigned long long flags) {
  if (!handle || !prop || flags != 0 || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
  if (prop->requestedHandleTypes != CU_MEM_HANDLE_TYPE_NONE && !is_posix(prop->requestedHandleTypes))
    return CUDA_ERROR_NOT_SUPPORTED;
  return api([&](CpuDevice& device, Lock&) -> CUresult {
    if (!is_our_device(device, prop->location)) return CUDA_ERROR_INVALID_DEVICE;
    uint64_t created = 0;
    const CUresult result = device.memory.create(&created, bytes, prop->location.id);
    if (result == CUDA_SUCCESS) *handle = created;
    return result;
  });
}

CUresult release(CUmemGenericAllocationHandle handle) {
  return api([&](CpuDevice& device, Lock&) { return device.memory.release(handle); });
}

CUresult map(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
             unsigned long long flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  return api([&](CpuDevice& device, Lock&) { return device.memory.map(address, bytes, offset, handle); });
}

CUresult unmap(CUdeviceptr address, size_t bytes) {
  return api([&](CpuDevice& device, Lock&) { return device.memory.unmap(address, bytes); });
}

CUresult set_access(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* descriptions, size_t count) {
  if (!descriptions || count == 0) return CUDA_ERROR_INVALID_VALUE;
  return api([&](CpuDevice& device, Lock&) -> CUresult {
    const auto protection_of = [](CUmemAccess_flags flags) -> std::optional<int> {
      switch (flags) {
        case CU_MEM_ACCESS_FLAGS_PROT_NONE: return PROT_NONE;
        case CU_MEM_ACCESS_FLAGS_PROT_READ: return PROT_READ;
        case CU_MEM_ACCESS_FLAGS_PROT_READWRITE: return PROT_READ | PROT_WRITE;
        default: return std::nullopt;
      }
    };
    for (size_t i = 0; i < count; ++i) {
      if (!is_our_device(device, descriptions[i].location)) return CUDA_ERROR_INVALID_DEVICE;
      if (!protection_of(descriptions[i].flags)) return CUDA_ERROR_INVALID_VALUE;
    }
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0; i < count && result == CUDA_SUCCESS; ++i) {
      result = device.memory.set_access(address, bytes, descriptions[i].location.id, *protection_of(descriptions[i].flags));
    }
    return result;
  });
}

CUresult export_handle(void* out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                       unsigned long long flags) {
  if (!out || flags != 0 || !is_posix(type)) return CUDA_ERROR_INVALID_VALUE;
  return api([&](CpuDevice& device, Lock&) {
    int fd = -1;
    const CUresult result = device.memory.export_fd(&fd, handle);
    if (result == CUDA_SUCCESS) std::memcpy(out, &fd, sizeof(fd));
    return result;
  });
}

CUresult import_handle(CUmemGenericAllocationHandle* handle, void* os_handle, CUmemAllocationHandleType type) {
  if (!handle || !is_posix(type)) return CUDA_ERROR_INVALID_VALUE;
  return api([&](CpuDevice& device, Lock&) {
    uint64_t imported = 0;
    const int fd = static_cast<int>(reinterpret_cast<intptr_t>(os_handle));
    const CUresult result = device.memory.import(&imported, fd);
    if (result == CUDA_SUCCESS) *handle = imported;
    return result;
  });
}

CUresult granularity(size_t* bytes, const CUmemAllocationProp* prop, CUmemAllocationGranularity_flags) {
  if (!bytes || !prop) return CUDA_ERROR_INVALID_VALUE;
  *bytes = journal::kGranule;
  return CUDA_SUCCESS;
}

CUresult host_register(void* address, size_t bytes, unsigned flags) {
  constexpr unsigned kKnown = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_READ_ONLY;
  if (flags & ~kKnown) return CUDA_ERROR_INVALID_VALUE;
  return api([&](CpuDevice& device, Lock&) {
    return device.memory.register_host(reinterpret_cast<uint64_t>(address), bytes);
  });
}

CUresult host_unregister(void* address) {
  return api([&](CpuDevice& device, Lock&) {
    return device.memory.unregister_host(reinterpret_cast<uint64_t>(address));
  });
}

// --- copies ---------------------------------------------------------------------------------------------------

// Bytes from the first to the last of a pitched area; false if that is no number.
bool extent(uint64_t pitch, uint64_t width, uint64_t height, uint64_t* bytes) {
  uint64_t rows;
  return !__builtin_mul_overflow(height - 1, pitch, &rows) && !__builtin_add_overflow(rows, width, bytes) &&
         (height == 1 || pitch >= width);
}

// Takes the rows of pageable memory now, as the driver does: the caller may change them as soon as the call returns.
CUresult take_snapshot(CopyWork& work) {
  uint64_t bytes;
  if (__builtin_mul_overflow(work.width, work.height, &bytes)) return CUDA_ERROR_INVALID_VALUE;
  work.snapshot.reset(new (std::nothrow) std::byte[bytes]);
  if (!work.snapshot) return CUDA_ERROR_OUT_OF_MEMORY;
  Trap trap;
  const bool read = guarded(trap, [&] {
    for (uint64_t row = 0; row < work.height; ++row)
      std::memcpy(work.snapshot.get() + row * work.width,
                  reinterpret_cast<const void*>(work.source + row * work.source_pitch), work.width);
  });
  work.source = reinterpret_cast<uint64_t>(work.snapshot.get());
  work.source_pitch = work.width;
  return read ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// The devices that read the source and write the destination: the stream's, unless the copy names two contexts.
struct Between {
  int source, destination;
};

// Everything copies come down to. Copies to pageable host memory are asynchronous too, unlike the driver's: whoever
// needs the bytes waits for the stream. `at_call`: the host's bytes are read now.
CUresult copy(CpuDevice& device, Stream& stream, CopyWork work, bool from_host, bool to_host, Between between,
              bool at_call = false) {
  if (work.width == 0 || work.height == 0) return CUDA_SUCCESS;
  uint64_t read, written;
  if (!extent(work.source_pitch, work.width, work.height, &read) ||
      !extent(work.destination_pitch, work.width, work.height, &written))
    return CUDA_ERROR_INVALID_VALUE;
  if (from_host ? work.source == 0 : !device.memory.is_device(work.source, read)) return CUDA_ERROR_INVALID_VALUE;
  if (to_host ? work.destination == 0 : !device.memory.is_device(work.destination, written))
    return CUDA_ERROR_INVALID_VALUE;
  if (!device.memory.accessible(between.source, work.source, read, false) ||
      !device.memory.accessible(between.destination, work.destination, written, true))
    return CUDA_ERROR_INVALID_VALUE;
  if (from_host && (at_call || !device.memory.is_device(work.source, read)))
    if (const CUresult result = take_snapshot(work); result != CUDA_SUCCESS) return result;
  if (work.source_pitch == work.width && work.destination_pitch == work.width) {
    work.width *= work.height;
    work.height = 1;
  }
  return enqueue(stream, std::move(work));
}

Between within(Stream& stream) { return {stream.context().ordinal(), stream.context().ordinal()}; }

// What is small and comes from the host for the null stream the genuine driver reads at the call, whatever streams that one has
// to wait for: seen on an H100, driver 580.159, below 64 KiB.
constexpr size_t kReadAtCall = 64 << 10;

CUresult copy_linear(uint64_t to, uint64_t from, size_t bytes, CUstream handle, bool from_host, bool to_host) {
  return on_stream(handle, [&](CpuDevice& device, Stream& stream, Lock&) {
    const bool at_call = !handle && bytes < kReadAtCall;
    return copy(device, stream, {to, bytes, from, bytes, bytes, 1, nullptr}, from_host, to_host, within(stream), at_call);
  });
}

CUresult peer_rows(CopyWork work, CUcontext to, CUcontext from, CUstream handle) {
  return on_stream(handle, [&](CpuDevice& device, Stream& stream, Lock&) -> CUresult {
    const Between between{device.ordinal_of(from), device.ordinal_of(to)};
    if (between.source < 0 || between.destination < 0) return CUDA_ERROR_INVALID_CONTEXT;
    for (const int ordinal : {between.source, between.destination})
      if (const CUresult error = device.ordinals[ordinal].context->error(); error != CUDA_SUCCESS) return error;
    return copy(device, stream, std::move(work), false, false, between);
  });
}

CUresult copy_peer(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t bytes,
                   CUstream stream) {
  return peer_rows({to, bytes, from, bytes, bytes, 1, nullptr}, to_context, from_context, stream);
}

// Of one slice, from the start of both sides: what a server asks for.
CUresult copy_3d_peer(const CUDA_MEMCPY3D_PEER* p, CUstream stream) {
  if (!p) return CUDA_ERROR_INVALID_VALUE;
  const bool plain = p->srcMemoryType == CU_MEMORYTYPE_DEVICE && p->dstMemoryType == CU_MEMORYTYPE_DEVICE && p->Depth == 1 &&
                     !p->srcXInBytes && !p->srcY && !p->srcZ && !p->dstXInBytes && !p->dstY && !p->dstZ;
  if (!plain) return CUDA_ERROR_NOT_SUPPORTED;
  return peer_rows({p->dstDevice, p->dstPitch, p->srcDevice, p->srcPitch, p->WidthInBytes, p->Height, nullptr}, p->dstContext,
                   p->srcContext, stream);
}

CUresult host_to_device(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  return copy_linear(to, reinterpret_cast<uint64_t>(from), bytes, stream, true, false);
}

CUresult device_to_host(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return copy_linear(reinterpret_cast<uint64_t>(to), from, bytes, stream, false, true);
}

CUresult device_to_device(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return copy_linear(to, from, bytes, stream, false, false);
}

struct Side {
  uint64_t address = 0;
  bool host = false;
};

// One end of a CUDA_MEMCPY2D; false: an array, or nonsense.
bool resolve(CUmemorytype type, const void* host, CUdeviceptr device, size_t x, size_t y, size_t pitch, Side& out) {
  uint64_t offset;
  if (__builtin_mul_overflow(y, pitch, &offset) || __builtin_add_overflow(offset, x, &offset)) return false;
  if (type != CU_MEMORYTYPE_HOST && type != CU_MEMORYTYPE_DEVICE && type != CU_MEMORYTYPE_UNIFIED) return false;
  out.host = type == CU_MEMORYTYPE_HOST;
  out.address = out.host ? reinterpret_cast<uint64_t>(host) : device;
  return out.address != 0 && !__builtin_add_overflow(out.address, offset, &out.address);
}

CUresult copy_2d(const CUDA_MEMCPY2D* p, CUstream handle) {
  if (!p) return CUDA_ERROR_INVALID_VALUE;
  Side from, to;
  if (!resolve(p->srcMemoryType, p->srcHost, p->srcDevice, p->srcXInBytes, p->srcY, p->srcPitch, from) ||
      !resolve(p->dstMemoryType, p->dstHost, p->dstDevice, p->dstXInBytes, p->dstY, p->dstPitch, to))
    return CUDA_ERROR_INVALID_VALUE;
  return on_stream(handle, [&](CpuDevice& device, Stream& stream, Lock&) {
    // A unified pointer may be host memory as well.
    from.host = from.host || (p->srcMemoryType == CU_MEMORYTYPE_UNIFIED && !device.memory.is_device(from.address, 1));
    to.host = to.host || (p->dstMemoryType == CU_MEMORYTYPE_UNIFIED && !device.memory.is_device(to.address, 1));
    return copy(device, stream,
                {to.address, p->dstPitch, from.address, p->srcPitch, p->WidthInBytes, p->Height, nullptr}, from.host,
                to.host, within(stream));
  });
}

// --- fills ----------------------------------------------------------------------------------------------------

CUresult fill(CUdeviceptr address, size_t pitch, uint32_t value, uint32_t element, size_t width, size_t height,
              CUstream handle) {
  return on_stream(handle, [&](CpuDevice& device, Stream& stream, Lock&) -> CUresult {
    if (width == 0 || height == 0) return CUDA_SUCCESS;
    uint64_t row, bytes;
    if (address % element != 0 || (height > 1 && pitch % element != 0) ||
        __builtin_mul_overflow(width, uint64_t{element}, &row) || !extent(pitch, row, height, &bytes) ||
        !device.memory.is_device(address, bytes) ||
        !device.memory.accessible(stream.context().ordinal(), address, bytes, true))
      return CUDA_ERROR_INVALID_VALUE;
    return enqueue(stream, FillWork{address, pitch, width, height, value, element});
  });
}

CUresult fill_8(CUdeviceptr a, unsigned char v, size_t n, CUstream s) { return fill(a, 0, v, 1, n, 1, s); }
CUresult fill_16(CUdeviceptr a, unsigned short v, size_t n, CUstream s) { return fill(a, 0, v, 2, n, 1, s); }
CUresult fill_32(CUdeviceptr a, unsigned v, size_t n, CUstream s) { return fill(a, 0, v, 4, n, 1, s); }
CUresult fill_2d_8(CUdeviceptr a, size_t pitch, unsigned char v, size_t w, size_t h, CUstream s) {
  return fill(a, pitch, v, 1, w, h, s);
}
CUresult fill_2d_16(CUdeviceptr a, size_t pitch, unsigned short v, size_t w, size_t h, CUstream s) {
  return fill(a, pitch, v, 2, w, h, s);
}
CUresult fill_2d_32(CUdeviceptr a, size_t pitch, unsigned v, size_t w, size_t h, CUstream s) {
  return fill(a, pitch, v, 4, w, h, s);
}

}  // namespace

void add_memory_functions(DriverTable& table) {
  table.cuMemGetInfo_v2 = get_info;
  table.cuMemAddressReserve = address_reserve;
  table.cuMemAddressFree = address_free;
  table.cuMemCreate = create;
  table.cuMemRelease = release;
  table.cuMemMap = map;
  table.cuMemUnmap = unmap;
  table.cuMemSetAccess = set_access;
  table.cuMemExportToShareableHandle = export_handle;
  table.cuMemImportFromShareableHandle = import_handle;
  table.cuMemGetAllocationGranularity = granularity;
  table.cuMemHostRegister_v2 = host_register;
  table.cuMemHostUnregister = host_unregister;
  table.cuMemcpyHtoDAsync_v2 = host_to_device;
  table.cuMemcpyDtoHAsync_v2 = device_to_host;
  table.cuMemcpyDtoDAsync_v2 = device_to_device;
  table.cuMemcpyPeerAsync = copy_peer;
  table.cuMemcpy3DPeerAsync = copy_3d_peer;
  table.cuMemcpy2DAsync_v2 = copy_2d;
  table.cuMemsetD8Async = fill_8;
  table.cuMemsetD16Async = fill_16;
  table.cuMemsetD32Async = fill_32;
  table.cuMemsetD2D8Async = fill_2d_8;
  table.cuMemsetD2D16Async = fill_2d_16;
  table.cuMemsetD2D32Async = fill_2d_32;
}

}  // namespace xmig::device::cpu
