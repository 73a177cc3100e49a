#include "client/memory/caching_allocator.h"

#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "client/memory/cached_blocks.h"
#include "ipc/fd.h"

namespace xmig::client {

namespace {

// Libraries that the program has loaded: more have come since we looked last?
std::atomic<uint64_t> looked_at{0};
std::atomic<bool> settled{false};

// --- what PyTorch says, in its own layout: c10/core/CachingDeviceAllocator.h of 2.10 and later -------------------
//
// The name of kRecord below has the types of all of an entry's fields, in their order.

enum class Action : int32_t { kAlloc, kFreeRequested, kFreeCompleted, kSegmentAlloc, kSegmentFree, kSegmentMap, kSegmentUnmap };

struct TraceEntry {
  Action action;
  int8_t device;
  uint64_t address;
  void* context[2];  // a std::shared_ptr
  void* stream;
  uint64_t bytes;
  uint64_t pool[2];  // {0, 0}: not a private one
  // what follows is nobody's business here
};
static_assert(offsetof(TraceEntry, address) == 8 && offsetof(TraceEntry, bytes) == 40 && offsetof(TraceEntry, pool) == 48);

constexpr std::string_view kVtable = "_ZTVN3c104cuda20CUDACachingAllocator6Native22NativeCachingAllocatorE";
constexpr std::string_view kAttach =
    "_ZN3c104cuda20CUDACachingAllocator6Native22NativeCachingAllocator27attachAllocatorTraceTrackerESt8functionIFvRKNS_"
    "22CachingDeviceAllocator10TraceEntryEEE";
constexpr std::string_view kRecord =
    "_ZN3c104cuda20CUDACachingAllocator6Native22DeviceCachingAllocator12record_traceENS_22CachingDeviceAllocator10TraceEn"
    "try6ActionEmmP11CUstream_staSt4pairIyyESt10shared_ptrINS_15GatheredContextEE";
constexpr std::string_view kInitialized = "_ZN3c104cuda20CUDACachingAllocator6Native22NativeCachingAllocator11initializedEv";
constexpr std::string_view kAllocator = "_ZN3c104cuda20CUDACachingAllocator9allocatorE";

// Called with the lock of the device's allocator held.
void heard(const TraceEntry& entry) {
  if (entry.pool[0] != 0 || entry.pool[1] != 0) return;
  CachedBlocks& blocks = cached_blocks();
  switch (entry.action) {
    case Action::kAlloc: return blocks.allocated(entry.address, entry.bytes);
    case Action::kFreeCompleted: return blocks.freed(entry.address, entry.bytes);
    case Action::kSegmentAlloc:
    case Action::kSegmentMap: return blocks.segment(entry.address, entry.bytes);
    case Action::kSegmentFree:
    case Action::kSegmentUnmap: return blocks.segment_gone(entry.address, entry.bytes);
    default: return;
  }
}

// libstdc++'s std::function<void(const TraceEntry&)>, which the program's copies by its own code.
struct Tracker {
  void* storage[2];
  bool (*manager)(Tracker& to, const Tracker& from, int operation);
  void (*invoker)(const Tracker& self, const TraceEntry& entry);
};

bool manage(Tracker& to, const Tracker& from, int operation) {
  enum { kTypeInfo, kPointer, kClone, kDestroy };
  if (operation == kTypeInfo) to.storage[0] = nullptr;
  if (operation == kPointer) to.storage[0] = const_cast<Tracker*>(&from);
  if (operation == kClone) to.storage[0] = from.storage[0];
  return false;
}

void invoke(const Tracker&, const TraceEntry& entry) { heard(entry); }

// --- where it is ---------------------------------------------------------------------------------------------

struct Loaded {
  std::string path;
  uint64_t base = 0;
};

int find_library(dl_phdr_info* info, size_t, void* found) {
  const std::string_view path = info->dlpi_name ? info->dlpi_name : "";
  if (!path.ends_with("/libc10_cuda.so")) return 0;
  *static_cast<Loaded*>(found) = {std::string(path), info->dlpi_addr};
  return 1;
}

int count_libraries(dl_phdr_info* info, size_t, void* count) {
  *static_cast<uint64_t*>(count) = info->dlpi_adds;
  return 1;
}

struct Symbols {
  uint64_t vtable = 0, attach = 0, record = 0, initialized = 0, allocator = 0;
  bool all() const { return vtable && attach && record && initialized && allocator; }
};

// The symbol table of an ELF file, which may be anything.
Symbols symbols_of(std::span<const std::byte> file) {
  Symbols found;
  const auto at = [&]<typename T>(uint64_t offset, uint64_t count, const T*& out) {
    if (offset % alignof(T) != 0 || offset > file.size() || count > (file.size() - offset) / sizeof(T)) return false;
    out = reinterpret_cast<const T*>(file.data() + offset);
    return true;
  };
  const Elf64_Ehdr* head = nullptr;
  const Elf64_Shdr* sections = nullptr;
  if (!at(0, 1, head) || std::memcmp(head->e_ident, ELFMAG, SELFMAG) != 0 || head->e_ident[EI_CLASS] != ELFCLASS64 ||
      head->e_shentsize != sizeof(Elf64_Shdr) || !at(head->e_shoff, head->e_shnum, sections)) {
    return found;
  }
  for (const Elf64_Shdr& section : std::span(sections, head->e_shnum)) {
    if ((section.sh_type != SHT_SYMTAB && section.sh_type != SHT_DYNSYM) || section.sh_link >= head->e_shnum) continue;
    const Elf64_Shdr& strings = sections[section.sh_link];
    const Elf64_Sym* symbols = nullptr;
    const char* names = nullptr;
    const uint64_t count = section.sh_size / sizeof(Elf64_Sym);
    if (!at(section.sh_offset, count, symbols) || !at(strings.sh_offset, strings.sh_size, names)) continue;
    for (const Elf64_Sym& symbol : std::span(symbols, count)) {
      if (symbol.st_shndx == SHN_UNDEF || symbol.st_name >= strings.sh_size) continue;
      const std::string_view name(names + symbol.st_name, ::strnlen(names + symbol.st_name, strings.sh_size - symbol.st_name));
      if (name == kVtable) found.vtable = symbol.st_value;
      if (name == kAttach) found.attach = symbol.st_value;
      if (name == kRecord) found.record = symbol.st_value;
      if (name == kInitialized) found.initialized = symbol.st_value;
      if (name == kAllocator) found.allocator = symbol.st_value;
    }
  }
  return found;
}

Symbols symbols_of(const std::string& path) {
  const ipc::UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat status {};
  if (!fd || ::fstat(fd.get(), &status) != 0 || status.st_size <= 0) return {};
  const auto bytes = static_cast<size_t>(status.st_size);
  void* const file = ::mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, fd.get(), 0);
  if (file == MAP_FAILED) return {};
  const Symbols found = symbols_of(std::span(static_cast<const std::byte*>(file), bytes));
  ::munmap(file, bytes);
  return found;
}

// True: no need to look again.
bool attach() {
  const char* const wanted = std::getenv("XMIG_CACHED_BLOCKS");
  if (wanted && std::strcmp(wanted, "keep") == 0) return true;
  Loaded library;
  if (::dl_iterate_phdr(&find_library, &library) == 0) return false;
  const Symbols symbols = symbols_of(library.path);
  if (!symbols.all()) return true;
  // The program may have another allocator in this one's place: then it is not ours to ask.
  void* const allocator = *reinterpret_cast<void* const*>(library.base + symbols.allocator);
  if (!allocator) return false;
  constexpr uint64_t kBeforeFunctions = 2 * sizeof(void*);
  if (*static_cast<const uint64_t*>(allocator) != library.base + symbols.vtable + kBeforeFunctions) return true;
  // Before it is, there are no devices to track; somebody else in the program takes memory.
  if (!reinterpret_cast<bool (*)(void*)>(library.base + symbols.initialized)(allocator)) {
    looked_at.store(0);
    return false;
  }
  Tracker tracker{{}, &manage, &invoke};
  reinterpret_cast<void (*)(void*, Tracker*)>(library.base + symbols.attach)(allocator, &tracker);
  return true;
}

}  // namespace

// A thread that has the lock of one device's allocator takes those of the others here: no other thread may wait for it
// meanwhile, so one that comes at the same time goes on without.
void watch_caching_allocator() {
  if (settled.load(std::memory_order_acquire)) return;
  uint64_t libraries = 0;
  ::dl_iterate_phdr(&count_libraries, &libraries);
  if (looked_at.exchange(libraries) == libraries) return;
  static std::atomic<bool> looking{false};
  if (looking.exchange(true)) return;
  if (attach()) settled.store(true, std::memory_order_release);
  looking.store(false);
}

}  // namespace xmig::client
