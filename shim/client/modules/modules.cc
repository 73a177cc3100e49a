#include "client/modules/modules.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "client/bootstrap/message.h"
#include "client/journal/append.h"
#include "client/journal/handles.h"
#include "client/journal/ring_writer.h"
#include "client/memory/memory.h"
#include "client/modules/image.h"
#include "client/modules/launch_checks.h"
#include "client/modules/occupancy.h"
#include "local.h"
#include "records.h"

namespace xmig::client {
namespace {

using journal::Kind;

constexpr size_t kDescriptionPiece = 64 << 10;
constexpr size_t kMaxDescription = 64 << 20;

struct Slot {
  std::atomic<bool> alive{false};
  std::atomic<Module*> module{nullptr};
};
constinit Table<Slot, number_limit(Kind::kModule)> modules;

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}
  template <typename T>
  bool read(T& value) {
    if (bytes_.size() - at_ < sizeof(T)) return false;
    std::memcpy(&value, bytes_.data() + at_, sizeof(T));
    at_ += sizeof(T);
    return true;
  }
  bool read(std::string& text, uint32_t length) {
    if (bytes_.size() - at_ < length) return false;
    text.assign(reinterpret_cast<const char*>(bytes_.data() + at_), length);
    at_ += length;
    return true;
  }
  void pad() { at_ = std::min<size_t>(journal::align8(at_), bytes_.size()); }

 private:
  std::span<const std::byte> bytes_;
  size_t at_ = 0;
};

bool parse_name(Reader& reader, std::string& name) {
  journal::KernelName info;
  if (!reader.read(info) || !reader.read(name, info.bytes)) return false;
  reader.pad();
  return true;
}

bool parse_global(Reader& reader, Global& global) {
  journal::GlobalInfo info;
  if (!reader.read(info) || !reader.read(global.name, info.name_bytes)) return false;
  global.address = info.address;
  global.bytes = info.bytes;
  reader.pad();
  return true;
}

// xmModuleLoad, and as many xmModuleInfo as the description is long.
CUresult load(uint64_t handle, uint64_t image, std::vector<std::byte>& description) {
  description.resize(kDescriptionPiece);
  const Args_xmModuleLoad args{.module = handle, .image = image};
  Pending pending = start(Op::xmModuleLoad, &args, sizeof(args), {}, description.size());
  size_t used = 0;
  if (const CUresult error = finish(pending, description.data(), description.size(), &used); error != CUDA_SUCCESS) {
    return error;
  }
  journal::ModuleInfo info{};
  if (used < sizeof(info)) return CUDA_ERROR_INVALID_IMAGE;
  std::memcpy(&info, description.data(), sizeof(info));
  if (info.bytes < sizeof(info) || info.bytes > kMaxDescription) return CUDA_ERROR_INVALID_IMAGE;
  description.resize(info.bytes);
  for (size_t at = std::min<size_t>(used, info.bytes); at < info.bytes; at += used) {
    const Args_xmModuleInfo rest{.module = handle, .offset = at};
    const size_t piece = std::min(kDescriptionPiece, info.bytes - at);
    Pending next = start(Op::xmModuleInfo, &rest, sizeof(rest), {}, piece);
    if (const CUresult error = finish(next, description.data() + at, piece, &used); error != CUDA_SUCCESS) return error;
    if (used == 0) return CUDA_ERROR_INVALID_IMAGE;
  }
  return CUDA_SUCCESS;
}

// A kernel may use a variable before the program asks for its address: all of them are placed at once.
CUresult place_globals(Module& module) {
  for (uint32_t i = 0; i < module.globals.size(); ++i) {
    Global& global = module.globals[i];
    if (global.address != 0 || global.bytes == 0) continue;
    if (const CUresult error = allocate_global(global.bytes, &global.address); error != CUDA_SUCCESS) return error;
    global.ours = true;
    const Args_xmBindGlobal args{.module = module.handle, .index = i, .address = global.address};
    if (const CUresult error = append(Op::xmBindGlobal, &args, sizeof(args)); error != CUDA_SUCCESS) return error;
  }
  return CUDA_SUCCESS;
}

void forget(Module* module) {
  for (const Function& function : module->functions) {  // the numbers will be used again
    forget_occupancy(function);
    forget_launches(function);
  }
  Slot& slot = modules.place(journal::handle_index(module->handle));
  slot.alive.store(false, std::memory_order_release);
  slot.module.store(nullptr, std::memory_order_release);
  free_handle(module->handle);
  delete module;
}

}  // namespace

