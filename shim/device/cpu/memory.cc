#include "device/cpu/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>

#include "device/cpu/log.h"
#include "journal/layout.h"

namespace xmig::device::cpu {
namespace {

using journal::kGranule;

bool granular(uint64_t n) { return n % kGranule == 0; }

void* pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

// Address space without memory, whatever was there before.
bool clear(uint64_t address, uint64_t bytes) {
  return mmap(pointer(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) !=
         MAP_FAILED;
}

// Memory says in its name where it is: a GPU's is of that GPU, whoever maps it.
constexpr const char* kName = "xmig-device-memory-of-cpu:";

ipc::UniqueFd create_memfd(int node_ordinal) {
  const std::string name = kName + std::to_string(node_ordinal);
  int fd = memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) {
    const bool limit = errno == EMFILE || errno == ENFILE;
    XMIG_CPU_LOG("no memory object: %s%s", std::strerror(errno),
                 limit ? "; each needs a file descriptor: raise the limit (ulimit -n, LimitNOFILE=)" : "");
  }
  return ipc::UniqueFd(fd);
}

}  // namespace

Memory::Memory(std::vector<uint64_t> capacities, std::span<const int> node_ordinals)
    : node_ordinals_(node_ordinals.begin(), node_ordinals.end()) {
  for (const uint64_t bytes : capacities) {
    capacities_.push_back(std::make_unique<Capacity>());
    capacities_.back()->total = bytes;
  }
}

Memory::~Memory() {
  for (const auto& [address, range] : reservations_) munmap(pointer(address), range.bytes);
}

Memory::Ranges::const_iterator Memory::around(const Ranges& ranges, uint64_t address, uint64_t bytes) {
  auto it = ranges.upper_bound(address);
  if (it == ranges.begin()) return ranges.end();
  --it;
  const uint64_t inside = address - it->first;
  return inside <= it->second.bytes && bytes <= it->second.bytes - inside ? it : ranges.end();
}

CUresult Memory::reserve(uint64_t* address, uint64_t bytes, uint64_t alignment, uint64_t hint) {
  if (bytes == 0 || !granular(bytes) || !granular(hint) || (alignment & (alignment - 1)) != 0)
    return CUDA_ERROR_INVALID_VALUE;
  alignment = std::max<uint64_t>(alignment, kGranule);
  if (hint % alignment != 0) return CUDA_ERROR_INVALID_VALUE;
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  if (hint != 0) {
    void* got = mmap(pointer(hint), bytes, PROT_NONE, kFlags | MAP_FIXED_NOREPLACE, -1, 0);
    if (got == MAP_FAILED) {
      XMIG_CPU_LOG("cannot reserve %llu bytes of addresses at 0x%llx: %s", static_cast<unsigned long long>(bytes),
                   static_cast<unsigned long long>(hint), std::strerror(errno));
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *address = hint;
  } else {
    uint64_t wider;
    if (__builtin_add_overflow(bytes, alignment, &wider)) return CUDA_ERROR_INVALID_VALUE;
    void* got = mmap(nullptr, wider, PROT_NONE, kFlags, -1, 0);
    if (got == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    const uint64_t from = reinterpret_cast<uint64_t>(got), aligned = (from + alignment - 1) & ~(alignment - 1);
    if (aligned != from) munmap(got, aligned - from);
    if (aligned + bytes != from + wider) munmap(pointer(aligned + bytes), from + wider - aligned - bytes);
    *address = aligned;
  }
  reservations_[*address] = {bytes, nullptr, 0, 0};
  return CUDA_SUCCESS;
}

CUresult Memory::unreserve(uint64_t address, uint64_t bytes) {
  const auto it = reservations_.find(address);
  if (it == reservations_.end() || it->second.bytes != bytes) return CUDA_ERROR_INVALID_VALUE;
  const auto mapping = mappings_.lower_bound(address);
  if (mapping != mappings_.end() && mapping->first < address + bytes) return CUDA_ERROR_INVALID_VALUE;
  munmap(pointer(address), bytes);
  reservations_.erase(it);
  return CUDA_SUCCESS;
}

CUresult Memory::create(uint64_t* handle, uint64_t bytes, int ordinal) {
  if (bytes == 0 || !granular(bytes)) return CUDA_ERROR_INVALID_VALUE;
  Capacity& capacity = *capacities_[ordinal];
  const uint64_t used = capacity.used;
  if (used > capacity.total || bytes > capacity.total - used) return CUDA_ERROR_OUT_OF_MEMORY;
  ipc::UniqueFd fd = create_memfd(node_ordinals_[static_cast<size_t>(ordinal)]);
  if (!fd) return CUDA_ERROR_OUT_OF_MEMORY;
  int result;
  do {
    result = fallocate(fd.get(), 0, 0, static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  if (result != 0) {
    XMIG_CPU_LOG("the machine has no %llu bytes of shared memory left: %s", static_cast<unsigned long long>(bytes),
                 std::strerror(errno));
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) return CUDA_ERROR_UNKNOWN;
  *handle = handles_.add(std::make_shared<Physical>(capacity, std::move(fd), bytes));
  return CUDA_SUCCESS;
}

// The device whose memory this is, if it is one of this process's.
Capacity& Memory::home_of(int fd) {
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  char target[256] = "";
  if (readlink(path.c_str(), target, sizeof(target) - 1) <= 0) return *capacities_[0];
  const char* const at = std::strstr(target, kName);
  if (!at) return *capacities_[0];
  const int home = std::atoi(at + std::strlen(kName));
  const auto found = std::find(node_ordinals_.begin(), node_ordinals_.end(), home);
  return found == node_ordinals_.end() ? elsewhere_ : *capacities_[static_cast<size_t>(found - node_ordinals_.begin())];
}

CUresult Memory::import(uint64_t* handle, int fd) {
  ipc::UniqueFd own(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!own) {
    if (errno == EBADF) return CUDA_ERROR_INVALID_VALUE;
    XMIG_CPU_LOG("cannot import a memory object: %s", std::strerror(errno));
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  // Only what create() made: anything else could shrink under our feet.
  struct stat status{};
  const int seals = fcntl(own.get(), F_GET_SEALS);
  if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(own.get(), &status) != 0 || status.st_size <= 0 ||
      !granular(static_cast<uint64_t>(status.st_size)))
    return CUDA_ERROR_INVALID_VALUE;
  Capacity& home = home_of(own.get());
  auto physical = std::make_shared<Physical>(home, std::move(own), static_cast<uint64_t>(status.st_size));
  physical->imported = true;
  *handle = handles_.add(std::move(physical));
  return CUDA_SUCCESS;
}

CUresult Memory::export_fd(int* fd, uint64_t handle) {
  const auto* physical = handles_.find(handle);
  if (!physical) return CUDA_ERROR_INVALID_VALUE;
  const int copy = fcntl((*physical)->fd.get(), F_DUPFD_CLOEXEC, 0);
  if (copy < 0) {
    XMIG_CPU_LOG("cannot export a memory object: %s", std::strerror(errno));
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *fd = copy;
  return CUDA_SUCCESS;
}

CUresult Memory::release(uint64_t handle) {
  if (!handles_.find(handle)) return CUDA_ERROR_INVALID_VALUE;
  handles_.remove(handle)->fd.reset();
  return CUDA_SUCCESS;
}

CUresult Memory::map(uint64_t address, uint64_t bytes, uint64_t offset, uint64_t handle) {
  auto* physical = handles_.find(handle);
  if (!physical || bytes == 0 || !granular(address) || !granular(bytes) || !granular(offset) ||
      offset > (*physical)->bytes || bytes > (*physical)->bytes - offset ||
      around(reservations_, address, bytes) == reservations_.end())
    return CUDA_ERROR_INVALID_VALUE;
  const auto next = mappings_.lower_bound(address);
  if (next != mappings_.end() && next->first < address + bytes) return CUDA_ERROR_INVALID_VALUE;
  if (next != mappings_.begin() && std::prev(next)->first + std::prev(next)->second.bytes > address)
    return CUDA_ERROR_INVALID_VALUE;
  if (mmap(pointer(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, (*physical)->fd.get(),
           static_cast<off_t>(offset)) == MAP_FAILED) {
    XMIG_CPU_LOG("cannot map %llu bytes at 0x%llx: %s%s", static_cast<unsigned long long>(bytes),
                 static_cast<unsigned long long>(address), std::strerror(errno),
                 errno == ENOMEM ? "; a process may have vm.max_map_count mappings" : "");
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  mappings_[address] = {bytes, *physical, 0, 0};
  return CUDA_SUCCESS;
}

CUresult Memory::unmap(uint64_t address, uint64_t bytes) {
  // Whole mappings only, without a gap.
  uint64_t end = address;
  const auto first = mappings_.find(address);
  auto last = first;
  for (; last != mappings_.end() && last->first == end && end < address + bytes; ++last) end += last->second.bytes;
  if (bytes == 0 || end != address + bytes) return CUDA_ERROR_INVALID_VALUE;
  if (!clear(address, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  mappings_.erase(first, last);
  return CUDA_SUCCESS;
}

CUresult Memory::set_access(uint64_t address, uint64_t bytes, int ordinal, int protection) {
  uint64_t end = address;
  const auto first = mappings_.find(address);
  auto last = first;
  for (; last != mappings_.end() && last->first == end && end < address + bytes; ++last) end += last->second.bytes;
  if (bytes == 0 || end != address + bytes) return CUDA_ERROR_INVALID_VALUE;
  const uint32_t device = 1u << ordinal;
  for (auto at = first; at != last; ++at) {
    Range& range = at->second;
    range.readers = protection & PROT_READ ? range.readers | device : range.readers & ~device;
    range.writers = protection & PROT_WRITE ? range.writers | device : range.writers & ~device;
    // The processor is one for all devices: what one may, the page tables let all.
    const int allowed = (range.readers ? PROT_READ : PROT_NONE) | (range.writers ? PROT_READ | PROT_WRITE : PROT_NONE);
    if (mprotect(pointer(at->first), range.bytes, allowed) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
  }
  // The pages exist: entering all of them now is several times cheaper than one fault for each. Not those of a lost
  // server, whose program waits: most are only read before it goes on, and shadows not even that.
  const bool imported = std::any_of(first, last, [](const auto& entry) { return entry.second.physical->imported; });
  if ((protection & PROT_WRITE) && !imported) madvise(pointer(address), bytes, MADV_POPULATE_WRITE);
  return CUDA_SUCCESS;
}

bool Memory::accessible(int ordinal, uint64_t address, uint64_t bytes, bool write) const {
  auto at = mappings_.upper_bound(address);
  if (at != mappings_.begin() && std::prev(at)->first + std::prev(at)->second.bytes > address) --at;
  for (; at != mappings_.end() && at->first < address + bytes; ++at) {
    const uint32_t allowed = write ? at->second.writers : at->second.readers;
    // Where nobody may, the page tables say so.
    if (at->second.readers != 0 && !(allowed >> ordinal & 1)) return false;
  }
  return true;
}

CUresult Memory::register_host(uint64_t address, uint64_t bytes) {
  if (address == 0 || bytes == 0 || address + bytes < address) return CUDA_ERROR_INVALID_VALUE;
  const auto next = pinned_.lower_bound(address);
  if ((next != pinned_.end() && next->first < address + bytes) ||
      (next != pinned_.begin() && std::prev(next)->first + std::prev(next)->second.bytes > address))
    return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  pinned_[address] = {bytes, nullptr, 0, 0};
  return CUDA_SUCCESS;
}

CUresult Memory::unregister_host(uint64_t address) {
  return pinned_.erase(address) ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

bool Memory::is_device(uint64_t address, uint64_t bytes) const {
  return around(reservations_, address, bytes) != reservations_.end() || is_pinned(address, bytes);
}

bool Memory::is_pinned(uint64_t address, uint64_t bytes) const {
  return around(pinned_, address, bytes) != pinned_.end();
}

}  // namespace xmig::device::cpu
