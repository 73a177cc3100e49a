// Libraries and their kernels.
#include <algorithm>
#include <cstring>
#include <mutex>

#include "client/journal/append.h"
#include "client/journal/handles.h"
#include "client/journal/ring_writer.h"
#include "client/modules/image.h"
#include "client/modules/modules.h"
#include "local.h"

namespace xmig::client {
namespace {

using journal::Kind;

struct Setting {
  int ordinal;
  uint32_t kernel;
  CUfunction_attribute attribute;
  int value;
};

struct Library {
  std::atomic<bool> alive{false};
  std::mutex mutex;  // of loading, and of what follows
  std::span<const std::byte> image;
  std::vector<std::byte> copy;     // if the program may throw its own away
  std::vector<Setting> settings;   // for modules that are still to be loaded
  std::array<std::atomic<Module*>, kMaxContexts> modules{};  // by context
};
constinit Table<Library, number_limit(Kind::kLibrary)> libraries;

Library* find_library(CUlibrary handle) { return libraries.find(reinterpret_cast<uint64_t>(handle), Kind::kLibrary); }

uint64_t handle_of(CUkernel kernel) { return reinterpret_cast<uint64_t>(kernel); }
uint64_t library_of(uint64_t kernel) {
  return journal::make_handle(Kind::kLibrary, journal::handle_index(kernel) >> kKernelBits);
}

// The library's module in a context, loaded if it is not there yet.
CUresult module_in(Library& library, uint64_t handle, Context& context, Module** module) {
  *module = library.modules[context.index].load(std::memory_order_acquire);
  if (*module) return CUDA_SUCCESS;
  const std::lock_guard lock(library.mutex);
  *module = library.modules[context.index].load(std::memory_order_acquire);
  if (*module) return CUDA_SUCCESS;
  const WithContext inside(context);
  if (const CUresult error = load_module(library.image, handle, module); error != CUDA_SUCCESS) return error;
  for (const Setting& setting : library.settings) {
    if (setting.ordinal != context.ordinal) continue;
    const FunctionHere here = function_of(**module, setting.kernel);
    if (here.function) set_attribute(*here.function, setting.attribute, setting.value);
  }
  library.modules[context.index].store(*module, std::memory_order_release);
  return CUDA_SUCCESS;
}

// The library in the current context. A library can be used before there is one: then in the first device's.
CUresult module_here(CUlibrary handle, Module** module) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  Library* const library = find_library(handle);
  if (!library) return CUDA_ERROR_INVALID_HANDLE;
  Context* context = current(this_thread()).context;
  if (!context) {
    context = &primary_context(0);  // retained for the life of the process
    static std::once_flag once;
    std::call_once(once, [&] { retain(*context); });
  }
  return module_in(*library, reinterpret_cast<uint64_t>(handle), *context, module);
}

FunctionHere function_here(CUkernel kernel) {
  Module* module = nullptr;
  const auto library = reinterpret_cast<CUlibrary>(library_of(handle_of(kernel)));
  if (!journal::handle_is(handle_of(kernel), kKernelKind)) return {nullptr, CUDA_ERROR_INVALID_HANDLE};
  if (const CUresult error = module_here(library, &module); error != CUDA_SUCCESS) return {nullptr, error};
  return function_of(*module, journal::handle_index(handle_of(kernel)) & (kMaxKernels - 1));
}

// The function on a device: in the current context if it is on that device, in its primary context otherwise.
FunctionHere function_on(CUkernel kernel, CUdevice dev) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return {nullptr, error};
  if (!description(dev)) return {nullptr, CUDA_ERROR_INVALID_DEVICE};
  if (!journal::handle_is(handle_of(kernel), kKernelKind)) return {nullptr, CUDA_ERROR_INVALID_HANDLE};
  Context* const here = current(this_thread()).context;
  Context& context = here && here->ordinal == dev ? *here : primary_context(dev);
  // Nothing differs between devices before a context exists there.
  if (!context.alive.load()) return function_here(kernel);
  return kernel_function(handle_of(kernel), context);
}

}  // namespace

FunctionHere kernel_function(uint64_t kernel, Context& context) {
  if (!journal::handle_is(kernel, kKernelKind)) return {nullptr, CUDA_ERROR_INVALID_HANDLE};
  Library* const library = libraries.find(library_of(kernel), Kind::kLibrary);
  if (!library) return {nullptr, CUDA_ERROR_INVALID_HANDLE};
  Module* module = nullptr;
  if (const CUresult error = module_in(*library, library_of(kernel), context, &module); error != CUDA_SUCCESS) {
    return {nullptr, error};
  }
  return function_of(*module, journal::handle_index(kernel) & (kMaxKernels - 1));
}

