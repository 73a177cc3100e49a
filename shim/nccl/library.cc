#include "nccl/library.h"

#include <dlfcn.h>

#include <atomic>

namespace xmig::nccl {
namespace {

constexpr int kMostFunctions = 128;
constinit std::atomic<const NcclCalls*> found{nullptr};
constinit std::atomic<void*> functions[kMostFunctions]{};

}  // namespace

const NcclCalls* calls() {
  if (const NcclCalls* const known = found.load(std::memory_order_acquire)) [[likely]] return known;
  void* symbol = ::dlsym(RTLD_DEFAULT, "xmigCollectives");
  if (!symbol) {  // loaded, but not for all to see
    void* const shim = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (shim) symbol = ::dlsym(shim, "xmigCollectives");
  }
  const auto* const calls = static_cast<const NcclCalls*>(symbol);
  if (!calls || calls->bytes != sizeof(NcclCalls)) return nullptr;
  found.store(calls, std::memory_order_release);
  return calls;
}

void* native_function(int slot) {
  const NcclCalls* const shim = calls();
  const char* const path = shim ? shim->native() : nullptr;
  if (!path) [[likely]] return nullptr;
  std::atomic<void*>& known = functions[slot];
  if (void* const function = known.load(std::memory_order_acquire)) return function;
  // By its full path: the plain name is this library's own SONAME.
  void* const library = ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
  void* const function = library ? ::dlsym(library, kNames[slot]) : nullptr;
  known.store(function, std::memory_order_release);
  return function;
}

void refuse(const char* name) {
  if (const NcclCalls* const shim = calls()) shim->refused(name);
}

}  // namespace xmig::nccl
