#include "server/memory/physical.h"

#include <fcntl.h>
#include <linux/kcmp.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <span>

namespace xmig::server {
namespace {

// The driver does not say so when it ran out of descriptors.
bool out_of_descriptors() {
  const ipc::UniqueFd probe(::fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 3));
  return !probe && errno == EMFILE;
}

// Are they descriptors of the same open file, as after a passage through a socket? Where the kernel does not say, they are not.
bool same_file(const ipc::UniqueFd& a, const ipc::UniqueFd& b) {
  const pid_t self = ::getpid();
  return ::syscall(SYS_kcmp, self, self, KCMP_FILE, a.get(), b.get()) == 0;
}

}  // namespace

Physical::~Physical() {
  keep_ahead({});
  for (const Extent& range : reserved_) device_.unreserve(range.address, range.bytes);
  for (const Extent& range : reserved_host_) ::munmap(reinterpret_cast<void*>(range.address), range.bytes);
}

Status Physical::reserve(uint32_t devices) {
  if (!reserved_.empty()) return {};
  for (uint32_t ordinal = 0; ordinal < devices; ++ordinal) {
    const Extent ranges[] = {{device_base(ordinal), journal::kDeviceSpan},
                             {shadow_base(ordinal), journal::kHostShadowAt}};
    for (const auto& [wanted, bytes] : ranges) {
      uint64_t got = 0;
      const Status result = device_.reserve(wanted, bytes, journal::kGranule, got);
      if (!result) return result;
      reserved_.push_back({got, bytes});
      if (got != wanted) {
        log_(Level::kError, "the device's address range is taken by something else in this process");
        return Problem::kTaken;
      }
    }
    void* const host = reinterpret_cast<void*>(host_shadow_base(ordinal));
    constexpr int kReserve = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
    constexpr uint64_t kBytes = kShadowSpan - journal::kHostShadowAt;
    if (::mmap(host, kBytes, PROT_NONE, kReserve, -1, 0) != host) {
      log_(Level::kError, "the address range of host memory is taken by something else in this process");
      return Problem::kTaken;
    }
    reserved_host_.push_back({host_shadow_base(ordinal), kBytes});
  }
  return {};
}

// Memory of this kind is mapped for its own device, and for no other unless the program has requested it: kernels and copies
// of another one must find that it is not there, as they do natively.
Status Physical::map(HostedKind kind, uint32_t ordinal, uint64_t address, uint64_t bytes,
                     device::MemoryHandle handle) {
  if (const Status result = device_.map(address, bytes, handle); !result) return result;
  std::array<uint32_t, journal::kMaxDevices> devices{};
  size_t count = 0;
  for (uint32_t device = 0; device < journal::kMaxDevices; ++device) {
    if (device == ordinal || (kind == HostedKind::kDevice && shares(ordinal, device))) devices[count++] = device;
  }
  const Status result = device_.set_access(address, bytes, std::span(devices).first(count), true);
  if (!result) device_.unmap(address, bytes);
  return result;
}

void Physical::share(uint32_t ordinal, uint32_t device, bool on) {
  if (on) {
    sharers_[ordinal].fetch_or(1u << device);
  } else {
    sharers_[ordinal].fetch_and(~(1u << device));
  }
}

Status Physical::set_access(uint64_t address, uint64_t bytes, uint32_t device, bool on) {
  return device_.set_access(address, bytes, std::span(&device, 1), on);
}

Error Physical::failed(std::string why, Status status, When when) {
  if (when == When::kNow) log_(Level::kWarning, why);
  return {.text = std::move(why), .number = device_.number_of(status)};
}

// `reported`: by the driver.
Error Physical::no_memory(Status reported, Status result, uint64_t bytes, When when) {
  std::string text = "no memory for " + std::to_string(bytes >> 20) + " MiB (" + device_.text(reported) + ")";
  if (out_of_descriptors()) {
    text = "no file descriptors left for device memory: raise the server's limit (LimitNOFILE, ulimit -n)";
  }
  return failed(std::move(text), result, when);
}

