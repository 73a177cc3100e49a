// What device.h says of runtime.h, over the driver table.
#include <array>

#include "device/device.h"

namespace xmig::device {
namespace {

CUstream real_stream(StreamHandle stream) { return static_cast<CUstream>(stream); }
CUevent real_event(EventHandle event) { return static_cast<CUevent>(event); }

CUmemLocation location_of(uint32_t ordinal) {
  CUmemLocation where{};
  where.type = CU_MEM_LOCATION_TYPE_DEVICE;
  where.id = static_cast<int>(ordinal);
  return where;
}

CUdevice device_of(const DriverTable& driver, uint32_t ordinal) {
  CUdevice device = 0;
  driver.cuDeviceGet(&device, static_cast<int>(ordinal));
  return device;
}

}  // namespace

Status status_of(CUresult result) {
  switch (result) {
    case CUDA_SUCCESS: return {};
    case CUDA_ERROR_NOT_READY: return {Problem::kNotReady, result};
    case CUDA_ERROR_INVALID_VALUE: return {Problem::kInvalid, result};
    case CUDA_ERROR_OUT_OF_MEMORY: return {Problem::kNoMemory, result};
    case CUDA_ERROR_PEER_ACCESS_UNSUPPORTED:
    case CUDA_ERROR_PEER_ACCESS_NOT_ENABLED:
    case CUDA_ERROR_TOO_MANY_PEERS:
    case CUDA_ERROR_INVALID_DEVICE:  // of cuMemSetAccess: a device without a way to the memory's
    case CUDA_ERROR_NOT_SUPPORTED:   // of cuMemImportFromShareableHandle, likewise
      return {Problem::kUnreachable, result};
    default: return {Problem::kOther, result};
  }
}

CUresult result_of(Status status) {
  if (status.number() != 0) return static_cast<CUresult>(status.number());
  switch (status.problem()) {
    case Problem::kNone: return CUDA_SUCCESS;
    case Problem::kNotReady: return CUDA_ERROR_NOT_READY;
    case Problem::kInvalid: return CUDA_ERROR_INVALID_VALUE;
    case Problem::kNoMemory: return CUDA_ERROR_OUT_OF_MEMORY;
    case Problem::kTaken: return CUDA_ERROR_INVALID_ADDRESS_SPACE;
    case Problem::kMapped: return CUDA_ERROR_ALREADY_MAPPED;
    case Problem::kNoFile: return CUDA_ERROR_FILE_NOT_FOUND;
    case Problem::kBadImage: return CUDA_ERROR_INVALID_IMAGE;
    case Problem::kUnreachable: return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    case Problem::kOther: break;
  }
  return CUDA_ERROR_UNKNOWN;
}

Status Device::start() { return status_of(driver().cuInit(0)); }

Status Device::open_context(uint32_t ordinal, ContextHandle& out) {
  CUcontext context = nullptr;
  const CUresult result = driver().cuDevicePrimaryCtxRetain(&context, device_of(driver(), ordinal));
  out = context;
  return status_of(result);
}

void Device::close_context(uint32_t ordinal) { driver().cuDevicePrimaryCtxRelease_v2(device_of(driver(), ordinal)); }

void Device::use(ContextHandle context) { driver().cuCtxSetCurrent(static_cast<CUcontext>(context)); }

Status Device::synchronize() { return status_of(driver().cuCtxSynchronize()); }

Status Device::reserve(uint64_t wanted, uint64_t bytes, uint64_t alignment, uint64_t& got) {
  CUdeviceptr address = 0;
  const CUresult result = driver().cuMemAddressReserve(&address, bytes, alignment, wanted, 0);
  got = address;
  return status_of(result);
}

void Device::unreserve(uint64_t address, uint64_t bytes) { driver().cuMemAddressFree(address, bytes); }

Status Device::create(uint32_t ordinal, uint64_t bytes, MemoryHandle& out) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location = location_of(ordinal);
  CUmemGenericAllocationHandle handle = 0;
  const CUresult result = driver().cuMemCreate(&handle, bytes, &properties, 0);
  out = handle;
  return status_of(result);
}