bool parse_description(std::span<const std::byte> description, Module& module) {
  Reader reader(description);
  journal::ModuleInfo info;
  if (!reader.read(info) || info.kernel_count > kMaxKernels) return false;
  module.functions = std::vector<Function>(info.kernel_count);
  for (uint32_t i = 0; i < info.kernel_count; ++i) {
    Function& function = module.functions[i];
    if (!parse_name(reader, function.name)) return false;
    function.module = &module;
    function.handle = journal::make_handle(Kind::kFunction, (journal::handle_index(module.handle) << kKernelBits) | i);
    module.by_name.emplace(function.name, i);
  }
  for (uint32_t i = 0; i < info.global_count; ++i) {
    if (!parse_global(reader, module.globals.emplace_back())) return false;
  }
  return true;
}

bool parse_description(std::span<const std::byte> description, Function& function, uint64_t* variable_bytes) {
  Reader reader(description);
  journal::KernelInfo info;
  if (!reader.read(info) || info.parameter_bytes > journal::kMaxPayload) return false;
  if (info.parameter_count > journal::kMaxParameters) return false;
  std::vector<journal::ParameterInfo> parameters(info.parameter_count);
  for (journal::ParameterInfo& parameter : parameters) {
    if (!reader.read(parameter) || parameter.offset > info.parameter_bytes ||
        parameter.size > info.parameter_bytes - parameter.offset) {
      return false;
    }
  }
  function.parameter_bytes = info.parameter_bytes;
  function.parameters = std::move(parameters);
  for (uint32_t i = 0; i < journal::kFunctionAttributes; ++i) function.attributes[i] = info.attributes[i];
  if (variable_bytes) *variable_bytes = info.variable_bytes;
  return true;
}

CUresult load_module(std::span<const std::byte> image, uint64_t library, Module** loaded) {
  Thread& thread = this_thread();
  if (const CUresult error = enter(thread); error != CUDA_SUCCESS) return error;
  const Current now = current(thread);
  if (now.error != CUDA_SUCCESS) return now.error;
  const uint64_t handle = create_handle(Kind::kModule);
  if (!handle) return CUDA_ERROR_OUT_OF_MEMORY;
  std::vector<std::byte> description;
  CUresult result;
  bool as_file = true;
  do {
    uint64_t number = 0;
    const bool tried_file = as_file;
    result = send_image(image, &number, &as_file);
    if (result == CUDA_SUCCESS) result = load(handle, number, description);
    // The server may not see the file as we do (a container's, a deleted one): then the bytes have to travel.
    if (result == CUDA_SUCCESS || !tried_file || !as_file) break;
    as_file = false;
  } while (true);
  if (result != CUDA_SUCCESS) {
    complain("a module of %zu bytes cannot be loaded: CUDA error %d", image.size(), result);
    free_handle(handle);
    return result;
  }
  auto module = std::make_unique<Module>();
  module->handle = handle;
  module->context = now.context;
  module->library = library;
  if (!parse_description(description, *module)) {
    say("the server's description of a module makes no sense: shim and server are of different versions");
    record::cuModuleUnload(reinterpret_cast<CUmodule>(handle));
    free_handle(handle);
    return CUDA_ERROR_INVALID_IMAGE;
  }
  Slot& slot = modules.place(journal::handle_index(handle));
  slot.module.store(module.get(), std::memory_order_release);
  slot.alive.store(true, std::memory_order_release);
  *loaded = module.release();
  if (const CUresult error = place_globals(**loaded); error != CUDA_SUCCESS) {
    unload_module(*loaded);
    return error;
  }
  return CUDA_SUCCESS;
}

void unload_module(Module* module) {
  record::cuModuleUnload(reinterpret_cast<CUmodule>(module->handle));
  for (const Global& global : module->globals) {
    if (global.ours) free_global(global.address);
  }
  if (module->variables) free_global(module->variables);
  forget(module);
}

Module* find_module(uint64_t handle) {
  const Slot* const slot = modules.find(handle, Kind::kModule);
  return slot ? slot->module.load(std::memory_order_acquire) : nullptr;
}

namespace {

Module* module_of(uint64_t function) {
  return find_module(journal::make_handle(Kind::kModule, journal::handle_index(function) >> kKernelBits));
}

}  // namespace

Context* context_of(CUfunction handle) {
  const auto value = reinterpret_cast<uint64_t>(handle);
  const Module* const module = journal::handle_is(value, Kind::kFunction) ? module_of(value) : nullptr;
  return module ? module->context : nullptr;
}

