// cuGetProcAddress: from a name and the version the program was built for to the form of the function it means.
#include "client/bootstrap/entry_points.h"

#include <cuda.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include "client/bootstrap/requested.h"
#include "local.h"

namespace xmig::client {
namespace {

struct Found {
  void* function = nullptr;
  bool too_new = false;  // there is such a function, but only in later versions than the one requested
};

// The newest form that `version` knows. A function without a per-thread form is the same for both.
Found find(std::string_view name, int version, bool per_thread) {
  const EntryPoint* const end = kEntryPoints + kEntryPointCount;
  const auto before = [](const EntryPoint& entry, std::string_view wanted) { return entry.name < wanted; };
  Found plain, own;
  for (auto* entry = std::lower_bound(kEntryPoints, end, name, before); entry != end && entry->name == name; ++entry) {
    Found& form = entry->per_thread ? own : plain;
    if (entry->version <= version) {
      form.function = entry->function;
    } else {
      form.too_new = true;
    }
  }
  if (per_thread && own.function) return own;
  plain.too_new |= own.too_new && !own.function && per_thread;
  return plain;
}

}  // namespace

CUresult cuGetProcAddress_v2(const char* symbol, void** pfn, int cudaVersion, cuuint64_t flags,
                             CUdriverProcAddressQueryResult* symbolStatus) {
  constexpr cuuint64_t kKnownFlags = CU_GET_PROC_ADDRESS_LEGACY_STREAM | CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
  if (!symbol || !*symbol || !pfn || (flags & ~kKnownFlags) || flags == kKnownFlags) return CUDA_ERROR_INVALID_VALUE;
  const Found found = find(symbol, cudaVersion, flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM);
  *pfn = found.function;
  const auto status = found.function  ? CU_GET_PROC_ADDRESS_SUCCESS
                      : found.too_new ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                                      : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  if (symbolStatus) *symbolStatus = status;
  if (status == CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND) note_missing(symbol);
  return CUDA_SUCCESS;  // a missing function is an answer; only the first form of this function calls it an error
}

CUresult cuGetProcAddress(const char* symbol, void** pfn, int cudaVersion, cuuint64_t flags) {
  const CUresult result = client::cuGetProcAddress_v2(symbol, pfn, cudaVersion, flags, nullptr);
  return result == CUDA_SUCCESS && !*pfn ? CUDA_ERROR_NOT_FOUND : result;
}

}  // namespace xmig::client
