// cuMemAlloc and cuMemFree, and the life of an allocation from whichever pool.
//
// An allocation is made by a record (xmAlloc) and so is its end (xmFree); blocks are given out again only after their
// xmFree has been appended, so the journal has them in an order that makes sense.
//
// cuMemFree waits for the device, as the genuine one does: work of any stream that may still use the memory is over
// before anybody else can get it. Memory freed in stream order (cuMemFreeAsync) may be taken by the same stream at
// once, and by others when the program has waited for the free: see memory_progress.h.
#include "client/memory/memory.h"

#include <algorithm>

#include "client/bootstrap/message.h"
#include "client/journal/diversion.h"
#include "client/memory/caching_allocator.h"
#include "client/memory/graph_memory.h"
#include "client/memory/memory_backing.h"
#include "client/memory/memory_call.h"
#include "client/memory/memory_map.h"
#include "client/memory/memory_progress.h"
#include "client/memory/named_numbers.h"
#include "client/memory/pinned.h"
#include "client/memory/pool.h"
#include "client/memory/vmm.h"
#include "local.h"
#include "records.h"

namespace xmig::client {

namespace {

CUresult tell_free(uint64_t address, CUstream stream) {
  const Args_xmFree args{.address = address, .stream = reinterpret_cast<uint64_t>(stream)};
  return append(Op::xmFree, &args, sizeof(args));
}

// The end of an allocation whose users have been waited for.
CUresult release_unused(Allocation allocation) {
  const std::shared_ptr<Pool> pool = allocation.pool;
  const CUresult result = release(std::move(allocation), nullptr, 0);
  if (result == CUDA_SUCCESS) pool->synchronized();
  return result;
}

void shrink_pools() {
  // Events are queried all the time, and nearly always there is nothing to do.
  if (!pools_may_shrink.exchange(false)) return;
  bool more = false;
  for (const auto& pool : pools_of(-1)) more |= pool->synchronized();
  if (more) pools_may_shrink = true;
}

}  // namespace

std::atomic<bool> pools_may_shrink{false};

CUresult allocate(const std::shared_ptr<Pool>& pool, MemoryKind kind, uint64_t bytes, CUstream stream,
                  uint64_t stream_key, uint64_t* address) {
  FreeRange block;
  if (const CUresult result = pool->heap.allocate(bytes, stream_key, &block); result != CUDA_SUCCESS) return result;
  // Kernels read and write whole vectors: what lies between the last byte and the unit's end is preserved too.
  const Args_xmAlloc args{.address = block.address,
                          .bytes = round_to_units(bytes),
                          .stream = reinterpret_cast<uint64_t>(stream),
                          .flags = 0,
                          .reserved = 0};
  if (const CUresult result = append(Op::xmAlloc, &args, sizeof(args)); result != CUDA_SUCCESS) {
    pool->heap.free(block, bytes);
    return result;
  }
  const uint64_t context = current_context();
  note_context(context);
  memory_map().insert({.address = block.address,
                       .bytes = bytes,
                       .block = {block.address, block.bytes, {}},
                       .kind = kind,
                       .ordinal = pool->heap.ordinal(),
                       .context = context,
                       .handle = pool->handle,
                       .pool = pool});
  *address = block.address;
  return CUDA_SUCCESS;
}

CUresult release(Allocation allocation, CUstream stream, uint64_t stream_key) {
  const CUresult result = tell_free(allocation.address, stream);
  if (result != CUDA_SUCCESS) {
    memory_map().restore(std::move(allocation));
    return result;
  }
  named_numbers().forget(allocation.address, round_to_units(allocation.bytes), true);
  FreeRange block = allocation.block;
  if (stream_key) block.freed = {stream_key, stream_home(stream).context, last_sequence()};
  allocation.pool->heap.free(block, allocation.bytes);
  pools_may_shrink = true;
  return CUDA_SUCCESS;
}

CUresult reclaim(int ordinal) {
  const uint64_t owner = current_context();
  if (const CUresult result = synchronize_users(owner); result != CUDA_SUCCESS) return result;
  for (const auto& pool : pools_of(ordinal)) pool->heap.release(0);
  return CUDA_SUCCESS;
}

CUresult allocate_global(uint64_t bytes, uint64_t* address) {
  if (const CUresult result = enter_with_context(); result != CUDA_SUCCESS) return result;
  if (!bytes) return CUDA_ERROR_INVALID_VALUE;
  return allocate(plain_pool(current_ordinal()), MemoryKind::kGlobal, bytes, nullptr, 0, address);
}

CUresult free_global(uint64_t address) {
  auto allocation = memory_map().remove(address, MemoryKind::kGlobal);
  if (!allocation) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = synchronize_users(allocation->context); result != CUDA_SUCCESS) {
    memory_map().restore(std::move(*allocation));
    return result;
  }
  return release_unused(std::move(*allocation));
}

