#include "device/null/null_device.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>

#include "device/cpu/collectives.h"
#include "device/description.h"
#include "device/image.h"
#include "device/limits.h"
#include "device/null/host_functions.h"
#include "device/null/linker.h"
#include "device/null/tensor_maps.h"
#include "ipc/fd.h"
#include "xxhash.h"

namespace xmig::device {
namespace {

constexpr uint64_t kContextHandle = 0x63ull << 56;

struct Function {
  const ImageKernel* kernel;
  std::atomic<int> max_dynamic_shared{49152};
  explicit Function(const ImageKernel* of) : kernel(of) {}
};
struct Event {
  std::atomic<std::chrono::nanoseconds> recorded{};
};
struct Module {
  Image image;
  std::vector<std::unique_ptr<Function>> functions;
};

// As long as a handle or a mapping needs it.
struct Physical {
  ipc::UniqueFd fd;
  uint64_t bytes;
  int ordinal;
  Physical(ipc::UniqueFd&& of, uint64_t size, int where);
  ~Physical();
  Physical(const Physical&) = delete;
};

uint64_t hash_of_length(uint64_t bytes) { return XXH3_64bits(&bytes, sizeof(bytes)); }

class NullDevice final : public Device {
 public:
  NullDevice(std::span<const int> ordinals, uint64_t memory_bytes);
  ~NullDevice() override;

  const DriverTable& driver() const override { return table_; }
  journal::DeviceDescription describe(int ordinal) const override { return descriptions.at(ordinal); }
  void set_sequence(uint64_t) override {}
  Fault fault() const override { return {}; }
  void on_fault(void (*)(void*), void*) override {}
  bool hash(std::span<const Chunk> chunks, std::span<uint64_t> hashes, Where) override;
  uint64_t hash_of(std::span<const std::byte> content) const override { return hash_of_length(content.size()); }
  bool copy(std::span<const Move>, Where) override { return true; }
  CUresult load_image(CUmodule* module, std::span<const std::byte> image) override;
  Collectives& collectives() override { return *collectives_; }
  std::vector<Global> globals(CUmodule module) override;
  bool bind_global(CUmodule, uint32_t, uint64_t) override { return true; }
  // Nothing runs here into whose middle a fault could be injected.
  void arm(const Injection&, Notify, void*) override {}

  std::vector<journal::DeviceDescription> descriptions;
  HostFunctions host_functions;
  std::array<std::atomic<uint64_t>, journal::kMaxDevices> used{};  // bytes of physical memory

  std::mutex mutex;  // of what follows; launches, copies and events need none of it
  std::map<uint64_t, uint64_t> reservations;
  std::map<uint64_t, std::shared_ptr<Physical>> memory;    // by handle
  std::map<uint64_t, std::shared_ptr<Physical>> mappings;  // by address
  std::map<CUmodule, std::unique_ptr<Module>> modules;
  std::vector<Limits> limits;  // by ordinal
  std::map<CUgraph, std::vector<std::vector<CUgraph>>> bodies;  // of graphs' conditional nodes

