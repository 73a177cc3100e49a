#include "client/memory/pool.h"

#include <array>
#include <map>
#include <mutex>
#include <optional>

#include "client/bootstrap/message.h"
#include "client/bootstrap/process.h"
#include "client/journal/diversion.h"
#include "client/journal/streams.h"
#include "client/memory/graph_memory.h"
#include "client/memory/memory.h"
#include "client/memory/memory_backing.h"
#include "client/memory/memory_call.h"
#include "client/memory/memory_progress.h"
#include "client/memory/peers.h"
#include "journal/layout.h"
#include "local.h"

namespace xmig::client {

namespace {

using journal::Kind;

// The pools by handle, and which are the devices' default and current ones. A destroyed pool lives on in its
// allocations, and in `orphaned` so that its memory can still be reclaimed.
class Registry {
 public:
  std::shared_ptr<Pool> find(CUmemoryPool handle) {
    const std::lock_guard guard(lock_);
    const auto it = pools_.find(reinterpret_cast<uint64_t>(handle));
    return it == pools_.end() ? nullptr : it->second;
  }
  std::shared_ptr<Pool> create(int ordinal, uint64_t limit) {
    const std::lock_guard guard(lock_);
    return create_locked(ordinal, limit);
  }
  std::shared_ptr<Pool> default_of(int ordinal) {
    const std::lock_guard guard(lock_);
    return default_locked(ordinal);
  }
  std::shared_ptr<Pool> current_of(int ordinal) {
    const std::lock_guard guard(lock_);
    auto& current = current_[static_cast<size_t>(ordinal)];
    if (!current) current = default_locked(ordinal);
    return current;
  }
  void make_current(int ordinal, std::shared_ptr<Pool> pool) {
    const std::lock_guard guard(lock_);
    current_[static_cast<size_t>(ordinal)] = std::move(pool);
  }
  // Takes the pool out, unless it is a default one.
  std::shared_ptr<Pool> destroy(CUmemoryPool handle) {
    const std::lock_guard guard(lock_);
    const auto it = pools_.find(reinterpret_cast<uint64_t>(handle));
    if (it == pools_.end()) return nullptr;
    const std::shared_ptr<Pool> pool = it->second;
    const auto ordinal = static_cast<size_t>(pool->heap.ordinal());
    if (pool == defaults_[ordinal]) return nullptr;
    if (pool == current_[ordinal]) current_[ordinal] = default_locked(static_cast<int>(ordinal));
    pools_.erase(it);
    orphaned_.push_back(pool);
    return pool;
  }
  std::vector<std::shared_ptr<Pool>> all_of(int ordinal) {
    const std::lock_guard guard(lock_);
    std::vector<std::shared_ptr<Pool>> all;
    const auto add = [&](const std::shared_ptr<Pool>& pool) {
      if (ordinal < 0 || pool->heap.ordinal() == ordinal) all.push_back(pool);
    };
    std::erase_if(orphaned_, [](const std::shared_ptr<Pool>& pool) { return pool->heap.use().reserved == 0; });
    for (const auto& [handle, pool] : pools_) add(pool);
    for (const auto& pool : orphaned_) add(pool);
    return all;
  }

 private:
  std::shared_ptr<Pool> create_locked(int ordinal, uint64_t limit) {
    const uint64_t handle = create_handle(Kind::kPool);
    return pools_.emplace(handle, std::make_shared<Pool>(ordinal, handle, limit)).first->second;
  }
  std::shared_ptr<Pool> default_locked(int ordinal) {
    auto& pool = defaults_[static_cast<size_t>(ordinal)];
    if (!pool) pool = create_locked(ordinal, 0);
    return pool;
  }

