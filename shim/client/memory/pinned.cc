// cuMemHostAlloc and its family, and cuMemHostRegister.
//
// Pages are taken from the system when memory is allocated, not when it is touched: there is nobody to tell then.
//
// Registered memory is the program's own, and stays where it is: the server cannot see it. Copies treat it as pageable
// memory (asynchronous copies from it take the bytes at the call, after host functions that may write them; asynchronous
// copies to it wait), and it has no device pointer.
#include "client/memory/pinned.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>

#include "client/bootstrap/message.h"
#include "client/memory/memory_call.h"
#include "client/memory/memory_map.h"
#include "client/memory/memory_progress.h"
#include "journal/layout.h"
#include "local.h"

namespace xmig::client {

namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kHugePage = 2ull << 20;
// Allocations from here on are first compared with what the system has left: a process that takes more is killed.
constexpr uint64_t kWorthAsking = 64ull << 20;

constexpr unsigned int kAllocFlags =
    CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;
constexpr unsigned int kRegisterFlags =
    CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_READ_ONLY;

struct PinnedSpace {
  std::mutex lock;
  FreeRanges free;
  PinnedSpace() { free.add({journal::kPinnedBase, journal::kPinnedBytes, {}}); }
};
PinnedSpace& space() {
  static auto& all = *new PinnedSpace;
  return all;
}

// MemAvailable in bytes; ~0 if the system does not say.
uint64_t available_memory() {
  const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen("/proc/meminfo", "re"), std::fclose);
  if (!file) return ~0ull;
  char line[256];
  while (std::fgets(line, sizeof(line), file.get())) {
    unsigned long long kib = 0;
    if (std::sscanf(line, "MemAvailable: %llu kB", &kib) == 1) return uint64_t{kib} << 10;
  }
  return ~0ull;
}

// Takes pages for all of it, as writing would, but with an error instead of a signal.
bool populate(uint64_t address, uint64_t bytes) {
  if (bytes >= kWorthAsking) {
    if (const uint64_t available = available_memory(); bytes > available) {
      say("no host memory for %llu MiB of pinned memory: the system has %llu MiB left",
          static_cast<unsigned long long>(bytes >> 20), static_cast<unsigned long long>(available >> 20));
      return false;
    }
  }
  void* const at = reinterpret_cast<void*>(address);
  int error = 0;
  do {
    error = ::madvise(at, bytes, MADV_POPULATE_WRITE) == 0 ? 0 : errno;
  } while (error == EINTR || error == EAGAIN);
  // Linux before 5.14 does not know it: pages come when they are touched.
  if (error == 0 || error == EINVAL) return true;
  say("no host memory for %llu MiB of pinned memory (%s): free memory, or give the job's memory cgroup more",
      static_cast<unsigned long long>(bytes >> 20), std::strerror(error));
  return false;
}

bool is_pinned(const Allocation& allocation) { return allocation.kind == MemoryKind::kPinned; }

}  // namespace

void give_pinned(const FreeRange& block) {
  // Also after a half failed populate(): there may be no page at all, which is no error.
  ::madvise(reinterpret_cast<void*>(block.address), block.bytes, MADV_REMOVE);
  const std::lock_guard guard(space().lock);
  space().free.add({block.address, block.bytes, {}});
}

CUresult free_idle_pinned(uint64_t address) {
  const auto allocation = memory_map().remove(address, MemoryKind::kPinned);
  if (!allocation) return CUDA_ERROR_INVALID_VALUE;  // freed by another thread meanwhile
  const Args_xmUnpin unpin{.address = allocation->block.address};
  const CUresult result = append(Op::xmUnpin, &unpin, sizeof(unpin));
  give_pinned(allocation->block);
  return result;
}

