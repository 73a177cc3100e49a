// Memory that the program maps itself: cuMemAddressReserve, cuMemCreate, cuMemMap and their like.
//
// The journal knows physical memory only at an address, so a handle gets its memory when it is mapped. What cuMemCreate
// promises is counted, and it fails when the device has too little for it: out of memory comes from where programs
// expect it (only when something else takes the memory in between, from cuMemMap).
//
// A handle's memory stays where it was last mapped for as long as the handle lives: mapped there again it has kept its
// content, and mapped elsewhere the content is copied. What cannot be had, and is refused with one line: a handle at
// two addresses at once, a part of a handle, memory of the host, handles for other processes. PyTorch's expandable
// segments need none of it. Access flags are kept for cuMemGetAccess; the memory's own device can write whatever they say.
#include "client/memory/vmm.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <vector>

#include "client/bootstrap/message.h"
#include "client/bootstrap/process.h"
#include "client/memory/caching_allocator.h"
#include "client/memory/memory.h"
#include "client/memory/memory_backing.h"
#include "client/memory/memory_call.h"
#include "client/memory/memory_heap.h"
#include "client/memory/memory_map.h"
#include "client/memory/memory_progress.h"
#include "client/memory/named_numbers.h"
#include "client/memory/peers.h"
#include "journal/layout.h"
#include "local.h"
#include "records.h"

