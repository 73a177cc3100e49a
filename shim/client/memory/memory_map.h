// Everything the program has got from us, by address: what pointer queries and copies are checked against.
//
// One map for device and host addresses: they never meet. Readers share the lock.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <vector>

#include "client/memory/memory_ranges.h"

namespace xmig::client {

class Pool;

enum class MemoryKind : uint8_t {
  kDevice,      // cuMemAlloc, or from a pool
  kGlobal,      // of a module
  kMapped,      // cuMemMap
  kPinned,      // cuMemHostAlloc
  kRegistered,  // cuMemHostRegister: the program's own pages
};

struct Allocation {
  uint64_t address = 0;
  uint64_t bytes = 0;  // as requested
  FreeRange block;     // what it takes up in its heap
  MemoryKind kind = MemoryKind::kDevice;
  int ordinal = 0;
  uint64_t context = 0;
  uint64_t id = 0;           // never used twice
  uint32_t flags = 0;        // pinned, registered: as given; mapped: access_of() each device
  uint64_t handle = 0;       // mapped: the memory's; from a pool that has one: the pool's
  std::shared_ptr<Pool> pool;  // device, global: where the block goes back to

  uint64_t end() const { return address + bytes; }
  bool on_device() const { return kind <= MemoryKind::kMapped; }
};

// CUmemAccess_flags of each device, two bits each.
constexpr uint32_t access_of(uint32_t flags, int device) { return flags >> (2 * device) & 3; }
constexpr uint32_t with_access(uint32_t flags, int device, uint32_t access) {
  return (flags & ~(3u << (2 * device))) | (access & 3) << (2 * device);
}

// What copies need to know of a pointer.
enum class Place : uint8_t {
  kDevice,
  kPinned,   // ours, in the shared memfd
  kPageable, // the program's own, registered or not
  kInvalid,  // not all of it is allocated, or it is NULL
};

class MemoryMap {
 public:
  // Gives it its id. False if it overlaps something that is there.
  bool insert(Allocation allocation);
  // The allocation that holds this address.
  std::optional<Allocation> find(uint64_t address) const;
  // Takes out the allocation that starts here, if `kind` is one of its kinds.
  template <typename... Kinds>
  std::optional<Allocation> remove(uint64_t address, Kinds... kinds) {
    const std::unique_lock guard(lock_);
    const auto it = map_.find(address);
    if (it == map_.end() || !((it->second.kind == kinds) || ...)) return std::nullopt;
    Allocation removed = std::move(it->second);
    map_.erase(it);
    return removed;
  }
  // Puts back what remove() took.
  void restore(Allocation allocation);
  // Everything that belongs to a context. Mappings do not: they are only `mapped` in one.
  std::vector<Allocation> remove_context(uint64_t context);
  std::vector<Allocation> mapped_in(uint64_t context) const;
  void set_flags(uint64_t address, uint32_t flags);

  // Where [address, address + bytes) lies. Device memory may be made of several allocations that touch.
  Place place(uint64_t address, uint64_t bytes) const;
  // For copies by rows: every row inside the allocations, from the first byte to the last.
  Place place(uint64_t address, uint64_t pitch, uint64_t width, uint64_t height) const;

 private:
  const Allocation* containing(uint64_t address) const;

  mutable std::shared_mutex lock_;
  std::map<uint64_t, Allocation> map_;
  uint64_t next_id_ = 1;
};

MemoryMap& memory_map();

}  // namespace xmig::client