Result<Hosted> Physical::create(HostedKind kind, uint32_t ordinal, uint64_t address, uint64_t bytes, When when) {
  device::MemoryHandle handle = 0;
  Status result = device_.create(ordinal, bytes, handle);
  if (!result) return no_memory(result, result, bytes, when);
  int fd = -1;
  result = device_.export_memory(handle, fd);
  ipc::UniqueFd owner(result ? fd : -1);
  if (result) result = map(kind, ordinal, address, bytes, handle);
  device_.release(handle);  // the mapping keeps the memory
  if (!result) return no_memory(result, Problem::kNoMemory, bytes, when);
  Hosted memory{next_id(), kind, static_cast<int>(ordinal), address, bytes, "", std::move(owner)};
  if (when == When::kNow) daemon_.memory_add(memory);
  return memory;
}

// A file that is too short would kill whoever reads it.
bool Physical::long_enough(const ipc::UniqueFd& fd, uint64_t bytes) {
  struct stat status {};
  return ::fstat(fd.get(), &status) == 0 && static_cast<uint64_t>(status.st_size) >= bytes;
}

Status Physical::map_host(const Hosted& memory) {
  void* const at = reinterpret_cast<void*>(memory.address);
  if (::mmap(at, memory.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory.fd.get(), 0) == MAP_FAILED) {
    return Problem::kNoMemory;
  }
  return {};
}

// Copies work without, too, but slowly.
void Physical::lock_pages(const Hosted& memory) {
  const Status result = device_.lock_host(reinterpret_cast<void*>(memory.address), memory.bytes, true);
  if (result) return;
  log_(Level::kWarning, "a shadow in host memory cannot be page-locked (" + device_.text(result) +
                            "): snapshots and recoveries take longer");
}

Error Physical::no_pages(const char* where, uint64_t bytes, When when) {
  return failed(std::string(where) + " has no room for a shadow of " + std::to_string(bytes >> 20) +
                    " MiB: " + std::strerror(errno),
                Problem::kNoMemory, when);
}

Result<Hosted> Physical::create_host(HostedKind kind, uint32_t ordinal, uint64_t address, uint64_t bytes) {
  ipc::UniqueFd fd(::memfd_create("xmig-shadow", MFD_CLOEXEC));
  // Pages are taken now: later there is nobody to tell that there are none.
  if (!fd || ::fallocate(fd.get(), 0, 0, static_cast<off_t>(bytes)) != 0) return no_pages("host memory", bytes, When::kNow);
  Hosted memory{next_id(), kind, static_cast<int>(ordinal), address, bytes, kLockedName, std::move(fd)};
  if (const Status result = map_host(memory); !result) {
    return Error{.text = "host memory cannot be mapped", .number = device_.number_of(result)};
  }
  lock_pages(memory);
  daemon_.memory_add(memory);
  return memory;
}

Result<Hosted> Physical::create_memfd(HostedKind kind, uint32_t ordinal, uint64_t address, uint64_t bytes, When when,
                                      ipc::UniqueFd given) {
  ipc::UniqueFd fd = std::move(given);
  const bool kept = fd && long_enough(fd, bytes);
  if (!kept) {
    fd.reset(::memfd_create("xmig-shadow", MFD_CLOEXEC));
    const auto size = static_cast<off_t>(bytes);
    const bool later = when == When::kBeforehand;
    const bool made = fd && (later ? ::ftruncate(fd.get(), size) : ::fallocate(fd.get(), 0, 0, size)) == 0;
    if (!made) return no_pages("host memory", bytes, when);
  }
  Hosted memory{next_id(), kind, static_cast<int>(ordinal), address, bytes, kPlainName, std::move(fd)};
  // It has huge pages, as a rule: to map them takes no time.
  memory.mapped = kept && static_cast<bool>(map_host(memory));
  if (when == When::kNow) daemon_.memory_add(memory);
  return memory;
}