 private:
  DriverTable table_{};
  const std::unique_ptr<Collectives> collectives_ = host_collectives(table_, Content::kNone);
};

std::atomic<NullDevice*> g_opened{nullptr};
std::atomic<uint64_t> g_handles{1ull << 32};
thread_local int current = -1;  // the ordinal of the calling thread's context

NullDevice& device() { return *g_opened.load(std::memory_order_relaxed); }

// Under the mutex.
void forget_bodies(CUgraph graph) {
  const auto found = device().bodies.extract(graph);
  if (!found) return;
  for (const auto& node : found.mapped()) {
    for (const CUgraph body : node) forget_bodies(body);
  }
}

Physical::Physical(ipc::UniqueFd&& of, uint64_t size, int where) : fd(std::move(of)), bytes(size), ordinal(where) {
  device().used[ordinal] += bytes;
}
Physical::~Physical() { device().used[ordinal] -= bytes; }

template <typename H>
H new_handle() {
  return reinterpret_cast<H>(g_handles.fetch_add(16, std::memory_order_relaxed));
}

bool is_ordinal(int ordinal) { return ordinal >= 0 && static_cast<size_t>(ordinal) < device().descriptions.size(); }

void add_device_functions(DriverTable& t) {
  t.cuInit = [](unsigned) { return CUDA_SUCCESS; };
  t.cuDriverGetVersion = [](int* version) {
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
  };
  t.cuDeviceGetCount = [](int* count) {
    *count = static_cast<int>(device().descriptions.size());
    return CUDA_SUCCESS;
  };
  t.cuDeviceGet = [](CUdevice* out, int ordinal) {
    *out = ordinal;
    return is_ordinal(ordinal) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
  };
  t.cuDeviceGetName = [](char* name, int bytes, CUdevice ordinal) {
    if (!is_ordinal(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    std::snprintf(name, static_cast<size_t>(bytes), "%s", device().descriptions[ordinal].name);
    return CUDA_SUCCESS;
  };
  t.cuDeviceGetAttribute = [](int* value, CUdevice_attribute attribute, CUdevice ordinal) {
    if (!is_ordinal(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    if (attribute <= 0 || attribute >= CU_DEVICE_ATTRIBUTE_MAX) return CUDA_ERROR_INVALID_VALUE;
    *value = device().descriptions[ordinal].attributes[attribute];
    return CUDA_SUCCESS;
  };
  t.cuDeviceTotalMem_v2 = [](size_t* bytes, CUdevice ordinal) {
    if (!is_ordinal(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *bytes = device().descriptions[ordinal].total_bytes;
    return CUDA_SUCCESS;
  };
  t.cuDeviceGetUuid_v2 = [](CUuuid* uuid, CUdevice ordinal) {
    if (!is_ordinal(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    std::memcpy(uuid->bytes, device().descriptions[ordinal].uuid, sizeof(uuid->bytes));
    return CUDA_SUCCESS;
  };
  t.cuDeviceCanAccessPeer = [](int* reaches, CUdevice ordinal, CUdevice peer) {
    if (!is_ordinal(ordinal) || !is_ordinal(peer)) return CUDA_ERROR_INVALID_DEVICE;
    *reaches = device().peer(ordinal, peer) != 0;
    return CUDA_SUCCESS;
  };
  t.cuDeviceGetP2PAttribute = [](int* value, CUdevice_P2PAttribute attribute, CUdevice ordinal, CUdevice peer) {
    if (!is_ordinal(ordinal) || !is_ordinal(peer) || ordinal == peer) return CUDA_ERROR_INVALID_DEVICE;
    *value = attribute == CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED ||
             attribute == CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED;
    return CUDA_SUCCESS;
  };
  t.cuDevicePrimaryCtxRetain = [](CUcontext* context, CUdevice ordinal) {
    if (!is_ordinal(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *context = reinterpret_cast<CUcontext>(kContextHandle | static_cast<uint64_t>(ordinal + 1));
    return CUDA_SUCCESS;
  };
  t.cuDevicePrimaryCtxRelease_v2 = [](CUdevice) { return CUDA_SUCCESS; };
  t.cuDevicePrimaryCtxReset_v2 = [](CUdevice) { return CUDA_SUCCESS; };
  t.cuCtxSetCurrent = [](CUcontext context) {
    current = context ? static_cast<int>((reinterpret_cast<uint64_t>(context) ^ kContextHandle) - 1) : -1;
    return CUDA_SUCCESS;
  };
  t.cuCtxSynchronize = [] {
    device().host_functions.wait();
    return CUDA_SUCCESS;
  };
  t.cuCtxGetLimit = [](size_t* value, CUlimit limit) {
    if (!is_ordinal(current)) return CUDA_ERROR_INVALID_CONTEXT;
    const std::lock_guard lock(device().mutex);
    return device().limits[current].get(value, limit);
  };
  t.cuCtxSetLimit = [](CUlimit limit, size_t value) {
    if (!is_ordinal(current)) return CUDA_ERROR_INVALID_CONTEXT;
    const std::lock_guard lock(device().mutex);
    return device().limits[current].set(limit, value);
  };
}

// --- memory: addresses are really reserved, and handles really can be exported; there are no bytes ---------------

CUresult add_physical(CUmemGenericAllocationHandle* handle, std::shared_ptr<Physical> memory) {
  *handle = reinterpret_cast<uint64_t>(new_handle<void*>());
  const std::lock_guard lock(device().mutex);
  device().memory[*handle] = std::move(memory);
  return CUDA_SUCCESS;
}

void add_memory_functions(DriverTable& t) {
  t.cuMemGetInfo_v2 = [](size_t* free, size_t* total) {
    if (!is_ordinal(current)) return CUDA_ERROR_INVALID_CONTEXT;
    const uint64_t bytes = device().descriptions[current].total_bytes;
    if (free) *free = bytes - std::min(bytes, device().used[current].load());
    if (total) *total = bytes;
    return CUDA_SUCCESS;
  };
  t.cuMemAddressReserve = [](CUdeviceptr* out, size_t bytes, size_t, CUdeviceptr hint, unsigned long long) {
    void* got = mmap(reinterpret_cast<void*>(hint), bytes, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (hint ? MAP_FIXED_NOREPLACE : 0), -1, 0);
    if (got == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    *out = reinterpret_cast<CUdeviceptr>(got);
    const std::lock_guard lock(device().mutex);
    device().reservations[*out] = bytes;
    return CUDA_SUCCESS;
  };
  t.cuMemAddressFree = [](CUdeviceptr address, size_t bytes) {
    const std::lock_guard lock(device().mutex);
    if (device().reservations.erase(address) == 0) return CUDA_ERROR_INVALID_VALUE;
    munmap(reinterpret_cast<void*>(address), bytes);
    return CUDA_SUCCESS;
  };
  t.cuMemCreate = [](CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* property,
                     unsigned long long) {
    const int ordinal = property->location.id;
    if (!is_ordinal(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    const uint64_t total = device().descriptions[ordinal].total_bytes;
    if (bytes > total - std::min(total, device().used[ordinal].load())) return CUDA_ERROR_OUT_OF_MEMORY;
    ipc::UniqueFd fd(memfd_create("xmig-null-memory", MFD_CLOEXEC));
    if (!fd || ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
    return add_physical(handle, std::make_shared<Physical>(std::move(fd), bytes, ordinal));
  };
  t.cuMemRelease = [](CUmemGenericAllocationHandle handle) {
    const std::lock_guard lock(device().mutex);
    return device().memory.erase(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  };
  t.cuMemMap = [](CUdeviceptr address, size_t, size_t, CUmemGenericAllocationHandle handle, unsigned long long) {
    const std::lock_guard lock(device().mutex);
    const auto found = device().memory.find(handle);
    if (found == device().memory.end()) return CUDA_ERROR_INVALID_VALUE;
    return device().mappings.emplace(address, found->second).second ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  };
  t.cuMemUnmap = [](CUdeviceptr address, size_t bytes) {
    const std::lock_guard lock(device().mutex);
    auto& mappings = device().mappings;
    mappings.erase(mappings.lower_bound(address), mappings.lower_bound(address + bytes));
    return CUDA_SUCCESS;
  };
  t.cuMemSetAccess = [](CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; };
  t.cuMemExportToShareableHandle = [](void* out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType,
                                      unsigned long long) {
    const std::lock_guard lock(device().mutex);
    const auto found = device().memory.find(handle);
    if (found == device().memory.end()) return CUDA_ERROR_INVALID_VALUE;
    const int fd = fcntl(found->second->fd.get(), F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return CUDA_ERROR_OUT_OF_MEMORY;
    std::memcpy(out, &fd, sizeof(fd));
    return CUDA_SUCCESS;
  };
  t.cuMemImportFromShareableHandle = [](CUmemGenericAllocationHandle* handle, void* fd, CUmemAllocationHandleType) {
    ipc::UniqueFd own(fcntl(static_cast<int>(reinterpret_cast<intptr_t>(fd)), F_DUPFD_CLOEXEC, 0));
    if (!own) return errno == EBADF ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_OUT_OF_MEMORY;
    struct stat status{};
    if (fstat(own.get(), &status) != 0) return CUDA_ERROR_INVALID_VALUE;
    // A descriptor does not say whose memory it is; with several devices it counts as the first one's.
    return add_physical(handle, std::make_shared<Physical>(std::move(own), static_cast<uint64_t>(status.st_size), 0));
  };
  t.cuMemGetAllocationGranularity = [](size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
    *bytes = journal::kGranule;
    return CUDA_SUCCESS;
  };
  t.cuMemHostRegister_v2 = [](void*, size_t, unsigned) { return CUDA_SUCCESS; };
  t.cuMemHostUnregister = [](void*) { return CUDA_SUCCESS; };
}

// --- copies: what reaches the host is zeros, so that a replay reads the same again ----------------------------------

void add_copy_functions(DriverTable& t) {
  t.cuMemcpyHtoDAsync_v2 = [](CUdeviceptr, const void*, size_t, CUstream) { return CUDA_SUCCESS; };
  t.cuMemcpyDtoHAsync_v2 = [](void* to, CUdeviceptr, size_t bytes, CUstream) {
    std::memset(to, 0, bytes);
    return CUDA_SUCCESS;
  };
  t.cuMemcpyDtoDAsync_v2 = [](CUdeviceptr, CUdeviceptr, size_t, CUstream) { return CUDA_SUCCESS; };
  t.cuMemcpyPeerAsync = [](CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, size_t, CUstream) { return CUDA_SUCCESS; };
  t.cuMemcpy3DPeerAsync = [](const CUDA_MEMCPY3D_PEER*, CUstream) { return CUDA_SUCCESS; };
  t.cuMemcpy2DAsync_v2 = [](const CUDA_MEMCPY2D* copy, CUstream) {
    if (copy->dstMemoryType != CU_MEMORYTYPE_HOST) return CUDA_SUCCESS;
    auto* to = static_cast<std::byte*>(copy->dstHost) + copy->dstY * copy->dstPitch + copy->dstXInBytes;
    for (size_t row = 0; row < copy->Height; ++row) std::memset(to + row * copy->dstPitch, 0, copy->WidthInBytes);
    return CUDA_SUCCESS;
  };
  t.cuMemsetD8Async = [](CUdeviceptr, unsigned char, size_t, CUstream) { return CUDA_SUCCESS; };
  t.cuMemsetD16Async = [](CUdeviceptr, unsigned short, size_t, CUstream) { return CUDA_SUCCESS; };
  t.cuMemsetD32Async = [](CUdeviceptr, unsigned, size_t, CUstream) { return CUDA_SUCCESS; };
  t.cuMemsetD2D8Async = [](CUdeviceptr, size_t, unsigned char, size_t, size_t, CUstream) { return CUDA_SUCCESS; };
  t.cuMemsetD2D16Async = [](CUdeviceptr, size_t, unsigned short, size_t, size_t, CUstream) { return CUDA_SUCCESS; };
  t.cuMemsetD2D32Async = [](CUdeviceptr, size_t, unsigned, size_t, size_t, CUstream) { return CUDA_SUCCESS; };
}

// --- streams and events: all work is done at once; only host functions take a moment -------------------------------

CUresult ready() { return device().host_functions.idle() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY; }

CUresult wait() {
  device().host_functions.wait();
  return CUDA_SUCCESS;
}

// Device memory holds nothing; the words at which programs and servers look are in host memory.
template <typename T>
void store(CUdeviceptr address, T value) {
  if (address - journal::kDeviceBase < journal::kMaxDevices * journal::kDeviceSpan) return;
  std::atomic_ref(*reinterpret_cast<T*>(address)).store(value, std::memory_order_release);
}

void add_stream_functions(DriverTable& t) {
  t.cuStreamCreateWithPriority = [](CUstream* out, unsigned, int) {
    *out = new_handle<CUstream>();
    return CUDA_SUCCESS;
  };
  t.cuStreamDestroy_v2 = [](CUstream) { return CUDA_SUCCESS; };
  t.cuStreamSynchronize = [](CUstream) { return wait(); };
  t.cuStreamQuery = [](CUstream) { return ready(); };
  t.cuStreamWaitEvent = [](CUstream, CUevent, unsigned) { return CUDA_SUCCESS; };
  t.cuStreamWriteValue32_v2 = [](CUstream, CUdeviceptr address, cuuint32_t value, unsigned) {
    store(address, value);
    return CUDA_SUCCESS;
  };
  t.cuStreamWriteValue64_v2 = [](CUstream, CUdeviceptr address, cuuint64_t value, unsigned) {
    store(address, value);
    return CUDA_SUCCESS;
  };
  t.cuStreamWaitValue32_v2 = [](CUstream, CUdeviceptr, cuuint32_t, unsigned) { return CUDA_SUCCESS; };
  t.cuStreamWaitValue64_v2 = [](CUstream, CUdeviceptr, cuuint64_t, unsigned) { return CUDA_SUCCESS; };
  t.cuLaunchHostFunc = [](CUstream, CUhostFn function, void* user) {
    return device().host_functions.add(function, user) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
  };
  t.cuEventCreate = [](CUevent* out, unsigned) {
    *out = reinterpret_cast<CUevent>(new Event);
    return CUDA_SUCCESS;
  };
  t.cuEventDestroy_v2 = [](CUevent event) {
    delete reinterpret_cast<Event*>(event);
    return CUDA_SUCCESS;
  };
  t.cuEventRecordWithFlags = [](CUevent event, CUstream, unsigned) {
    reinterpret_cast<Event*>(event)->recorded = std::chrono::steady_clock::now().time_since_epoch();
    return CUDA_SUCCESS;
  };
  t.cuEventQuery = [](CUevent) { return ready(); };
  t.cuEventSynchronize = [](CUevent) { return wait(); };
  t.cuEventElapsedTime_v2 = [](float* milliseconds, CUevent start, CUevent end) {
    // Work takes no time, but programs divide by what it took: no less than a GPU's clock can tell apart.
    constexpr std::chrono::nanoseconds kResolution(500);
    const auto elapsed = reinterpret_cast<Event*>(end)->recorded.load() - reinterpret_cast<Event*>(start)->recorded.load();
    *milliseconds = std::chrono::duration<float, std::milli>(std::max(elapsed, kResolution)).count();
    return CUDA_SUCCESS;
  };
}

// --- modules ------------------------------------------------------------------------------------------------------

Function& function(CUfunction handle) { return *reinterpret_cast<Function*>(handle); }

CUresult load_data(CUmodule* out, const void* image) {
  if (!image) return CUDA_ERROR_INVALID_VALUE;
  // A header at least: the length of an image stands there. Text (PTX) ends with a zero byte.
  struct Wrapper {
    uint32_t magic, version;
    const void* data;
    const void* rest;
  } wrapper;
  std::memcpy(&wrapper.magic, image, sizeof(wrapper.magic));
  if (wrapper.magic == 0x466243b1) {
    std::memcpy(&wrapper, image, sizeof(wrapper));
    return load_data(out, wrapper.data);
  }
  const auto* bytes = static_cast<const std::byte*>(image);
  size_t extent = 0;
  if (wrapper.magic == 0xba55ed50) extent = image_extent({bytes, 16});
  if (std::memcmp(image, "\177ELF", 4) == 0) extent = image_extent({bytes, 64});
  if (extent == 0) extent = std::strlen(static_cast<const char*>(image));
  return device().load_image(out, {bytes, extent});
}

constexpr unsigned kMultiprocessors = 132;
constexpr unsigned kMostBlocksOfCluster = 16;

int resident_blocks(int threads) { return std::min(32, 2048 / ((threads + 31) / 32 * 32)); }

size_t packed_bytes(void* const* extra) {
  for (; *extra != CU_LAUNCH_PARAM_END; extra += 2) {
    if (extra[0] == CU_LAUNCH_PARAM_BUFFER_SIZE) return *static_cast<const size_t*>(extra[1]);
  }
  return 0;
}

// What a launch is refused for that no attribute of the kernel tells.
CUresult check_fit(const CUlaunchConfig& config) {
  const unsigned grid[] = {config.gridDimX, config.gridDimY, config.gridDimZ};
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const auto& value = config.attrs[i].value;
    if (config.attrs[i].id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE && value.cooperative != 0) {
      const uint64_t threads = uint64_t{config.blockDimX} * config.blockDimY * config.blockDimZ;
      const uint64_t blocks = uint64_t{grid[0]} * grid[1] * grid[2];
      if (blocks > uint64_t{kMultiprocessors} * resident_blocks(static_cast<int>(threads))) {
        return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
      }
    }
    if (config.attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
      const unsigned cluster[] = {value.clusterDim.x, value.clusterDim.y, value.clusterDim.z};
      uint64_t blocks = 1;
      for (int axis = 0; axis < 3; ++axis) {
        if (cluster[axis] == 0 || grid[axis] % cluster[axis] != 0) return CUDA_ERROR_INVALID_CLUSTER_SIZE;
        blocks *= cluster[axis];
      }
      if (blocks > kMostBlocksOfCluster) return CUDA_ERROR_INVALID_CLUSTER_SIZE;
    }
  }
  return CUDA_SUCCESS;
}

void add_module_functions(DriverTable& t) {
  t.cuModuleLoadData = load_data;
  t.cuModuleUnload = [](CUmodule module) {
    const std::lock_guard lock(device().mutex);
    return device().modules.erase(module) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
  };
  t.cuModuleGetFunctionCount = [](unsigned* count, CUmodule module) {
    *count = static_cast<unsigned>(reinterpret_cast<Module*>(module)->functions.size());
    return CUDA_SUCCESS;
  };
  t.cuModuleEnumerateFunctions = [](CUfunction* out, unsigned room, CUmodule module) {
    const auto& functions = reinterpret_cast<Module*>(module)->functions;
    for (size_t i = 0; i < functions.size() && i < room; ++i) out[i] = reinterpret_cast<CUfunction>(functions[i].get());
    return CUDA_SUCCESS;
  };
  t.cuModuleGetGlobal_v2 = [](CUdeviceptr* address, size_t* bytes, CUmodule module, const char* name) {
    for (const ImageGlobal& g : reinterpret_cast<Module*>(module)->image.globals) {
      if (g.name != name) continue;
      if (address) *address = 0;
      if (bytes) *bytes = g.bytes;
      return CUDA_SUCCESS;
    }
    return CUDA_ERROR_NOT_FOUND;
  };
  t.cuFuncLoad = [](CUfunction) { return CUDA_SUCCESS; };
  t.cuFuncGetName = [](const char** name, CUfunction f) {
    *name = function(f).kernel->name.c_str();
    return CUDA_SUCCESS;
  };
  t.cuFuncGetParamInfo = [](CUfunction f, size_t index, size_t* offset, size_t* bytes) {
    const auto& parameters = function(f).kernel->parameters;
    if (index >= parameters.size()) return CUDA_ERROR_INVALID_VALUE;
    *offset = parameters[index].offset;
    if (bytes) *bytes = parameters[index].size;
    return CUDA_SUCCESS;
  };
  t.cuFuncGetAttribute = [](int* value, CUfunction_attribute attribute, CUfunction f) {
    switch (attribute) {
      case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = static_cast<int>(function(f).kernel->max_threads); break;
      case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
        *value = static_cast<int>(function(f).kernel->static_shared_bytes);
        break;
      case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = 32; break;
      case CU_FUNC_ATTRIBUTE_PTX_VERSION:
      case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *value = 90; break;
      case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *value = function(f).max_dynamic_shared; break;
      case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: *value = -1; break;
      default: *value = 0;
    }
    return CUDA_SUCCESS;
  };
  t.cuFuncSetAttribute = [](CUfunction f, CUfunction_attribute attribute, int value) {
    if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) function(f).max_dynamic_shared = value;
    return CUDA_SUCCESS;
  };
  t.cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags = [](int* blocks, CUfunction, int threads, size_t, unsigned) {
    if (threads <= 0) return CUDA_ERROR_INVALID_VALUE;
    *blocks = resident_blocks(threads);
    return CUDA_SUCCESS;
  };
  t.cuOccupancyMaxActiveClusters = [](int* clusters, CUfunction, const CUlaunchConfig* config) {
    unsigned size = 1;
    for (unsigned i = 0; i < config->numAttrs; ++i) {
      const auto& dimension = config->attrs[i].value.clusterDim;
      if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) size = dimension.x * dimension.y * dimension.z;
    }
    if (size == 0 || size > kMostBlocksOfCluster) return CUDA_ERROR_INVALID_CLUSTER_SIZE;
    *clusters = static_cast<int>(kMultiprocessors / size);
    return CUDA_SUCCESS;
  };
  t.cuOccupancyMaxPotentialClusterSize = [](int* size, CUfunction, const CUlaunchConfig*) {
    *size = 8;
    return CUDA_SUCCESS;
  };
  t.cuGraphCreate = [](CUgraph* out, unsigned) {
    *out = new_handle<CUgraph>();
    return CUDA_SUCCESS;
  };
  t.cuGraphDestroy = [](CUgraph graph) {
    const std::lock_guard lock(device().mutex);
    forget_bodies(graph);
    return CUDA_SUCCESS;
  };
  t.cuGraphConditionalHandleCreate = [](CUgraphConditionalHandle* out, CUgraph, CUcontext, unsigned, unsigned) {
    *out = reinterpret_cast<uint64_t>(new_handle<CUgraph>());
    return CUDA_SUCCESS;
  };
  // Of conditional nodes alone something has to be there: their bodies. None is ever launched.
  t.cuGraphAddNode_v2 = [](CUgraphNode* out, CUgraph graph, const CUgraphNode*, const CUgraphEdgeData*, size_t,
                           CUgraphNodeParams* params) {
    if (params->type != CU_GRAPH_NODE_TYPE_CONDITIONAL) return CUDA_ERROR_NOT_SUPPORTED;
    *out = new_handle<CUgraphNode>();
    const std::lock_guard lock(device().mutex);
    std::vector<CUgraph>& bodies = device().bodies[graph].emplace_back();
    for (unsigned i = 0; i < params->conditional.size; ++i) bodies.push_back(new_handle<CUgraph>());
    params->conditional.phGraph_out = bodies.data();
    return CUDA_SUCCESS;
  };
  t.cuGraphAddEmptyNode = [](CUgraphNode* out, CUgraph, const CUgraphNode*, size_t) {
    *out = new_handle<CUgraphNode>();
    return CUDA_SUCCESS;
  };
  t.cuStreamBeginCaptureToGraph = [](CUstream, CUgraph, const CUgraphNode*, const CUgraphEdgeData*, size_t,
                                     CUstreamCaptureMode) { return CUDA_SUCCESS; };
  t.cuStreamGetCaptureInfo_v3 = [](CUstream, CUstreamCaptureStatus* status, cuuint64_t*, CUgraph*,
                                   const CUgraphNode** nodes, const CUgraphEdgeData**, size_t* count) {
    static thread_local CUgraphNode node;
    node = new_handle<CUgraphNode>();
    *status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    *nodes = &node;
    *count = 1;
    return CUDA_SUCCESS;
  };
  t.cuStreamEndCapture = [](CUstream, CUgraph*) { return CUDA_SUCCESS; };
  t.cuGraphInstantiateWithFlags = [](CUgraphExec* out, CUgraph, unsigned long long) {
    *out = new_handle<CUgraphExec>();
    return CUDA_SUCCESS;
  };
  t.cuGraphExecUpdate_v2 = [](CUgraphExec, CUgraph, CUgraphExecUpdateResultInfo*) { return CUDA_SUCCESS; };
  t.cuGraphUpload = [](CUgraphExec, CUstream) { return CUDA_SUCCESS; };
  t.cuGraphLaunch = [](CUgraphExec, CUstream) { return CUDA_SUCCESS; };
  t.cuGraphExecDestroy = [](CUgraphExec) { return CUDA_SUCCESS; };
  t.cuLaunchKernelEx = [](const CUlaunchConfig* config, CUfunction f, void**, void** extra) {
    if (extra && packed_bytes(extra) < function(f).kernel->parameter_bytes) return CUDA_ERROR_INVALID_VALUE;
    return check_fit(*config);
  };
}

// --- the device ----------------------------------------------------------------------------------------------------

NullDevice::NullDevice(std::span<const int> ordinals, uint64_t memory_bytes) {
  for (const int ordinal : ordinals) descriptions.push_back(describe_null(ordinal, memory_bytes));
  if (descriptions.empty() || descriptions.size() > journal::kMaxDevices)
    throw std::runtime_error("a server drives between 1 and " + std::to_string(journal::kMaxDevices) +
                             " null devices, not " + std::to_string(descriptions.size()));
  for (const journal::DeviceDescription& description : descriptions) limits.emplace_back(description.total_bytes);
  NullDevice* none = nullptr;
  if (!g_opened.compare_exchange_strong(none, this))
    throw std::runtime_error("this process has opened the null device already; close it first");
  add_device_functions(table_);
  add_memory_functions(table_);
  add_copy_functions(table_);
  add_stream_functions(table_);
  add_module_functions(table_);
  add_linker_functions(table_);
  add_tensor_map_functions(table_);
}

NullDevice::~NullDevice() {
  for (const auto& [address, bytes] : reservations) munmap(reinterpret_cast<void*>(address), bytes);
  mappings.clear();  // what they hold counts itself out of this device
  memory.clear();
  g_opened = nullptr;
}

// Content never changes: nothing is ever written.
bool NullDevice::hash(std::span<const Chunk> chunks, std::span<uint64_t> hashes, Where) {
  if (hashes.size() < chunks.size()) return false;
  for (size_t i = 0; i < chunks.size(); ++i) hashes[i] = hash_of_length(chunks[i].bytes);
  return true;
}

CUresult NullDevice::load_image(CUmodule* out, std::span<const std::byte> image) {
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  auto module = std::make_unique<Module>();
  Result<Image> read = read_any(image);
  if (!read) {
    std::fprintf(stderr, "xmig: null device: a module image is refused: %s\n", read.why().c_str());
    return result_of(read.error());
  }
  module->image = *std::move(read);
  for (const ImageKernel& kernel : module->image.kernels)
    module->functions.push_back(std::make_unique<Function>(&kernel));
  *out = reinterpret_cast<CUmodule>(module.get());
  const std::lock_guard lock(mutex);
  modules[*out] = std::move(module);
  return CUDA_SUCCESS;
}

std::vector<Global> NullDevice::globals(CUmodule module) {
  const std::lock_guard lock(mutex);
  std::vector<Global> out;
  if (const auto found = modules.find(module); found != modules.end())
    for (const ImageGlobal& g : found->second->image.globals) out.push_back({g.name, g.bytes, 0});
  return out;
}

}  // namespace

std::unique_ptr<Device> open_null(std::span<const int> ordinals, uint64_t memory_bytes) {
  return std::make_unique<NullDevice>(ordinals, memory_bytes);
}

}  // namespace xmig::device
