// Device memory: memfds, mapped at addresses that the server chooses.
//
// Physical memory is really there from cuMemCreate on (fallocate), so that the machine running out of memory is an
// error code of that call and never a SIGBUS in a kernel; the memfd is sealed against shrinking for the same reason.
#pragma once

#include <cuda.h>

#include <atomic>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "device/cpu/handles.h"
#include "ipc/fd.h"

namespace xmig::device::cpu {

// A device's capacity, and how much of it is taken.
struct Capacity {
  uint64_t total = 0;
  std::atomic<uint64_t> used{0};
};

// Of one cuMemCreate or import; given back when the handle is released and the last mapping is gone.
struct Physical {
  Physical(Capacity& of, ipc::UniqueFd fd, uint64_t bytes) : capacity(&of), fd(std::move(fd)), bytes(bytes) {
    capacity->used += bytes;
  }
  ~Physical() { capacity->used -= bytes; }
  Physical(const Physical&) = delete;
  Physical& operator=(const Physical&) = delete;

  Capacity* capacity;
  ipc::UniqueFd fd;  // closed at release: what is mapped stays
  const uint64_t bytes;
  bool imported = false;
};

class Memory {
 public:
  // By ordinal: how much memory each device has, and which of the node's it is.
  Memory(std::vector<uint64_t> capacities, std::span<const int> node_ordinals);
  ~Memory();

  CUresult reserve(uint64_t* address, uint64_t bytes, uint64_t alignment, uint64_t hint);
  CUresult unreserve(uint64_t address, uint64_t bytes);
  CUresult create(uint64_t* handle, uint64_t bytes, int ordinal);
  CUresult import(uint64_t* handle, int fd);
  CUresult export_fd(int* fd, uint64_t handle);
  CUresult release(uint64_t handle);
  CUresult map(uint64_t address, uint64_t bytes, uint64_t offset, uint64_t handle);
  CUresult unmap(uint64_t address, uint64_t bytes);
  // Of one device; what others may do stays as it is.
  CUresult set_access(uint64_t address, uint64_t bytes, int ordinal, int protection);
  // May work of this device touch it? As on a GPU: what is mapped for other devices only is not there for this one. True
  // where nothing is mapped: that shows when the work runs.
  bool accessible(int ordinal, uint64_t address, uint64_t bytes, bool write) const;

  CUresult register_host(uint64_t address, uint64_t bytes);
  CUresult unregister_host(uint64_t address);

  // Inside a reservation (or page-locked memory): what a copy may name. Whether memory is there shows when it runs.
  bool is_device(uint64_t address, uint64_t bytes) const;
  bool is_pinned(uint64_t address, uint64_t bytes) const;

  const Capacity& capacity(int ordinal) const { return *capacities_[ordinal]; }

 private:
  struct Range {
    uint64_t bytes;
    std::shared_ptr<Physical> physical;  // of a mapping
    uint32_t readers = 0, writers = 0;   // likewise: a bit for each device that may
  };
  using Ranges = std::map<uint64_t, Range>;
  // The range that holds all of [address, address + bytes).
  static Ranges::const_iterator around(const Ranges& ranges, uint64_t address, uint64_t bytes);

  Capacity& home_of(int fd);

  std::vector<std::unique_ptr<Capacity>> capacities_;
  std::vector<int> node_ordinals_;
  Capacity elsewhere_;  // what other devices of the node have lent us
  Handles<std::shared_ptr<Physical>, 0x4d> handles_;
  Ranges reservations_;
  Ranges mappings_;
  Ranges pinned_;
};

}  // namespace xmig::device::cpu
