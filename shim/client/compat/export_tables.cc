// cuGetExportTable: the driver's unpublished tables of functions, as far as libcudart, cuBLAS, cuDNN, cuFFT, NVRTC
// and nvJitLink call them.
//
// A table is an array of pointers whose first entry is its size in bytes (the context-local storage has none). Which
// tables there are, and which function here answers which slot, stands in shim/api/table.py. Slots that no library was seen
// to call name themselves in the job's log if one does.
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "client/bootstrap/requested.h"
#include "client/bootstrap/process.h"
#include "client/bootstrap/unsupported.h"
#include "client/compat/compile_cache.h"
#include "client/compat/integrity.h"
#include "client/journal/context.h"
#include "client/journal/thread.h"
#include "local.h"

namespace xmig::client {
namespace {

// --- slots nobody was seen to call ------------------------------------------------------------------------------

extern const char* const kUnanswered[];  // the names of all of them, one after the other

template <size_t kNumber>
CUresult unanswered() {
  return unsupported(kUnanswered[kNumber]);
}

template <typename Function>
void* slot(Function* function) {
  return reinterpret_cast<void*>(function);
}
void* size_of_table(size_t slots) { return reinterpret_cast<void*>(slots * sizeof(void*)); }

void* const* find_table(std::string_view name);

// --- libcudart's own interface ----------------------------------------------------------------------------------

CUresult get_primary_context(CUcontext* context, CUdevice device) {
  if (const CUresult error = initialized(); error != CUDA_SUCCESS) return error;
  if (!context) return CUDA_ERROR_INVALID_VALUE;
  if (!description(device)) return CUDA_ERROR_INVALID_DEVICE;
  *context = primary_context(device).handle();
  return CUDA_SUCCESS;
}
CUresult load_wrapper(CUmodule* module, const void* wrapper) { return client::cuModuleLoadData(module, wrapper); }
CUresult load_wrapper_with_options(CUmodule* module, const void* wrapper, void*, void*, unsigned int) {
  return client::cuModuleLoadData(module, wrapper);
}
CUresult load_fat_binary(const void* header, CUmodule* module, void*, void*, unsigned int) {
  return client::cuModuleLoadData(module, header);
}
CUresult nothing() { return CUDA_SUCCESS; }

// --- tools ------------------------------------------------------------------------------------------------------

// Which calls a profiler wants to hear of: none.
template <size_t kCount>
CUresult no_hooks(void** hooks, size_t* count) {
  static uint32_t none[kCount];
  if (!hooks || !count) return CUDA_ERROR_INVALID_VALUE;
  *hooks = none;
  *count = kCount;
  return CUDA_SUCCESS;
}

// The thread's current context: cuBLASLt asks here, and hands it to context_number.
CUresult current_context(CUcontext* context) {
  if (!context) return CUDA_ERROR_INVALID_VALUE;
  return client::cuCtxGetCurrent(context);
}

// --- context-local storage --------------------------------------------------------------------------------------

Context* storage_context(CUcontext handle) { return handle ? find_context(handle) : this_thread().context; }

CUresult storage_put(CUcontext handle, void* key, void* value, ContextStorage::Destructor destructor) {
  if (const CUresult error = initialized(); error != CUDA_SUCCESS) return error;
  Context* const context = storage_context(handle);
  return context ? context->storage.put(key, value, destructor) : CUDA_ERROR_INVALID_CONTEXT;
}
CUresult storage_delete(CUcontext handle, void* key) {
  if (const CUresult error = initialized(); error != CUDA_SUCCESS) return error;
  Context* const context = storage_context(handle);
  return context ? context->storage.remove(key) : CUDA_ERROR_INVALID_CONTEXT;
}
CUresult storage_get(void** value, CUcontext handle, void* key) {
  if (const CUresult error = initialized(); error != CUDA_SUCCESS) return error;
  const Context* const context = storage_context(handle);
  if (!value) return CUDA_ERROR_INVALID_VALUE;
  return context ? context->storage.get(key, value) : CUDA_ERROR_INVALID_CONTEXT;
}

// --- checks of contexts -----------------------------------------------------------------------------------------

CUresult check_context(CUcontext, uint32_t* result, void**) {
  if (result) *result = 0;
  return CUDA_SUCCESS;
}

// --- integrity --------------------------------------------------------------------------------------------------

CUresult check_integrity(uint32_t version, uint64_t unix_seconds, uint64_t (*out)[2]) {
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  int driver_version = 0;
  client::cuDriverGetVersion(&driver_version);
  const Challenge challenge{
      .version = version,
      .unix_seconds = unix_seconds,
      .driver_version = static_cast<uint32_t>(driver_version),
      .pid = static_cast<uint32_t>(::getpid()),
      .thread = static_cast<uint32_t>(::pthread_self()),
      .runtime_table = reinterpret_cast<uint64_t>(find_table("libcudart")),
      .integrity_table = reinterpret_cast<uint64_t>(find_table("integrity")),
      .integrity_function = reinterpret_cast<uint64_t>(&check_integrity),
  };
  std::array<ChallengeDevice, journal::kMaxDevices> devices{};
  for (int i = 0; i < process.device_count; ++i) {
    client::cuDeviceGetUuid_v2(&devices[i].uuid, i);
    devices[i].domain = attribute(i, CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID);
    devices[i].bus = attribute(i, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID);
    devices[i].device = attribute(i, CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID);
  }
  answer_challenge(challenge, std::span(devices).first(static_cast<size_t>(process.device_count)), *out);
  return CUDA_SUCCESS;
}

// --- what cuBLAS and cuBLASLt ask for each matrix product ------------------------------------------------------

// A number that tells contexts apart, those that have ended too: cuBLASLt keeps what it knows of a device for each, cuFFT
// what it has loaded. The genuine driver's first context has 0.
CUresult context_number(CUcontext handle, uint64_t* out) {
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  unsigned long long id = 0;
  if (const CUresult error = client::cuCtxGetId(handle, &id); error != CUDA_SUCCESS) return error;
  *out = id - 1;
  return CUDA_SUCCESS;
}

// cuBLAS keeps a workspace for each stream. It asks for the driver's own name of the stream first: ours is the handle.
CUresult own_stream(CUcontext, CUstream stream, CUstream* out, int per_thread) {
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  if (!stream) stream = per_thread ? CU_STREAM_PER_THREAD : CU_STREAM_LEGACY;
  unsigned long long id = 0;
  if (const CUresult error = client::cuStreamGetId(stream, &id); error != CUDA_SUCCESS) return error;
  *out = stream;
  return CUDA_SUCCESS;
}
CUresult stream_number(CUcontext, CUstream stream, uint64_t* out) {
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  unsigned long long id = 0;
  if (const CUresult error = client::cuStreamGetId(stream, &id); error != CUDA_SUCCESS) return error;
  *out = id;
  return CUDA_SUCCESS;
}

CUresult zero_for_both(uint64_t* first, uint64_t* second) {
  if (first) *first = 0;
  if (second) *second = 0;
  return CUDA_SUCCESS;
}

// --- how cuFFT finds the kernel in a module it has just made ------------------------------------------------------

using Visit = void (*)(void* user, CUfunction function);

// Visits the module's functions; returns how many there are. cuFFT wants exactly one, whose name it does not know.
int visit_functions(CUcontext, CUmodule module, Visit visit, void* user) {
  unsigned int count = 0;
  if (!visit || client::cuModuleGetFunctionCount(&count, module) != CUDA_SUCCESS || count == 0) return 0;
  std::vector<CUfunction> functions(count);
  if (client::cuModuleEnumerateFunctions(functions.data(), count, module) != CUDA_SUCCESS) return 0;
  for (const CUfunction function : functions) visit(user, function);
  return static_cast<int>(count);
}

// --- what NVRTC and nvJitLink have compiled -----------------------------------------------------------------------

// The key that they pass around. Without one they compile, and keep nothing.
struct CompileKey {
  CompileCache cache;
  std::vector<std::byte> bytes;
};

// `kind`: PTX out of source, or a cubin out of PTX. `made`: when the compiler was built.
int make_compile_key(CompileKey** out, int kind, const void* data, uint32_t bytes, const char* options, const char* host,
                     const char* made, int architecture, int flag) {
  if (!out || !data || !options || !host || !made) return CUDA_ERROR_INVALID_VALUE;
  *out = nullptr;
  std::optional<CompileCache> cache = CompileCache::of_environment();
  if (!cache) return CUDA_ERROR_NOT_SUPPORTED;
  std::vector<std::byte> key;
  const auto add = [&key](const void* part, size_t size) {
    const auto* const first = static_cast<const std::byte*>(part);
    key.insert(key.end(), first, first + size);
  };
  for (const int number : {kind, architecture, flag}) add(&number, sizeof(number));
  for (const char* const text : {options, host, made}) add(text, std::strlen(text) + 1);
  add(data, bytes);
  *out = new CompileKey{*std::move(cache), std::move(key)};
  return CUDA_SUCCESS;
}
void free_compile_key(CompileKey* key) { delete key; }

int find_compiled(const CompileKey* key, void*, void** data, uint32_t* bytes) {
  if (!key || !data || !bytes) return CUDA_ERROR_INVALID_VALUE;
  const std::optional<std::vector<std::byte>> found = key->cache.find(key->bytes);
  if (!found) return CUDA_ERROR_NOT_FOUND;
  *data = std::malloc(std::max<size_t>(found->size(), 1));
  if (!*data) return CUDA_ERROR_OUT_OF_MEMORY;
  std::ranges::copy(*found, static_cast<std::byte*>(*data));
  *bytes = static_cast<uint32_t>(found->size());
  return CUDA_SUCCESS;
}
int add_compiled(const CompileKey* key, void*, const void* data, size_t bytes) {
  if (!key || !data) return CUDA_ERROR_INVALID_VALUE;
  return key->cache.add(key->bytes, {static_cast<const std::byte*>(data), bytes}) ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
}
void free_compiled(void* data) { std::free(data); }

// --- by name ----------------------------------------------------------------------------------------------------

struct Entry {
  uint8_t uuid[16];
  const char* name;
  void* const* (*table)();
};

#include "export_tables.h"

void* const* find_table(std::string_view name) {
  return std::find_if(std::begin(kTables), std::end(kTables), [&](const Entry& e) { return e.name == name; })->table();
}

}  // namespace

CUresult cuGetExportTable(const void** ppExportTable, const CUuuid* pExportTableId) {
  if (!ppExportTable || !pExportTableId) return CUDA_ERROR_INVALID_VALUE;
  for (const Entry& entry : kTables) {
    if (std::memcmp(entry.uuid, pExportTableId->bytes, sizeof(entry.uuid)) != 0) continue;
    *ppExportTable = entry.table();
    return CUDA_SUCCESS;
  }
  *ppExportTable = nullptr;
  note_missing_table(pExportTableId->bytes);
  return CUDA_ERROR_NOT_FOUND;
}

}  // namespace xmig::client