void libraries_context_reset(const Context& context) {
  libraries.for_each([&](uint32_t, Library& library) {
    library.modules[context.index].store(nullptr, std::memory_order_release);
  });
}

namespace {

CUresult load_library(CUlibrary* library, std::span<const std::byte> image, bool preserved) {
  const uint64_t handle = create_handle(Kind::kLibrary);
  if (!handle) return CUDA_ERROR_OUT_OF_MEMORY;
  Library& made = libraries.place(journal::handle_index(handle));
  {
    const std::lock_guard lock(made.mutex);
    made.settings.clear();
    made.copy.clear();
    if (!preserved) made.copy.assign(image.begin(), image.end());
    made.image = preserved ? image : std::span<const std::byte>(made.copy);
    for (auto& module : made.modules) module.store(nullptr);
  }
  made.alive.store(true, std::memory_order_release);
  // At once if there is a context: an image that is no good is refused here, and not at its first kernel.
  if (Context* const context = current(this_thread()).context) {
    Module* module = nullptr;
    if (const CUresult error = module_in(made, handle, *context, &module); error != CUDA_SUCCESS) {
      made.alive.store(false);
      free_handle(handle);
      return error;
    }
  }
  *library = reinterpret_cast<CUlibrary>(handle);
  return CUDA_SUCCESS;
}

}  // namespace

CUresult cuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option* jitOptions, void** jitOptionsValues,
                           unsigned int numJitOptions, CUlibraryOption* libraryOptions, void** libraryOptionValues,
                           unsigned int numLibraryOptions) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  if (!library || (numLibraryOptions && !libraryOptions)) return CUDA_ERROR_INVALID_VALUE;
  std::span<const std::byte> image;
  if (const CUresult error = measure_image(code, &image); error != CUDA_SUCCESS) return error;
  bool preserved = false;
  for (unsigned int i = 0; i < numLibraryOptions; ++i) {
    preserved |= libraryOptions[i] == CU_LIBRARY_BINARY_IS_PRESERVED && libraryOptionValues && libraryOptionValues[i];
  }
  return load_library(library, image, preserved);
}

CUresult cuLibraryLoadFromFile(CUlibrary* library, const char* fileName, CUjit_option* jitOptions,
                               void** jitOptionsValues, unsigned int numJitOptions, CUlibraryOption* libraryOptions,
                               void** libraryOptionValues, unsigned int numLibraryOptions) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  if (!library || !fileName) return CUDA_ERROR_INVALID_VALUE;
  const std::vector<std::byte> bytes = read_image_file(fileName);
  if (bytes.empty()) return CUDA_ERROR_FILE_NOT_FOUND;
  std::span<const std::byte> image;
  if (const CUresult error = measure_image(bytes.data(), &image, bytes.size()); error != CUDA_SUCCESS) return error;
  return load_library(library, image, /*preserved=*/false);
}

CUresult cuLibraryUnload(CUlibrary library) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  Library* const found = find_library(library);
  if (!found || !found->alive.exchange(false)) return CUDA_ERROR_INVALID_HANDLE;
  const std::lock_guard lock(found->mutex);
  for (auto& slot : found->modules) {
    if (Module* const module = slot.exchange(nullptr)) {
      const WithContext inside(*module->context);
      unload_module(module);
    }
  }
  found->image = {};
  found->copy = {};
  free_handle(reinterpret_cast<uint64_t>(library));
  return CUDA_SUCCESS;
}

CUresult cuLibraryGetKernel(CUkernel* pKernel, CUlibrary library, const char* name) {
  if (!pKernel || !name) return CUDA_ERROR_INVALID_VALUE;
  Module* module = nullptr;
  if (const CUresult error = module_here(library, &module); error != CUDA_SUCCESS) return error;
  const auto found = module->by_name.find(name);
  if (found == module->by_name.end()) return CUDA_ERROR_NOT_FOUND;
  *pKernel = reinterpret_cast<CUkernel>(make_kernel(reinterpret_cast<uint64_t>(library), found->second));
  return CUDA_SUCCESS;
}

CUresult cuLibraryGetModule(CUmodule* pMod, CUlibrary library) {
  if (!pMod) return CUDA_ERROR_INVALID_VALUE;
  Module* module = nullptr;
  if (const CUresult error = module_here(library, &module); error != CUDA_SUCCESS) return error;
  *pMod = reinterpret_cast<CUmodule>(module->handle);
  return CUDA_SUCCESS;
}