FunctionHere find_function(CUfunction handle, Context& context) {
  const auto value = reinterpret_cast<uint64_t>(handle);
  if (!journal::handle_is(value, Kind::kFunction)) return kernel_function(value, context);
  Module* const module = module_of(value);
  if (!module || module->context != &context) return {nullptr, CUDA_ERROR_INVALID_HANDLE};
  return function_of(*module, journal::handle_index(value) & (kMaxKernels - 1));
}

namespace {

// Before any of the module's kernels can be launched. Without this memory they cannot be: what they leave in variables would be
// lost with a server, and nobody would know.
CUresult keep_variables(Module& module, uint64_t bytes) {
  if (bytes == 0 || module.variables != 0) return CUDA_SUCCESS;
  uint64_t address = 0;
  if (const CUresult error = allocate_global(bytes, &address); error != CUDA_SUCCESS) {
    complain("there is no device memory, %llu bytes, to keep the variables of a module in: CUDA error %d",
             static_cast<unsigned long long>(bytes), error);
    return error;
  }
  const Args_xmVariables args{.module = module.handle, .address = address, .bytes = bytes};
  if (const CUresult error = append(Op::xmVariables, &args, sizeof(args)); error != CUDA_SUCCESS) {
    free_global(address);
    return error;
  }
  module.variables = address;
  return CUDA_SUCCESS;
}

CUresult describe(Function& function) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (function.described.load(std::memory_order_relaxed)) return CUDA_SUCCESS;
  const WithContext inside(*function.module->context);
  std::vector<std::byte> description(sizeof(journal::KernelInfo) +
                                     journal::kMaxParameters * sizeof(journal::ParameterInfo));
  const Args_xmKernel args{.function = function.handle};
  Pending pending = start(Op::xmKernel, &args, sizeof(args), {}, description.size());
  size_t used = 0;
  const CUresult result = finish(pending, description.data(), description.size(), &used);
  if (result != CUDA_SUCCESS) return result;
  uint64_t variable_bytes = 0;
  if (!parse_description(std::span(description).first(used), function, &variable_bytes)) return CUDA_ERROR_INVALID_IMAGE;
  if (const CUresult error = keep_variables(*function.module, variable_bytes); error != CUDA_SUCCESS) return error;
  function.described.store(true, std::memory_order_release);
  return CUDA_SUCCESS;
}

}  // namespace

FunctionHere function_of(Module& module, uint32_t number) {
  if (number >= module.functions.size()) [[unlikely]] return {nullptr, CUDA_ERROR_INVALID_HANDLE};
  Function& function = module.functions[number];
  if (!function.described.load(std::memory_order_acquire)) [[unlikely]] {
    if (const CUresult error = describe(function); error != CUDA_SUCCESS) return {nullptr, error};
  }
  return {&function};
}

void modules_context_reset(const Context& context) {
  libraries_context_reset(context);
  modules.for_each([&](uint32_t, Slot& slot) {
    Module* const module = slot.module.load();
    if (module && module->context == &context) forget(module);
  });
}

std::vector<std::byte> read_image_file(const char* path, size_t* length) {
  std::vector<std::byte> bytes;
  FILE* const file = std::fopen(path, "re");
  if (!file) return bytes;
  std::byte buffer[65536];
  while (const size_t got = std::fread(buffer, 1, sizeof(buffer), file)) {
    bytes.insert(bytes.end(), buffer, buffer + got);
  }
  const bool failed = std::ferror(file) != 0;
  std::fclose(file);
  if (failed) bytes.clear();
  if (length) *length = bytes.size();
  // Enough zeros for the first look at it, and the end of a text.
  if (!bytes.empty()) bytes.resize(bytes.size() + 64);
  return bytes;
}

// --- the driver's functions -------------------------------------------------------------------------------------

namespace {

CUresult load_data(CUmodule* module, const void* image, uint64_t limit) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  if (!module) return CUDA_ERROR_INVALID_VALUE;
  std::span<const std::byte> bytes;
  if (const CUresult error = measure_image(image, &bytes, limit); error != CUDA_SUCCESS) return error;
  Module* loaded = nullptr;
  if (const CUresult error = load_module(bytes, 0, &loaded); error != CUDA_SUCCESS) return error;
  *module = reinterpret_cast<CUmodule>(loaded->handle);
  return CUDA_SUCCESS;
}

}  // namespace

CUresult cuModuleLoadData(CUmodule* module, const void* image) { return load_data(module, image, ~uint64_t{0}); }

CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned int numOptions, CUjit_option* options,
                            void** optionValues) {
  return client::cuModuleLoadData(module, image);  // the options steer a compiler that runs elsewhere, if at all
}

CUresult cuModuleLoadFatBinary(CUmodule* module, const void* fatCubin) {
  return client::cuModuleLoadData(module, fatCubin);
}