CUresult cuMemHostAlloc(void** pp, size_t bytesize, unsigned int Flags) {
  if (const CUresult result = enter_with_context(); result != CUDA_SUCCESS) return result;
  if (!pp || !bytesize || (Flags & ~kAllocFlags)) return CUDA_ERROR_INVALID_VALUE;
  if (bytesize > journal::kPinnedBytes) return CUDA_ERROR_OUT_OF_MEMORY;
  const uint64_t bytes = (bytesize + kPage - 1) & ~(kPage - 1);
  std::optional<FreeRange> block;
  {
    const std::lock_guard guard(space().lock);
    block = space().free.take(bytes, bytes >= kHugePage ? kHugePage : kPage);
  }
  if (!block) return CUDA_ERROR_OUT_OF_MEMORY;
  if (!populate(block->address, bytes)) {
    give_pinned(*block);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  const Args_xmPin pin{.address = block->address, .bytes = bytes};
  if (const CUresult result = call(Op::xmPin, &pin, sizeof(pin), nullptr, 0); result != CUDA_SUCCESS) {
    give_pinned(*block);
    return result;
  }
  note_context(current_context());
  memory_map().insert({.address = block->address,
                       .bytes = bytesize,
                       .block = *block,
                       .kind = MemoryKind::kPinned,
                       .ordinal = current_ordinal(),
                       .context = current_context(),
                       .flags = Flags});
  *pp = reinterpret_cast<void*>(block->address);
  return CUDA_SUCCESS;
}

CUresult cuMemAllocHost_v2(void** pp, size_t bytesize) { return cuMemHostAlloc(pp, bytesize, 0); }

CUresult cuMemFreeHost(void* p) {
  if (const CUresult result = enter(); result != CUDA_SUCCESS) return result;
  const auto address = reinterpret_cast<uint64_t>(p);
  const auto known = memory_map().find(address);
  if (!known || known->address != address || !is_pinned(*known)) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = synchronize_users(known->context); result != CUDA_SUCCESS) return result;
  return free_idle_pinned(address);
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* pdptr, void* p, unsigned int Flags) {
  if (const CUresult result = enter_with_context(); result != CUDA_SUCCESS) return result;
  if (!pdptr || Flags) return CUDA_ERROR_INVALID_VALUE;
  const auto found = memory_map().find(reinterpret_cast<uint64_t>(p));
  if (!found || found->on_device()) return CUDA_ERROR_INVALID_VALUE;
  if (!is_pinned(*found)) {
    say("cuMemHostGetDevicePointer: under xMIG, kernels cannot reach memory given to cuMemHostRegister; allocate it "
        "with cuMemHostAlloc");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  *pdptr = reinterpret_cast<uint64_t>(p);
  return CUDA_SUCCESS;
}

CUresult cuMemHostGetFlags(unsigned int* pFlags, void* p) {
  if (const CUresult result = enter_with_context(); result != CUDA_SUCCESS) return result;
  const auto found = memory_map().find(reinterpret_cast<uint64_t>(p));
  if (!pFlags || !found || !is_pinned(*found)) return CUDA_ERROR_INVALID_VALUE;
  // With one address space for all, pinned memory is mapped whether that was requested or not.
  *pFlags = found->flags | CU_MEMHOSTALLOC_DEVICEMAP;
  return CUDA_SUCCESS;
}

CUresult cuMemHostRegister_v2(void* p, size_t bytesize, unsigned int Flags) {
  if (const CUresult result = enter_with_context(); result != CUDA_SUCCESS) return result;
  const auto address = reinterpret_cast<uint64_t>(p);
  if (!p || !bytesize || address + bytesize < address) return CUDA_ERROR_INVALID_VALUE;
  if (Flags & CU_MEMHOSTREGISTER_IOMEMORY) {
    say("cuMemHostRegister: memory of other devices cannot be registered under xMIG");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  if (Flags & ~kRegisterFlags) return CUDA_ERROR_INVALID_VALUE;
  const Place place = memory_map().place(address, bytesize);
  if (place == Place::kPinned) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  if (place != Place::kPageable) return CUDA_ERROR_INVALID_VALUE;
  const bool inserted = memory_map().insert({.address = address,
                                             .bytes = bytesize,
                                             .kind = MemoryKind::kRegistered,
                                             .ordinal = current_ordinal(),
                                             .context = current_context(),
                                             .flags = Flags});
  return inserted ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
}

CUresult cuMemHostUnregister(void* p) {
  if (const CUresult result = enter(); result != CUDA_SUCCESS) return result;
  const auto address = reinterpret_cast<uint64_t>(p);
  return memory_map().remove(address, MemoryKind::kRegistered) ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

}  // namespace xmig::client