Status Device::export_memory(MemoryHandle memory, int& fd) {
  return status_of(driver().cuMemExportToShareableHandle(&fd, memory, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
}

Status Device::import_memory(int fd, MemoryHandle& out) {
  CUmemGenericAllocationHandle handle = 0;
  void* const shareable = reinterpret_cast<void*>(static_cast<intptr_t>(fd));
  const CUresult result =
      driver().cuMemImportFromShareableHandle(&handle, shareable, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  out = handle;
  return status_of(result);
}

void Device::release(MemoryHandle memory) { driver().cuMemRelease(memory); }

Status Device::map(uint64_t address, uint64_t bytes, MemoryHandle memory) {
  return status_of(driver().cuMemMap(address, bytes, 0, memory, 0));
}

void Device::unmap(uint64_t address, uint64_t bytes) { driver().cuMemUnmap(address, bytes); }

Status Device::set_access(uint64_t address, uint64_t bytes, std::span<const uint32_t> ordinals, bool on) {
  std::array<CUmemAccessDesc, journal::kMaxDevices> access{};
  size_t count = 0;
  for (const uint32_t ordinal : ordinals) {
    access[count].location = location_of(ordinal);
    access[count++].flags = on ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
  }
  return status_of(driver().cuMemSetAccess(address, bytes, access.data(), count));
}

Status Device::lock_host(void* memory, size_t bytes, bool mapped) {
  const unsigned int flags = CU_MEMHOSTREGISTER_PORTABLE | (mapped ? CU_MEMHOSTREGISTER_DEVICEMAP : 0);
  return status_of(driver().cuMemHostRegister_v2(memory, bytes, flags));
}

void Device::unlock_host(void* memory) { driver().cuMemHostUnregister(memory); }

Status Device::create_stream(StreamHandle& out) {
  CUstream stream = nullptr;
  const CUresult result = driver().cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0);
  out = result == CUDA_SUCCESS ? stream : nullptr;
  return status_of(result);
}

void Device::destroy(StreamHandle stream) { driver().cuStreamDestroy_v2(real_stream(stream)); }

Status Device::synchronize(StreamHandle stream) { return status_of(driver().cuStreamSynchronize(real_stream(stream))); }

Status Device::create_event(EventHandle& out) {
  CUevent event = nullptr;
  const CUresult result = driver().cuEventCreate(&event, CU_EVENT_DISABLE_TIMING);
  out = event;
  return status_of(result);
}

void Device::destroy_event(EventHandle event) { driver().cuEventDestroy_v2(real_event(event)); }

Status Device::record(EventHandle event, StreamHandle stream) {
  return status_of(driver().cuEventRecordWithFlags(real_event(event), real_stream(stream), 0));
}

Status Device::wait(StreamHandle stream, EventHandle event) {
  return status_of(driver().cuStreamWaitEvent(real_stream(stream), real_event(event), 0));
}

Status Device::synchronize_event(EventHandle event) { return status_of(driver().cuEventSynchronize(real_event(event))); }

Status Device::query(EventHandle event) { return status_of(driver().cuEventQuery(real_event(event))); }

Status Device::clear(uint64_t address, uint64_t bytes, StreamHandle stream) {
  return status_of(driver().cuMemsetD8Async(address, 0, bytes, real_stream(stream)));
}

Status Device::copy_to_host(void* to, uint64_t from, uint64_t bytes, StreamHandle stream) {
  return status_of(driver().cuMemcpyDtoHAsync_v2(to, from, bytes, real_stream(stream)));
}

Status Device::copy_from_host(uint64_t to, const void* from, uint64_t bytes, StreamHandle stream) {
  return status_of(driver().cuMemcpyHtoDAsync_v2(to, from, bytes, real_stream(stream)));
}

}  // namespace xmig::device
