// cuGetExportTable: the driver's unpublished tables of functions, as far as libcudart, cuBLAS, cuDNN and cuFFT call them.
//
// A table is an array of pointers whose first entry is its size in bytes (the context-local storage has none). Slots
// that no library was seen to call name themselves on standard error if one does.
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "client/context.h"
#include "client/integrity.h"
#include "client/process.h"
#include "client/thread.h"
#include "client/unsupported.h"
#include "local.h"

namespace xmig::client {
namespace {

// --- slots nobody was seen to call ------------------------------------------------------------------------------

template <size_t kLetters>
struct Text {
  char letters[kLetters];
  constexpr Text(const char (&text)[kLetters]) { std::copy_n(text, kLetters, letters); }
};

template <Text kTable, size_t kSlot>
CUresult unanswered() {
  static const std::string name = std::string("slot ") + std::to_string(kSlot) + " of the driver's table for " +
                                  kTable.letters;
  return unsupported(name.c_str());
}

template <size_t kSlots>
using Table = std::array<void*, kSlots>;

template <Text kTable, size_t kSlots>
Table<kSlots> make_table() {
  Table<kSlots> table{};
  [&]<size_t... kSlot>(std::index_sequence<kSlot...>) {
    ((table[kSlot] = reinterpret_cast<void*>(&unanswered<kTable, kSlot>)), ...);
  }(std::make_index_sequence<kSlots>());
  table[0] = reinterpret_cast<void*>(kSlots * sizeof(void*));
  return table;
}

template <typename F>
void* slot(F* function) {
  return reinterpret_cast<void*>(function);
}

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

const Table<13>& runtime_table() {
  static const Table<13>& table = *new Table<13>([] {
    auto made = make_table<"libcudart", 13>();
    made[1] = slot(load_wrapper);
    made[2] = slot(get_primary_context);
    made[6] = slot(load_wrapper_with_options);
    made[8] = slot(load_fat_binary);
    made[12] = slot(nothing);
    return made;
  }());
  return table;
}

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

const Table<7>& tools_hooks_table() {
  static const Table<7>& table = *new Table<7>([] {
    auto made = make_table<"tools hooks", 7>();
    made[2] = slot(no_hooks<1024>);
    made[6] = slot(no_hooks<14>);
    return made;
  }());
  return table;
}

// The thread's current context: cuBLASLt asks here, and hands it to context_number.
CUresult current_context(CUcontext* context) {
  if (!context) return CUDA_ERROR_INVALID_VALUE;
  return client::cuCtxGetCurrent(context);
}

const Table<4>& tools_thread_table() {
  static const Table<4>& table = *new Table<4>([] {
    auto made = make_table<"tools' thread data", 4>();
    made[2] = slot(current_context);
    return made;
  }());
  return table;
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

const Table<4>& storage_table() {
  static const Table<4> table{slot(storage_put), slot(storage_delete), slot(storage_get), nullptr};
  return table;
}

// --- checks of contexts -----------------------------------------------------------------------------------------

CUresult check_context(CUcontext, uint32_t* result, void**) {
  if (result) *result = 0;
  return CUDA_SUCCESS;
}

const Table<15>& context_checks_table() {
  static const Table<15>& table = *new Table<15>([] {
    auto made = make_table<"context checks", 15>();
    made[2] = slot(check_context);
    made[3] = slot(nothing);
    return made;
  }());
  return table;
}

// --- integrity --------------------------------------------------------------------------------------------------

const Table<3>& integrity_table();

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
      .runtime_table = reinterpret_cast<uint64_t>(runtime_table().data()),
      .integrity_table = reinterpret_cast<uint64_t>(integrity_table().data()),
      .integrity_function = reinterpret_cast<uint64_t>(integrity_table()[1]),
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

const Table<3>& integrity_table() {
  static const Table<3>& table = *new Table<3>([] {
    auto made = make_table<"integrity", 3>();
    made[1] = slot(check_integrity);
    return made;
  }());
  return table;
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

const Table<93>& cublas_table() {
  static const Table<93>& table = *new Table<93>([] {
    auto made = make_table<"cuBLAS", 93>();
    made[4] = slot(context_number);
    made[39] = slot(stream_number);
    made[51] = slot(own_stream);
    return made;
  }());
  return table;
}

const Table<17>& cublaslt_bf16_table() {
  static const Table<17>& table = *new Table<17>([] {
    auto made = make_table<"cuBLASLt bf16", 17>();
    made[4] = slot(zero_for_both);
    return made;
  }());
  return table;
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

const Table<99>& cufft_table() {
  static const Table<99>& table = *new Table<99>([] {
    auto made = make_table<"cuFFT", 99>();
    made[7] = slot(visit_functions);
    return made;
  }());
  return table;
}

// --- by name ----------------------------------------------------------------------------------------------------

struct Entry {
  uint8_t uuid[16];
  void* const* (*table)();
};

template <auto kTable>
void* const* data_of() {
  return kTable().data();
}

constexpr Entry kTables[] = {
    {{0x6b, 0xd5, 0xfb, 0x6c, 0x5b, 0xf4, 0xe7, 0x4a, 0x89, 0x87, 0xd9, 0x39, 0x12, 0xfd, 0x9d, 0xf9},
     data_of<runtime_table>},
    {{0xa0, 0x94, 0x79, 0x8c, 0x2e, 0x74, 0x2e, 0x74, 0x93, 0xf2, 0x08, 0x00, 0x20, 0x0c, 0x0a, 0x66},
     data_of<tools_hooks_table>},
    {{0x42, 0xd8, 0x5a, 0x81, 0x23, 0xf6, 0xcb, 0x47, 0x82, 0x98, 0xf6, 0xe7, 0x8a, 0x3a, 0xec, 0xdc},
     data_of<tools_thread_table>},
    {{0xc6, 0x93, 0x33, 0x6e, 0x11, 0x21, 0xdf, 0x11, 0xa8, 0xc3, 0x68, 0xf3, 0x55, 0xd8, 0x95, 0x93},
     data_of<storage_table>},
    {{0x26, 0x3e, 0x88, 0x60, 0x7c, 0xd2, 0x61, 0x43, 0x92, 0xf6, 0xbb, 0xd5, 0x00, 0x6d, 0xfa, 0x7e},
     data_of<context_checks_table>},
    {{0xd4, 0x08, 0x20, 0x55, 0xbd, 0xe6, 0x70, 0x4b, 0x8d, 0x34, 0xba, 0x12, 0x3c, 0x66, 0xe1, 0xf2},
     data_of<integrity_table>},
    {{0x21, 0x31, 0x8c, 0x60, 0x97, 0x14, 0x32, 0x48, 0x8c, 0xa6, 0x41, 0xff, 0x73, 0x24, 0xc8, 0xf2},
     data_of<cublas_table>},
    {{0x17, 0x34, 0xdc, 0x26, 0x80, 0x0d, 0x47, 0x45, 0x87, 0x26, 0xc0, 0xf1, 0xe7, 0xdd, 0x8b, 0xca},
     data_of<cublaslt_bf16_table>},
    {{0x6e, 0x16, 0x3f, 0xbe, 0xb9, 0x58, 0x44, 0x4d, 0x83, 0x5c, 0xe1, 0x82, 0xaf, 0xf1, 0x99, 0x1e},
     data_of<cufft_table>},
};

}  // namespace

CUresult cuGetExportTable(const void** ppExportTable, const CUuuid* pExportTableId) {
  if (!ppExportTable || !pExportTableId) return CUDA_ERROR_INVALID_VALUE;
  for (const Entry& entry : kTables) {
    if (std::memcmp(entry.uuid, pExportTableId->bytes, sizeof(entry.uuid)) != 0) continue;
    *ppExportTable = entry.table();
    return CUDA_SUCCESS;
  }
  *ppExportTable = nullptr;
  return CUDA_ERROR_NOT_FOUND;
}

}  // namespace xmig::client