Result<Hosted> Physical::create_file(HostedKind kind, uint32_t ordinal, uint64_t address, uint64_t bytes, When when) {
  const uint64_t id = next_id();
  const std::string name = "shadow-" + std::to_string(::getpid()) + "-" + std::to_string(id);
  constexpr int kFlags = O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW;
  ipc::UniqueFd fd(::openat(directory_.get(), name.c_str(), kFlags, 0600));
  // posix_fallocate() also where the file system itself has no such call.
  errno = fd ? ::posix_fallocate(fd.get(), 0, static_cast<off_t>(bytes)) : errno;
  if (!fd || errno != 0) {
    const Error error = no_pages("the directory", bytes, when);
    if (fd) ::unlinkat(directory_.get(), name.c_str(), 0);
    return error;
  }
  Hosted memory{id, kind, static_cast<int>(ordinal), address, bytes, "file:" + name, std::move(fd)};
  if (when == When::kNow) daemon_.memory_add(memory);
  return memory;
}

Status Physical::adopt(const Hosted& memory) {
  taken(memory.id);
  if (ahead_.erase(memory.id) != 0) return {};
  return map_again(memory);
}

Status Physical::map_again(const Hosted& memory) {
  if (memory.place() != Place::kDevice) {
    if (!long_enough(memory.fd, memory.bytes)) return Problem::kInvalid;
    if (memory.plain()) return {};
    const Status result = map_host(memory);
    if (result) lock_pages(memory);
    return result;
  }
  device::MemoryHandle handle = 0;
  Status result = device_.import_memory(memory.fd.get(), handle);
  if (!result) return result;
  result = map(memory.kind, static_cast<uint32_t>(memory.ordinal), memory.address, memory.bytes, handle);
  device_.release(handle);
  return result;
}

void Physical::map_ahead(Hosted memory, uint32_t devices) {
  const auto ordinal = static_cast<uint32_t>(memory.ordinal);
  if (memory.place() != Place::kDevice || ahead_.contains(memory.id)) return;
  if (ordinal >= devices || !in_place(memory.kind, ordinal, memory.address, memory.bytes)) return;
  // Where something is mapped already the driver maps nothing else.
  if (reserve(devices) && map_again(memory)) ahead_.emplace(memory.id, std::move(memory));
}

void Physical::drop_ahead(uint64_t id) {
  const auto found = ahead_.find(id);
  if (found == ahead_.end()) return;
  let_go(found->second);
  ahead_.erase(found);
}

void Physical::made_ahead(Hosted memory) {
  daemon_.memory_add(memory);
  ahead_.emplace(memory.id, std::move(memory));
}

// That the number is the same does not prove that the memory is.
void Physical::keep_ahead(const std::vector<Hosted>& given) {
  std::map<uint64_t, const Hosted*> wanted;
  for (const Hosted& memory : given) wanted.emplace(memory.id, &memory);
  const auto is_wanted = [&](const Hosted& mapped) {
    const auto found = wanted.find(mapped.id);
    if (found == wanted.end()) return false;
    const Hosted& memory = *found->second;
    return memory.kind == mapped.kind && memory.ordinal == mapped.ordinal && memory.address == mapped.address &&
           memory.bytes == mapped.bytes && memory.name == mapped.name && same_file(memory.fd, mapped.fd);
  };
  for (auto it = ahead_.begin(); it != ahead_.end();) {
    if (is_wanted(it->second)) {
      ++it;
    } else {
      let_go(it->second);
      it = ahead_.erase(it);
    }
  }
}

void Physical::release(Hosted& memory) {
  let_go(memory);
  daemon_.memory_drop(memory.id);
}

void Physical::let_go(Hosted& memory) {
  if (memory.plain() && !memory.mapped) {
    // It is nowhere.
  } else if (memory.place() == Place::kHost) {
    void* const at = reinterpret_cast<void*>(memory.address);
    if (!memory.plain()) device_.unlock_host(at);
    // Back to a reservation, so that nothing else comes to lie there.
    ::mmap(at, memory.bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  } else {
    device_.unmap(memory.address, memory.bytes);
  }
  memory.fd.reset();
}

}  // namespace xmig::server