CUresult cuLibraryGetGlobal(CUdeviceptr* dptr, size_t* bytes, CUlibrary library, const char* name) {
  CUmodule module = nullptr;
  if (const CUresult error = client::cuLibraryGetModule(&module, library); error != CUDA_SUCCESS) return error;
  return client::cuModuleGetGlobal_v2(dptr, bytes, module, name);
}

CUresult cuLibraryGetKernelCount(unsigned int* count, CUlibrary lib) {
  if (!count) return CUDA_ERROR_INVALID_VALUE;
  Module* module = nullptr;
  if (const CUresult error = module_here(lib, &module); error != CUDA_SUCCESS) return error;
  *count = static_cast<unsigned int>(module->functions.size());
  return CUDA_SUCCESS;
}

CUresult cuLibraryEnumerateKernels(CUkernel* kernels, unsigned int numKernels, CUlibrary lib) {
  if (!kernels || numKernels == 0) return CUDA_ERROR_INVALID_VALUE;
  Module* module = nullptr;
  if (const CUresult error = module_here(lib, &module); error != CUDA_SUCCESS) return error;
  // Measured: the driver has them in the opposite order of the module's functions.
  const auto all = static_cast<uint32_t>(module->functions.size());
  for (uint32_t i = 0; i < std::min(numKernels, all); ++i) {
    kernels[i] = reinterpret_cast<CUkernel>(make_kernel(reinterpret_cast<uint64_t>(lib), all - 1 - i));
  }
  return CUDA_SUCCESS;
}

CUresult cuKernelGetFunction(CUfunction* pFunc, CUkernel kernel) {
  if (!pFunc) return CUDA_ERROR_INVALID_VALUE;
  const FunctionHere here = function_here(kernel);
  if (here.function) *pFunc = reinterpret_cast<CUfunction>(here.function->handle);
  return here.error;
}

CUresult cuKernelGetName(const char** name, CUkernel hfunc) {
  if (!name) return CUDA_ERROR_INVALID_VALUE;
  const FunctionHere here = function_here(hfunc);
  if (here.function) *name = here.function->name.c_str();
  return here.error;
}

CUresult cuKernelGetLibrary(CUlibrary* pLib, CUkernel kernel) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  if (!pLib) return CUDA_ERROR_INVALID_VALUE;
  const auto library = reinterpret_cast<CUlibrary>(library_of(handle_of(kernel)));
  if (!journal::handle_is(handle_of(kernel), kKernelKind) || !find_library(library)) return CUDA_ERROR_INVALID_HANDLE;
  *pLib = library;
  return CUDA_SUCCESS;
}

CUresult cuKernelGetAttribute(int* pi, CUfunction_attribute attrib, CUkernel kernel, CUdevice dev) {
  const FunctionHere there = function_on(kernel, dev);
  return there.function ? get_attribute(*there.function, attrib, pi) : there.error;
}

CUresult cuKernelSetAttribute(CUfunction_attribute attrib, int val, CUkernel kernel, CUdevice dev) {
  const FunctionHere there = function_on(kernel, dev);
  if (!there.function) return there.error;
  {
    const WithContext inside(*there.function->module->context);
    if (const CUresult error = set_attribute(*there.function, attrib, val); error != CUDA_SUCCESS) return error;
  }
  Library& library = *libraries.find(library_of(handle_of(kernel)), Kind::kLibrary);
  const uint32_t number = journal::handle_index(handle_of(kernel)) & (kMaxKernels - 1);
  const std::lock_guard lock(library.mutex);
  std::erase_if(library.settings, [&](const Setting& setting) {
    return setting.ordinal == dev && setting.kernel == number && setting.attribute == attrib;
  });
  library.settings.push_back({dev, number, attrib, val});
  return CUDA_SUCCESS;
}

CUresult cuKernelSetCacheConfig(CUkernel kernel, CUfunc_cache config, CUdevice dev) {
  return function_on(kernel, dev).error;  // a preference; it has no effect on any result
}

CUresult cuKernelGetParamInfo(CUkernel kernel, size_t paramIndex, size_t* paramOffset, size_t* paramSize) {
  const FunctionHere here = function_here(kernel);
  return here.function ? parameter_info(*here.function, paramIndex, paramOffset, paramSize) : here.error;
}

}  // namespace xmig::client