  std::mutex lock_;
  std::map<uint64_t, std::shared_ptr<Pool>> pools_;
  std::vector<std::shared_ptr<Pool>> orphaned_;
  std::array<std::shared_ptr<Pool>, journal::kMaxDevices> defaults_, current_;
};

Registry& registry() {
  static auto& all = *new Registry;
  return all;
}

CUmemoryPool handle_of(const Pool& pool) { return reinterpret_cast<CUmemoryPool>(pool.handle); }

CUresult allocate_async(CUdeviceptr* dptr, size_t bytes, const std::shared_ptr<Pool>& pool, CUstream stream) {
  if (diverting()) [[unlikely]] {
    if (const auto captured = diversion().allocate(stream, bytes, pool->heap.ordinal(), dptr)) return *captured;
  }
  uint64_t address = 0;
  const CUresult result = allocate(pool, MemoryKind::kDevice, bytes, stream, memory_stream_key(stream), &address);
  if (result == CUDA_SUCCESS) *dptr = address;
  return result;
}

}  // namespace

const std::shared_ptr<Pool>& plain_pool(int ordinal) {
  static auto& pools = *new auto([] {
    std::array<std::shared_ptr<Pool>, journal::kMaxDevices> made;
    for (uint32_t i = 0; i < journal::kMaxDevices; ++i) made[i] = std::make_shared<Pool>(static_cast<int>(i), 0, 0);
    return made;
  }());
  return pools[static_cast<size_t>(ordinal)];
}

std::vector<std::shared_ptr<Pool>> pools_of(int ordinal) {
  std::vector<std::shared_ptr<Pool>> all = registry().all_of(ordinal);
  for (int i = 0; i < static_cast<int>(journal::kMaxDevices); ++i) {
    if (ordinal < 0 || i == ordinal) all.push_back(plain_pool(i));
  }
  return all;
}

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool* pool_out, CUdevice dev) {
  if (const CUresult result = check_ordinal(dev); result != CUDA_SUCCESS) return result;
  if (!pool_out) return CUDA_ERROR_INVALID_VALUE;
  *pool_out = handle_of(*registry().default_of(dev));
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetMemPool(CUmemoryPool* pool, CUdevice dev) {
  if (const CUresult result = check_ordinal(dev); result != CUDA_SUCCESS) return result;
  if (!pool) return CUDA_ERROR_INVALID_VALUE;
  *pool = handle_of(*registry().current_of(dev));
  return CUDA_SUCCESS;
}

CUresult cuDeviceSetMemPool(CUdevice dev, CUmemoryPool pool) {
  if (const CUresult result = check_ordinal(dev); result != CUDA_SUCCESS) return result;
  const auto found = registry().find(pool);
  if (!found || found->heap.ordinal() != dev) return CUDA_ERROR_INVALID_VALUE;
  registry().make_current(dev, found);
  return CUDA_SUCCESS;
}

CUresult cuMemPoolCreate(CUmemoryPool* pool, const CUmemPoolProps* poolProps) {
  if (const CUresult result = enter(); result != CUDA_SUCCESS) return result;
  if (!pool || !poolProps || poolProps->allocType != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
  if (poolProps->location.type != CU_MEM_LOCATION_TYPE_DEVICE || poolProps->handleTypes != CU_MEM_HANDLE_TYPE_NONE) {
    say("cuMemPoolCreate: only pools of device memory that are not shared with other processes are supported");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  if (const CUresult result = check_ordinal(poolProps->location.id); result != CUDA_SUCCESS) return result;
  *pool = handle_of(*registry().create(poolProps->location.id, poolProps->maxSize));
  return CUDA_SUCCESS;
}

CUresult cuMemPoolDestroy(CUmemoryPool pool) {
  if (const CUresult result = enter(); result != CUDA_SUCCESS) return result;
  const auto destroyed = registry().destroy(pool);
  if (!destroyed) return CUDA_ERROR_INVALID_VALUE;
  free_handle(destroyed->handle);
  destroyed->release_threshold.store(0, std::memory_order_relaxed);
  destroyed->synchronized();
  return CUDA_SUCCESS;
}

CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void* value) {
  if (const CUresult result = enter(); result != CUDA_SUCCESS) return result;
  const auto found = registry().find(pool);
  if (!found || !value) return CUDA_ERROR_INVALID_VALUE;
  const HeapUse use = found->heap.use();
  auto* const number = static_cast<cuuint64_t*>(value);
  switch (attr) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
      *static_cast<int*>(value) = found->reuse[attr - CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES].load();
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
      *number = found->release_threshold.load();
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
      *number = use.reserved;
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
      *number = use.reserved_high;
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
      *number = use.used;
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
      *number = use.used_high;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void* value) {
  if (const CUresult result = enter(); result != CUDA_SUCCESS) return result;
  const auto found = registry().find(pool);
  if (!found || !value) return CUDA_ERROR_INVALID_VALUE;
  switch (attr) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
      found->reuse[attr - CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES] = *static_cast<const int*>(value) != 0;
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
      found->release_threshold = *static_cast<const cuuint64_t*>(value);
      pools_may_shrink = true;
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
      if (*static_cast<const cuuint64_t*>(value) != 0) return CUDA_ERROR_INVALID_VALUE;
      found->heap.reset_high(attr == CU_MEMPOOL_ATTR_USED_MEM_HIGH);
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t minBytesToKeep) {
  if (const CUresult result = enter(); result != CUDA_SUCCESS) return result;
  const auto found = registry().find(pool);
  if (!found) return CUDA_ERROR_INVALID_VALUE;
  found->heap.release(minBytesToKeep);
  return CUDA_SUCCESS;
}

// Access once given is not taken back from a device's kernels (peers.cc), only from what cuMemPoolGetAccess says.
CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc* map, size_t count) {
  if (const CUresult result = enter(); result != CUDA_SUCCESS) return result;
  const auto found = registry().find(pool);
  if (!found || (count && !map)) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count; ++i) {
    if (map[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
    if (const CUresult result = check_ordinal(map[i].location.id); result != CUDA_SUCCESS) return result;
    const bool own = map[i].location.id == found->heap.ordinal();
    if (own && map[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) return CUDA_ERROR_INVALID_VALUE;
    const bool known = map[i].flags == CU_MEM_ACCESS_FLAGS_PROT_NONE || map[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READ ||
                       map[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    if (!known) return CUDA_ERROR_INVALID_VALUE;
  }
  for (size_t i = 0; i < count; ++i) {
    const int device = map[i].location.id;
    const uint32_t bit = 1u << device;
    if (map[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE) {
      const CUresult result = share_memory(found->heap.ordinal(), device);
      if (result != CUDA_SUCCESS) return result;
    }
    const auto put = [bit](std::atomic<uint32_t>& bits, bool on) { on ? bits.fetch_or(bit) : bits.fetch_and(~bit); };
    put(found->readers, map[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE);
    put(found->writers, map[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  }
  return CUDA_SUCCESS;
}

CUresult cuMemPoolGetAccess(CUmemAccess_flags* flags, CUmemoryPool memPool, CUmemLocation* location) {
  if (const CUresult result = enter(); result != CUDA_SUCCESS) return result;
  const auto found = registry().find(memPool);
  if (!flags || !location || !found) return CUDA_ERROR_INVALID_VALUE;
  if (location->type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = check_ordinal(location->id); result != CUDA_SUCCESS) return result;
  const uint32_t bit = 1u << location->id;
  const bool own = location->id == found->heap.ordinal();
  *flags = own || (found->writers & bit) ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
           : found->readers & bit        ? CU_MEM_ACCESS_FLAGS_PROT_READ
                                         : CU_MEM_ACCESS_FLAGS_PROT_NONE;
  return CUDA_SUCCESS;
}

CUresult cuMemAllocAsync(CUdeviceptr* dptr, size_t bytesize, CUstream hStream) {
  if (const CUresult result = enter_with_context(); result != CUDA_SUCCESS) return result;
  if (!dptr || !bytesize) return CUDA_ERROR_INVALID_VALUE;
  if (!valid_stream(hStream)) return CUDA_ERROR_INVALID_HANDLE;
  const int ordinal = stream_home(hStream).ordinal;
  if (ordinal < 0) return CUDA_ERROR_INVALID_CONTEXT;
  return allocate_async(dptr, bytesize, registry().current_of(ordinal), hStream);
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr* dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream) {
  if (const CUresult result = enter_with_context(); result != CUDA_SUCCESS) return result;
  if (!dptr || !bytesize) return CUDA_ERROR_INVALID_VALUE;
  if (!valid_stream(hStream)) return CUDA_ERROR_INVALID_HANDLE;
  const auto found = registry().find(pool);
  if (!found) return CUDA_ERROR_INVALID_VALUE;
  return allocate_async(dptr, bytesize, found, hStream);
}

// A stream that was made says by itself in which context: threads of JAX free without one.
CUresult cuMemFreeAsync(CUdeviceptr dptr, CUstream hStream) {
  if (const CUresult result = special(hStream) ? enter_with_context() : enter(); result != CUDA_SUCCESS) return result;
  if (!valid_stream(hStream)) return CUDA_ERROR_INVALID_HANDLE;
  if (diverting()) [[unlikely]] {
    if (const auto captured = diversion().free(hStream, dptr)) return *captured;
  }
  if (is_graph_memory(dptr)) return CUDA_SUCCESS;  // it stays the graph's
  auto allocation = memory_map().remove(dptr, MemoryKind::kDevice);
  if (!allocation) return CUDA_ERROR_INVALID_VALUE;
  return release(std::move(*allocation), hStream, memory_stream_key(hStream));
}

}  // namespace xmig::client