CUresult cuModuleLoad(CUmodule* module, const char* fname) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  if (!module || !fname) return CUDA_ERROR_INVALID_VALUE;
  const std::vector<std::byte> bytes = read_image_file(fname);
  return bytes.empty() ? CUDA_ERROR_FILE_NOT_FOUND : load_data(module, bytes.data(), bytes.size());
}

CUresult cuModuleUnload(CUmodule hmod) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  Module* const module = find_module(reinterpret_cast<uint64_t>(hmod));
  if (!module || module->library) return CUDA_ERROR_INVALID_HANDLE;
  const WithContext inside(*module->context);
  unload_module(module);
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction* hfunc, CUmodule hmod, const char* name) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  if (!hfunc || !name) return CUDA_ERROR_INVALID_VALUE;
  const Module* const module = find_module(reinterpret_cast<uint64_t>(hmod));
  if (!module) return CUDA_ERROR_INVALID_HANDLE;
  const auto found = module->by_name.find(name);
  if (found == module->by_name.end()) return CUDA_ERROR_NOT_FOUND;
  *hfunc = reinterpret_cast<CUfunction>(module->functions[found->second].handle);
  return CUDA_SUCCESS;
}

namespace {

struct GlobalHere {
  uint64_t address = 0;
  uint64_t bytes = 0;
  CUresult error = CUDA_SUCCESS;
};

// One that came with the description, or one that the device has placed: the program gets a twin of it, at an address
// that a later server can keep.
GlobalHere find_global(Module& module, const char* name) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  for (const Global& global : module.globals) {
    if (global.name == name) return {global.address, global.bytes};
  }
  const WithContext inside(*module.context);
  GlobalHere found;
  const Args_xmGlobal args{.module = module.handle};
  const Slice text{name, std::strlen(name)};
  if (text.bytes > journal::kMaxPayload) return {.error = CUDA_ERROR_NOT_FOUND};
  journal::GlobalSize size{};
  Pending pending = start(Op::xmGlobal, &args, sizeof(args), {&text, 1}, sizeof(size));
  found.error = finish(pending, &size, sizeof(size));
  // One byte more: the address behind a variable's end is nobody else's.
  if (found.error == CUDA_SUCCESS) found.error = allocate_global(size.bytes + 1, &found.address);
  if (found.error != CUDA_SUCCESS) return found;
  found.bytes = size.bytes;
  const Args_xmTwin twin{.module = module.handle, .address = found.address};
  found.error = append(Op::xmTwin, &twin, sizeof(twin), {&text, 1});
  if (found.error == CUDA_SUCCESS) module.globals.push_back({name, found.bytes, found.address, true});
  return found;
}

}  // namespace

CUresult cuModuleGetGlobal_v2(CUdeviceptr* dptr, size_t* bytes, CUmodule hmod, const char* name) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  if (!name || (!dptr && !bytes)) return CUDA_ERROR_INVALID_VALUE;
  Module* const module = find_module(reinterpret_cast<uint64_t>(hmod));
  if (!module) return CUDA_ERROR_INVALID_HANDLE;
  const GlobalHere global = find_global(*module, name);
  if (global.error != CUDA_SUCCESS) return global.error;
  if (dptr) *dptr = global.address;
  if (bytes) *bytes = global.bytes;
  return CUDA_SUCCESS;
}

CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode* mode) {
  if (!mode) return CUDA_ERROR_INVALID_VALUE;
  *mode = CU_MODULE_LAZY_LOADING;  // what it makes libcudart do: load a library when its first kernel is requested
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunctionCount(unsigned int* count, CUmodule mod) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  if (!count) return CUDA_ERROR_INVALID_VALUE;
  const Module* const module = find_module(reinterpret_cast<uint64_t>(mod));
  if (!module) return CUDA_ERROR_INVALID_HANDLE;
  *count = static_cast<unsigned int>(module->functions.size());
  return CUDA_SUCCESS;
}

CUresult cuModuleEnumerateFunctions(CUfunction* functions, unsigned int numFunctions, CUmodule mod) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  const Module* const module = find_module(reinterpret_cast<uint64_t>(mod));
  if (!module) return CUDA_ERROR_INVALID_HANDLE;
  if (!functions || numFunctions == 0) return CUDA_ERROR_INVALID_VALUE;
  const size_t count = std::min<size_t>(numFunctions, module->functions.size());
  for (size_t i = 0; i < count; ++i) functions[i] = reinterpret_cast<CUfunction>(module->functions[i].handle);
  return CUDA_SUCCESS;
}

}  // namespace xmig::client
