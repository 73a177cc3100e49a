// Modules, functions and launches.
#include <algorithm>
#include <cstring>

#include "device/cpu/api.h"
#include "device/cpu/driver.h"
#include "device/cpu/events.h"

namespace xmig::device::cpu {
namespace {

constexpr int kMaxSharedPerBlock = 232448;
constexpr uint64_t kMaxImage = 2ull << 30;

// An image whose length nobody gave: what it says itself, as far as there is memory.
CUresult load_data(CUmodule* module, const void* image) {
  if (!module || !image) return CUDA_ERROR_INVALID_VALUE;
  return in_context([&](CpuDevice& device, Context& context, Lock&) -> CUresult {
    std::byte head[64];
    Trap trap;
    // Step by step: an image of another kind may end before an ELF header would.
    size_t known = 4;
    if (!guarded(trap, [&] { std::memcpy(head, image, 4); })) return CUDA_ERROR_INVALID_VALUE;
    if (std::memcmp(head, "\177ELF", 4) == 0) {
      known = sizeof(head);
      if (!guarded(trap, [&] { std::memcpy(head, image, sizeof(head)); })) return CUDA_ERROR_INVALID_IMAGE;
    }
    const size_t bytes = image_extent({head, known});
    if (bytes > kMaxImage) return CUDA_ERROR_INVALID_IMAGE;
    if (bytes == 0) return device.load(context, {head, known}, module);
    const std::unique_ptr<std::byte[]> copy(new std::byte[bytes]);
    if (!guarded(trap, [&] { std::memcpy(copy.get(), image, bytes); })) return CUDA_ERROR_INVALID_IMAGE;
    return device.load(context, {copy.get(), bytes}, module);
  });
}

// body(CpuDevice&, LoadedModule&)
template <typename Body>
CUresult of_module(CUmodule handle, Body&& body) {
  return api([&](CpuDevice& device, Lock&) -> CUresult {
    LoadedModule* module = device.modules.find(number(handle));
    if (!module) return CUDA_ERROR_INVALID_HANDLE;
    if (const CUresult error = module->context->error(); error != CUDA_SUCCESS) return error;
    return body(device, *module);
  });
}

// Work that is enqueued keeps the code until it is done.
CUresult unload(CUmodule handle) {
  return of_module(handle, [&](CpuDevice& device, LoadedModule& module) {
    for (const uint64_t function : module.functions) device.functions.remove(function);
    device.modules.remove(number(handle));
    return CUDA_SUCCESS;
  });
}

CUresult function_count(unsigned* count, CUmodule handle) {
  if (!count) return CUDA_ERROR_INVALID_VALUE;
  return of_module(handle, [&](CpuDevice&, LoadedModule& module) {
    *count = static_cast<unsigned>(module.functions.size());
    return CUDA_SUCCESS;
  });
}

CUresult enumerate(CUfunction* functions, unsigned room, CUmodule handle) {
  if (!functions) return CUDA_ERROR_INVALID_VALUE;
  return of_module(handle, [&](CpuDevice&, LoadedModule& module) {
    for (size_t i = 0; i < module.functions.size() && i < room; ++i)
      functions[i] = as_handle<CUfunction>(module.functions[i]);
    return CUDA_SUCCESS;
  });
}

CUresult get_global(CUdeviceptr* address, size_t* bytes, CUmodule handle, const char* name) {
  if (!name) return CUDA_ERROR_INVALID_VALUE;
  return of_module(handle, [&](CpuDevice&, LoadedModule& module) {
    for (const GlobalVariable& g : module.module->globals()) {
      if (g.global.name != name) continue;
      if (address) *address = g.address;
      if (bytes) *bytes = g.global.bytes;
      return CUDA_SUCCESS;
    }
    return CUDA_ERROR_NOT_FOUND;
  });
}

// body(CpuDevice&, LoadedFunction&)
template <typename Body>
CUresult of_function(CUfunction handle, Body&& body) {
  return api([&](CpuDevice& device, Lock&) -> CUresult {
    LoadedFunction* function = device.functions.find(number(handle));
    if (!function) return CUDA_ERROR_INVALID_HANDLE;
    if (const CUresult error = function->context->error(); error != CUDA_SUCCESS) return error;
    return body(device, *function);
  });
}

CUresult function_name(const char** name, CUfunction handle) {
  if (!name) return CUDA_ERROR_INVALID_VALUE;
  return of_function(handle, [&](CpuDevice&, LoadedFunction& f) {
    *name = f.function->kernel.name.c_str();
    return CUDA_SUCCESS;
  });
}

CUresult parameter_info(CUfunction handle, size_t index, size_t* offset, size_t* bytes) {
  if (!offset) return CUDA_ERROR_INVALID_VALUE;
  return of_function(handle, [&](CpuDevice&, LoadedFunction& f) {
    const auto& parameters = f.function->kernel.parameters;
    if (index >= parameters.size()) return CUDA_ERROR_INVALID_VALUE;
    *offset = parameters[index].offset;
    if (bytes) *bytes = parameters[index].size;
    return CUDA_SUCCESS;
  });
}

CUresult get_attribute(int* value, CUfunction_attribute attribute, CUfunction handle) {
  if (!value) return CUDA_ERROR_INVALID_VALUE;
  return of_function(handle, [&](CpuDevice&, LoadedFunction& f) {
    switch (attribute) {
      case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        *value = static_cast<int>(f.function->kernel.max_threads);
        break;
      case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
        *value = static_cast<int>(f.function->kernel.static_shared_bytes);
        break;
      case CU_FUNC_ATTRIBUTE_NUM_REGS:
        *value = 32;
        break;
      case CU_FUNC_ATTRIBUTE_PTX_VERSION:
      case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
        *value = 90;
        break;
      case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        *value = f.function->max_dynamic_shared;
        break;
      case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
        *value = f.function->carveout;
        break;
      default:
        if (attribute < 0 || attribute >= CU_FUNC_ATTRIBUTE_MAX) return CUDA_ERROR_INVALID_VALUE;
        *value = 0;
    }
    return CUDA_SUCCESS;
  });
}

CUresult set_attribute(CUfunction handle, CUfunction_attribute attribute, int value) {
  return of_function(handle, [&](CpuDevice&, LoadedFunction& f) {
    switch (attribute) {
      case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        if (value < 0 || value > kMaxSharedPerBlock - static_cast<int>(f.function->kernel.static_shared_bytes))
          return CUDA_ERROR_INVALID_VALUE;
        f.function->max_dynamic_shared = value;
        return CUDA_SUCCESS;
      case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
        if (value < -1 || value > 100) return CUDA_ERROR_INVALID_VALUE;
        f.function->carveout = value;
        return CUDA_SUCCESS;
      case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
      case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
        return CUDA_SUCCESS;  // there are no clusters for it to say anything about
      default:
        return CUDA_ERROR_INVALID_VALUE;
    }
  });
}

CUresult max_active_blocks(int* blocks, CUfunction handle, int threads, size_t dynamic_shared, unsigned flags) {
  if (!blocks || threads <= 0 || (flags & ~CU_OCCUPANCY_DISABLE_CACHING_OVERRIDE)) return CUDA_ERROR_INVALID_VALUE;
  return of_function(handle, [&](CpuDevice& device, LoadedFunction& f) {
    const int* const limits = device.ordinals[f.context->ordinal()].description.attributes;
    const uint64_t shared = f.function->kernel.static_shared_bytes + dynamic_shared +
                            limits[CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK];
    if (static_cast<uint32_t>(threads) > f.function->kernel.max_threads || shared > kMaxSharedPerBlock + 1024) {
      *blocks = 0;
      return CUDA_SUCCESS;
    }
    const int warps = (threads + 31) / 32;
    *blocks = std::min<int>({limits[CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR],
                        limits[CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR] / (warps * 32),
                        static_cast<int>(limits[CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR] / shared)});
    return CUDA_SUCCESS;
  });
}

// --- launches -------------------------------------------------------------------------------------------------

CUresult check_shape(const CUlaunchConfig& c, const Function& f) {
  if (c.gridDimX == 0 || c.gridDimY == 0 || c.gridDimZ == 0 || c.blockDimX == 0 || c.blockDimY == 0 || c.blockDimZ == 0)
    return CUDA_ERROR_INVALID_VALUE;
  if (c.gridDimX > 2147483647u || c.gridDimY > 65535 || c.gridDimZ > 65535 || c.blockDimX > 1024 ||
      c.blockDimY > 1024 || c.blockDimZ > 64)
    return CUDA_ERROR_INVALID_VALUE;
  const uint64_t threads = uint64_t{c.blockDimX} * c.blockDimY * c.blockDimZ;
  if (threads > XMIG_MAX_THREADS) return CUDA_ERROR_INVALID_VALUE;
  if (threads > f.kernel.max_threads) return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
  return c.sharedMemBytes > static_cast<unsigned>(f.max_dynamic_shared) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

// Blocks run one after another: none can wait for another, so cooperative grids and clusters are refused. What only
// says how fast or in which order is accepted. `events`: to record when the kernel is done.
CUresult check_attributes(CpuDevice& device, const CUlaunchConfig& config, std::vector<Event*>& events) {
  if (config.numAttrs != 0 && !config.attrs) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const CUlaunchAttributeValue& value = config.attrs[i].value;
    switch (config.attrs[i].id) {
      case CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
        if (value.cooperative) return CUDA_ERROR_NOT_SUPPORTED;
        break;
      case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
      case CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION:
        if (value.clusterDim.x > 1 || value.clusterDim.y > 1 || value.clusterDim.z > 1)
          return CUDA_ERROR_INVALID_CLUSTER_SIZE;
        break;
      case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT:
      case CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT: {
        const CUevent handle = config.attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT
                                   ? value.programmaticEvent.event
                                   : value.launchCompletionEvent.event;
        Event* event = device.events.find(number(handle));
        if (!event) return CUDA_ERROR_INVALID_HANDLE;
        events.push_back(event);
        break;
      }
      case CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE:
        return CUDA_ERROR_NOT_SUPPORTED;
      case CU_LAUNCH_ATTRIBUTE_IGNORE:
      case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:
      case CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY:
      case CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
      case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
      case CU_LAUNCH_ATTRIBUTE_PRIORITY:
      case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
      case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
      case CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
        break;
      default:
        if (config.attrs[i].id < 0 || config.attrs[i].id >= CU_LAUNCH_ATTRIBUTE_MAX) return CUDA_ERROR_INVALID_VALUE;
        break;  // hints of newer versions
    }
  }
  return CUDA_SUCCESS;
}

CUresult pack(const ImageKernel& kernel, void** parameters, void** extra, std::vector<std::byte>& out) {
  if (parameters && extra) return CUDA_ERROR_INVALID_VALUE;
  out.resize(kernel.parameter_bytes);
  if (kernel.parameter_bytes == 0) return CUDA_SUCCESS;
  if (parameters) {
    for (size_t i = 0; i < kernel.parameters.size(); ++i) {
      if (!parameters[i]) return CUDA_ERROR_INVALID_VALUE;
      std::memcpy(out.data() + kernel.parameters[i].offset, parameters[i], kernel.parameters[i].size);
    }
    return CUDA_SUCCESS;
  }
  const void* buffer = nullptr;
  size_t bytes = 0;
  for (size_t i = 0; extra && extra[i] != CU_LAUNCH_PARAM_END; i += 2) {
    if (extra[i] == CU_LAUNCH_PARAM_BUFFER_POINTER) {
      buffer = extra[i + 1];
    } else if (extra[i] == CU_LAUNCH_PARAM_BUFFER_SIZE && extra[i + 1]) {
      std::memcpy(&bytes, extra[i + 1], sizeof(bytes));
    } else {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  if (!buffer || bytes < kernel.parameter_bytes) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(out.data(), buffer, kernel.parameter_bytes);
  return CUDA_SUCCESS;
}

// A kernel runs on the processor, which reaches everything. Of the memory that it is given pointers to, a GPU would reach only
// what is mapped for it; a pointer that the kernel finds in memory is not seen here.
uint64_t forbidden(const CpuDevice& device, int ordinal, const std::vector<std::byte>& parameters) {
  if (device.ordinals.size() == 1) return 0;
  for (size_t at = 0; at + sizeof(uint64_t) <= parameters.size(); at += sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, parameters.data() + at, sizeof(word));
    if (!device.memory.accessible(ordinal, word, 1, false)) return word;
  }
  return 0;
}

CUresult launch(const CUlaunchConfig* config, CUfunction handle, void** parameters, void** extra) {
  if (!config) return CUDA_ERROR_INVALID_VALUE;
  return on_stream(config->hStream, [&](CpuDevice& device, Stream& stream, Lock&) -> CUresult {
    LoadedFunction* f = device.functions.find(number(handle));
    if (!f) return CUDA_ERROR_INVALID_HANDLE;
    if (f->context.get() != &stream.context()) return CUDA_ERROR_INVALID_CONTEXT;
    std::vector<Event*> events;
    CUresult result = check_shape(*config, *f->function);
    if (result == CUDA_SUCCESS) result = check_attributes(device, *config, events);
    KernelWork work{f->module,
                    f->function,
                    {config->gridDimX, config->gridDimY, config->gridDimZ},
                    {config->blockDimX, config->blockDimY, config->blockDimZ},
                    config->sharedMemBytes,
                    {},
                    0};
    if (result == CUDA_SUCCESS) result = pack(f->function->kernel, parameters, extra, work.parameters);
    if (result == CUDA_SUCCESS) work.forbidden = forbidden(device, f->context->ordinal(), work.parameters);
    if (result == CUDA_SUCCESS) result = enqueue(stream, std::move(work));
    for (size_t i = 0; i < events.size() && result == CUDA_SUCCESS; ++i) result = record_event(*events[i], stream);
    return result;
  });
}

}  // namespace

CUresult CpuDevice::load_image(CUmodule* module, std::span<const std::byte> image) {
  if (!module || image.empty()) return CUDA_ERROR_INVALID_VALUE;
  return in_context([&](CpuDevice& device, Context& context, Lock&) { return device.load(context, image, module); });
}

void add_module_functions(DriverTable& table) {
  table.cuModuleLoadData = load_data;
  table.cuModuleUnload = unload;
  table.cuModuleGetFunctionCount = function_count;
  table.cuModuleEnumerateFunctions = enumerate;
  table.cuModuleGetGlobal_v2 = get_global;
  table.cuFuncLoad = [](CUfunction) { return CUDA_SUCCESS; };
  table.cuFuncGetName = function_name;
  table.cuFuncGetParamInfo = parameter_info;
  table.cuFuncGetAttribute = get_attribute;
  table.cuFuncSetAttribute = set_attribute;
  table.cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags = max_active_blocks;
  // A cpu device has no clusters, as its attributes say.
  table.cuOccupancyMaxActiveClusters = [](int*, CUfunction, const CUlaunchConfig*) { return CUDA_ERROR_NOT_SUPPORTED; };
  table.cuOccupancyMaxPotentialClusterSize = table.cuOccupancyMaxActiveClusters;
  // Its images are shared objects, which the dynamic linker links.
  table.cuLinkCreate_v2 = [](unsigned, CUjit_option*, void**, CUlinkState*) { return CUDA_ERROR_NOT_SUPPORTED; };
  table.cuLinkAddData_v2 = [](CUlinkState, CUjitInputType, void*, size_t, const char*, unsigned, CUjit_option*,
                              void**) { return CUDA_ERROR_NOT_SUPPORTED; };
  table.cuLinkComplete = [](CUlinkState, void**, size_t*) { return CUDA_ERROR_NOT_SUPPORTED; };
  table.cuLinkDestroy = [](CUlinkState) { return CUDA_ERROR_NOT_SUPPORTED; };
  // There is no hardware that would read a tensor map.
  table.cuTensorMapEncodeTiled = [](CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                    const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                    CUtensorMapSwizzle, CUtensorMapL2promotion,
                                    CUtensorMapFloatOOBfill) { return CUDA_ERROR_NOT_SUPPORTED; };
  table.cuTensorMapEncodeIm2col = [](CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                     const cuuint64_t*, const int*, const int*, cuuint32_t, cuuint32_t,
                                     const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                     CUtensorMapL2promotion,
                                     CUtensorMapFloatOOBfill) { return CUDA_ERROR_NOT_SUPPORTED; };
  table.cuTensorMapEncodeIm2colWide = [](CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                         const cuuint64_t*, int, int, cuuint32_t, cuuint32_t, const cuuint32_t*,
                                         CUtensorMapInterleave, CUtensorMapIm2ColWideMode, CUtensorMapSwizzle,
                                         CUtensorMapL2promotion,
                                         CUtensorMapFloatOOBfill) { return CUDA_ERROR_NOT_SUPPORTED; };
  table.cuTensorMapReplaceAddress = [](CUtensorMap*, void*) { return CUDA_ERROR_NOT_SUPPORTED; };
  table.cuLaunchKernelEx = launch;
}

}  // namespace xmig::device::cpu