namespace xmig::client {

namespace {

using journal::kGranule;

struct Physical {
  CUmemAllocationProp properties{};
  uint64_t bytes = 0;
  uint64_t references = 1;  // cuMemCreate, cuMemRetainAllocationHandle
  uint64_t address = 0;     // where its memory is, once it has been mapped
  bool mapped = false;
  int ordinal() const { return properties.location.id; }
};

// The lock is held across the records that change a mapping: they are rare, and must be in the journal's order.
struct State {
  std::mutex lock;
  std::map<uint64_t, uint64_t> reservations;  // address -> bytes
  std::map<uint64_t, Physical> handles;
  std::map<uint64_t, uint64_t> places;  // address of a handle's memory -> handle, mapped or not
  uint64_t promised[journal::kMaxDevices] = {};  // created, and not backed yet
};
State& state() {
  static auto& all = *new State;
  return all;
}

bool whole_granules(uint64_t bytes) { return bytes && bytes % kGranule == 0; }

bool reserved(const State& state, uint64_t address, uint64_t bytes) {
  auto it = state.reservations.upper_bound(address);
  if (it == state.reservations.begin()) return false;
  --it;
  return bytes <= it->second && address - it->first <= it->second - bytes;
}

// Does memory of a handle lie in the range, mapped or not?
bool occupied(const State& state, uint64_t address, uint64_t bytes) {
  const auto next = state.places.lower_bound(address);
  if (next != state.places.end() && next->first - address < bytes) return true;
  if (next == state.places.begin()) return false;
  const auto before = std::prev(next);
  return before->first + state.handles.at(before->second).bytes > address;
}

CUresult check(const CUmemAllocationProp& properties) {
  if (properties.type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
  if (properties.location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
    say("cuMemCreate: only device memory can be created under xMIG");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  // Asking for a descriptor is harmless as long as it is not exported; PyTorch asks. Others say by this error that
  // they cannot be had.
  if (properties.requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
  return check_ordinal(properties.location.id);
}

// Can this much be backed? What the device reports as free leaves out what the server gives up when it must: then only
// trying tells.
CUresult obtainable(int ordinal, uint64_t bytes) {
  size_t free = 0;
  size_t total = 0;
  if (ordinal == current_ordinal() && record::cuMemGetInfo_v2(&free, &total) == CUDA_SUCCESS && bytes <= free) {
    return CUDA_SUCCESS;
  }
  uint64_t address = 0;
  Backing& memory = backing(ordinal);
  CUresult result = memory.reserve(bytes, 0, 0, &address);
  if (result != CUDA_SUCCESS) return result;
  result = memory.grow_at(address, bytes);
  if (result == CUDA_SUCCESS) memory.shrink_at(address, bytes);
  memory.unreserve(address, bytes);
  return result;
}

CUresult tell_alloc(uint64_t address, uint64_t bytes) {
  const Args_xmAlloc args{.address = address, .bytes = bytes, .stream = 0, .flags = 0, .reserved = 0};
  return append(Op::xmAlloc, &args, sizeof(args));
}

// Takes the physical memory of a handle away from where it is.
void unback(State& state, const Physical& memory) {
  const Args_xmFree args{.address = memory.address, .stream = 0};
  append(Op::xmFree, &args, sizeof(args));
  named_numbers().forget(memory.address, memory.bytes, true);
  backing(memory.ordinal()).shrink_at(memory.address, memory.bytes);
  state.places.erase(memory.address);
}

// Nobody refers to the handle and it is mapped nowhere: its memory goes.
void destroy(State& state, std::map<uint64_t, Physical>::iterator it) {
  const Physical& memory = it->second;
  if (memory.address) {
    unback(state, memory);
  } else {
    state.promised[memory.ordinal()] -= memory.bytes;
  }
  free_handle(it->first);
  state.handles.erase(it);
}

CUresult back(const Physical& memory, uint64_t address) {
  Backing& granules = backing(memory.ordinal());
  if (const CUresult result = granules.grow_at(address, memory.bytes); result != CUDA_SUCCESS) return result;
  const CUresult result = tell_alloc(address, memory.bytes);
  if (result != CUDA_SUCCESS) granules.shrink_at(address, memory.bytes);
  return result;
}

// The handle's memory is at `address` from here on, with the content that it had.
CUresult place(State& state, uint64_t handle, Physical& memory, uint64_t address) {
  if (const CUresult result = back(memory, address); result != CUDA_SUCCESS) return result;
  if (memory.address) {
    // Whatever wrote to the old place is over before the copy, and the copy before anybody sees the new one.
    CUresult result = synchronize_users(current_context());
    if (result == CUDA_SUCCESS) {
      result = record::cuMemcpyDtoDAsync_v2(address, memory.address, memory.bytes, CU_STREAM_LEGACY);
    }
    if (result == CUDA_SUCCESS) result = record::cuStreamSynchronize(CU_STREAM_LEGACY);
    if (result == CUDA_SUCCESS) memory_stream_synchronized(CU_STREAM_LEGACY);
    if (result != CUDA_SUCCESS) {
      Physical copied = memory;
      copied.address = address;
      unback(state, copied);
      return result;
    }
    unback(state, memory);
  } else {
    state.promised[memory.ordinal()] -= memory.bytes;
  }
  memory.address = address;
  state.places.emplace(address, handle);
  return CUDA_SUCCESS;
}

}  // namespace

void restate_mappings(uint64_t context) {
  for (const Allocation& mapping : memory_map().mapped_in(context)) tell_alloc(mapping.address, mapping.bytes);
}

CUresult cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp* prop,
                                       CUmemAllocationGranularity_flags option) {
  if (const CUresult result = enter(); result != CUDA_SUCCESS) return result;
  const bool known = option == CU_MEM_ALLOC_GRANULARITY_MINIMUM || option == CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
  if (!granularity || !prop || !known) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = check(*prop); result != CUDA_SUCCESS) return result;
  *granularity = kGranule;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr* ptr, size_t size, size_t alignment, CUdeviceptr addr,
                             unsigned long long flags) {
  if (const CUresult result = enter(); result != CUDA_SUCCESS) return result;
  const bool power_of_two = (alignment & (alignment - 1)) == 0;
  if (!ptr || !whole_granules(size) || !power_of_two || flags || addr % kGranule) return CUDA_ERROR_INVALID_VALUE;
  // The range decides which device's memory can be mapped there: the current one's, unless the hint says otherwise.
  const int hinted = addr ? ordinal_of(addr) : -1;
  const int ordinal = hinted >= 0 ? hinted : std::max(current_ordinal(), 0);
  uint64_t address = 0;
  const CUresult result = backing(ordinal).reserve(size, alignment, hinted >= 0 ? addr : 0, &address);
  if (result != CUDA_SUCCESS) return result;
  State& all = state();
  const std::lock_guard guard(all.lock);
  all.reservations.emplace(address, size);
  *ptr = address;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr ptr, size_t size) {
  if (const CUresult result = enter(); result != CUDA_SUCCESS) return result;
  State& all = state();
  const std::lock_guard guard(all.lock);
  const auto it = all.reservations.find(ptr);
  if (it == all.reservations.end() || it->second != size) return CUDA_ERROR_INVALID_VALUE;
  for (auto place = all.places.lower_bound(ptr); place != all.places.end() && place->first - ptr < size; ++place) {
    if (all.handles.at(place->second).mapped) return CUDA_ERROR_INVALID_VALUE;
  }
  // Addresses that still hold the memory of an unmapped handle are not given to anybody else.
  if (occupied(all, ptr, size)) {
    say("cuMemAddressFree: a handle that was mapped here still lives; release it first");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  all.reservations.erase(it);
  backing(ordinal_of(ptr)).unreserve(ptr, size);
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* prop,
                     unsigned long long flags) {
  if (const CUresult result = enter_with_context(); result != CUDA_SUCCESS) return result;
  if (!handle || !prop || !whole_granules(size) || flags) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = check(*prop); result != CUDA_SUCCESS) return result;
  const int ordinal = prop->location.id;
  State& all = state();
  uint64_t promised;
  {
    const std::lock_guard guard(all.lock);
    promised = all.promised[ordinal] += size;
  }
  CUresult result = obtainable(ordinal, promised);
  if (result == CUDA_ERROR_OUT_OF_MEMORY) {
    result = reclaim(ordinal);
    if (result == CUDA_SUCCESS) result = obtainable(ordinal, promised);
  }
  if (result != CUDA_SUCCESS) {
    const std::lock_guard guard(all.lock);
    all.promised[ordinal] -= size;
    return result;
  }
  const uint64_t made = create_handle(journal::Kind::kMemory);
  const std::lock_guard guard(all.lock);
  Physical memory{.properties = *prop, .bytes = size};
  memory.properties.allocFlags.compressionType = CU_MEM_ALLOCATION_COMP_NONE;  // may be requested, and is not granted
  all.handles.emplace(made, memory);
  *handle = made;
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  if (const CUresult result = enter(); result != CUDA_SUCCESS) return result;
  State& all = state();
  const std::lock_guard guard(all.lock);
  const auto it = all.handles.find(handle);
  if (it == all.handles.end() || it->second.references == 0) return CUDA_ERROR_INVALID_VALUE;
  if (--it->second.references == 0 && !it->second.mapped) destroy(all, it);
  return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
  if (const CUresult result = enter(); result != CUDA_SUCCESS) return result;
  watch_caching_allocator();
  State& all = state();
  const std::lock_guard guard(all.lock);
  const auto it = all.handles.find(handle);
  if (it == all.handles.end() || it->second.references == 0) return CUDA_ERROR_INVALID_VALUE;
  Physical& memory = it->second;
  if (flags || ptr % kGranule || !whole_granules(size) || size > memory.bytes || !reserved(all, ptr, size)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (offset || size != memory.bytes) {
    say("cuMemMap: only the whole of a handle can be mapped under xMIG");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  if (memory.mapped) {
    say("cuMemMap: memory can be mapped at one address at a time only under xMIG");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  if (ordinal_of(ptr) != memory.ordinal()) {
    say("cuMemMap: addresses reserved while device %d was current cannot hold memory of device %d under xMIG",
        ordinal_of(ptr), memory.ordinal());
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  if (memory.address != ptr) {
    if (occupied(all, ptr, size)) return CUDA_ERROR_INVALID_VALUE;
    if (const CUresult result = place(all, handle, memory, ptr); result != CUDA_SUCCESS) return result;
  }
  memory.mapped = true;
  note_context(current_context());
  memory_map().insert({.address = ptr,
                       .bytes = size,
                       .kind = MemoryKind::kMapped,
                       .ordinal = memory.ordinal(),
                       .context = current_context(),
                       .handle = handle});
  return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr ptr, size_t size) {
  if (const CUresult result = enter(); result != CUDA_SUCCESS) return result;
  State& all = state();
  const std::lock_guard guard(all.lock);
  if (!whole_granules(size) || !reserved(all, ptr, size)) return CUDA_ERROR_INVALID_VALUE;
  std::vector<Allocation> mappings;
  for (uint64_t at = ptr; at < ptr + size;) {
    const auto mapping = memory_map().find(at);
    const bool whole = mapping && mapping->kind == MemoryKind::kMapped && mapping->address == at &&
                       mapping->end() <= ptr + size;
    if (!whole) return CUDA_ERROR_INVALID_VALUE;
    at = mapping->end();
    mappings.push_back(*mapping);
  }
  for (const Allocation& mapping : mappings) {
    memory_map().remove(mapping.address, MemoryKind::kMapped);
    const auto it = all.handles.find(mapping.handle);
    it->second.mapped = false;
    if (it->second.references == 0) destroy(all, it);
  }
  return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc* desc, size_t count) {
  if (const CUresult result = enter(); result != CUDA_SUCCESS) return result;
  if (!whole_granules(size) || !desc || !count) return CUDA_ERROR_INVALID_VALUE;
  std::vector<Allocation> mappings;
  for (uint64_t at = ptr; at < ptr + size;) {
    const auto mapping = memory_map().find(at);
    if (!mapping || mapping->kind != MemoryKind::kMapped) return CUDA_ERROR_INVALID_VALUE;
    at = mapping->end();
    mappings.push_back(*mapping);
  }
  for (size_t i = 0; i < count; ++i) {
    if (desc[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
    if (const CUresult result = check_ordinal(desc[i].location.id); result != CUDA_SUCCESS) return result;
  }
  for (size_t i = 0; i < count; ++i) {
    const int device = desc[i].location.id;
    for (Allocation& mapping : mappings) {
      // Access once given is not taken back from a device's kernels (peers.cc).
      if (desc[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE) {
        if (const CUresult result = share_memory(mapping.ordinal, device); result != CUDA_SUCCESS) return result;
      }
      mapping.flags = with_access(mapping.flags, device, desc[i].flags);
      memory_map().set_flags(mapping.address, mapping.flags);
    }
  }
  return CUDA_SUCCESS;
}

CUresult cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location, CUdeviceptr ptr) {
  if (const CUresult result = enter(); result != CUDA_SUCCESS) return result;
  const auto mapping = memory_map().find(ptr);
  if (!flags || !location || !mapping || mapping->kind != MemoryKind::kMapped) return CUDA_ERROR_INVALID_VALUE;
  if (location->type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = check_ordinal(location->id); result != CUDA_SUCCESS) return result;
  *flags = access_of(mapping->flags, location->id);
  return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* prop, CUmemGenericAllocationHandle handle) {
  if (const CUresult result = enter(); result != CUDA_SUCCESS) return result;
  State& all = state();
  const std::lock_guard guard(all.lock);
  const auto it = all.handles.find(handle);
  if (!prop || it == all.handles.end()) return CUDA_ERROR_INVALID_VALUE;
  *prop = it->second.properties;
  return CUDA_SUCCESS;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* addr) {
  if (const CUresult result = enter(); result != CUDA_SUCCESS) return result;
  State& all = state();
  const std::lock_guard guard(all.lock);
  const auto mapping = memory_map().find(reinterpret_cast<uint64_t>(addr));
  if (!handle || !mapping || mapping->kind != MemoryKind::kMapped) return CUDA_ERROR_INVALID_VALUE;
  ++all.handles.at(mapping->handle).references;
  *handle = mapping->handle;
  return CUDA_SUCCESS;
}

}  // namespace xmig::client