CUresult free_idle_global(uint64_t address) {
  auto allocation = memory_map().remove(address, MemoryKind::kGlobal);
  return allocation ? release_unused(std::move(*allocation)) : CUDA_ERROR_INVALID_VALUE;
}

// What is backed and free here is free to the program; what the server reports leaves it out. Either answer may be unwanted.
CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
  size_t not_given_out = 0, all = 0;
  if (const CUresult result = record::cuMemGetInfo_v2(&not_given_out, &all); result != CUDA_SUCCESS) return result;
  if (free) *free = std::min<size_t>(not_given_out + backing(current_ordinal()).bytes().cached, all);
  if (total) *total = all;
  return CUDA_SUCCESS;
}

CUresult cuMemAlloc_v2(CUdeviceptr* dptr, size_t bytesize) {
  if (const CUresult result = enter_with_context(); result != CUDA_SUCCESS) return result;
  if (!dptr || !bytesize) return CUDA_ERROR_INVALID_VALUE;
  if (diverting()) [[unlikely]] {
    if (const CUresult unsafe = diversion().check_unsafe_call(); unsafe != CUDA_SUCCESS) return unsafe;
  }
  if (bytesize > kLargestSmall) watch_caching_allocator();
  uint64_t address = 0;
  const CUresult result =
      allocate(plain_pool(current_ordinal()), MemoryKind::kDevice, bytesize, nullptr, 0, &address);
  if (result == CUDA_SUCCESS) *dptr = address;
  if (result == CUDA_ERROR_OUT_OF_MEMORY) complain("no device memory for %zu bytes: CUDA error %d", bytesize, result);
  return result;
}

CUresult cuMemAllocPitch_v2(CUdeviceptr* dptr, size_t* pPitch, size_t WidthInBytes, size_t Height,
                            unsigned int ElementSizeBytes) {
  if (const CUresult result = enter_with_context(); result != CUDA_SUCCESS) return result;
  const bool element = ElementSizeBytes == 4 || ElementSizeBytes == 8 || ElementSizeBytes == 16;
  if (!dptr || !pPitch || !WidthInBytes || !Height || !element) return CUDA_ERROR_INVALID_VALUE;
  size_t bytes = 0;
  if (WidthInBytes > journal::kDeviceSpan) return CUDA_ERROR_OUT_OF_MEMORY;
  const size_t pitch = round_to_units(WidthInBytes);
  if (__builtin_mul_overflow(pitch, Height, &bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  const CUresult result = cuMemAlloc_v2(dptr, bytes);
  if (result == CUDA_SUCCESS) *pPitch = pitch;
  return result;
}

CUresult cuMemFree_v2(CUdeviceptr dptr) {
  if (const CUresult result = enter(); result != CUDA_SUCCESS) return result;
  if (!dptr || is_graph_memory(dptr)) return CUDA_SUCCESS;  // a graph's memory goes with the graph
  if (diverting()) [[unlikely]] {
    if (const CUresult unsafe = diversion().check_unsafe_call(); unsafe != CUDA_SUCCESS) return unsafe;
  }
  const auto known = memory_map().find(dptr);
  if (!known || known->address != dptr || known->kind != MemoryKind::kDevice) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = synchronize_users(known->context); result != CUDA_SUCCESS) return result;
  auto allocation = memory_map().remove(dptr, MemoryKind::kDevice);
  if (!allocation) return CUDA_ERROR_INVALID_VALUE;  // freed by another thread while this one waited
  return release_unused(std::move(*allocation));
}

// --- what the rest of the client reports ------------------------------------------------------------------------

void memory_stream_synchronized(CUstream stream) {
  memory_event_synchronized(memory_stream_key(stream), last_sequence());
}

void memory_event_synchronized(uint64_t stream_key, uint64_t record_sequence) {
  progress().stream_reached(stream_key, record_sequence);
  shrink_pools();
}

void memory_context_synchronized() {
  progress().context_reached(current_context(), last_sequence());
  shrink_pools();
}

void memory_stream_destroyed(CUstream stream) {
  const uint64_t key = memory_stream_key(stream);
  const uint64_t orphans = orphan_key(current_context());
  for (const auto& pool : pools_of(-1)) pool->heap.orphan(key, orphans);
}

void memory_context_reset(uint64_t context) {
  // Nothing of this context runs any more. The server dropped its allocations with it: there is no xmFree to send.
  progress().context_reached(context, last_sequence());
  pools_may_shrink = true;
  for (const Allocation& allocation : memory_map().remove_context(context)) {
    if (allocation.on_device()) named_numbers().forget(allocation.address, allocation.bytes, true);
    if (allocation.pool) allocation.pool->heap.free(allocation.block, allocation.bytes);
    if (allocation.kind == MemoryKind::kPinned) give_pinned(allocation.block);
  }
  forget_context(context);
  restate_mappings(context);
  shrink_pools();
}

}  // namespace xmig::client
