// The program's handles, and how to make their objects again.
//
// Handles are numbers chosen by the client: the tables here are flat. Each object keeps the record that created it and
// the records that set something on it.
//
// What lies in this folder: objects, loading and linker (how modules are made), placed_variables and variable_directory (their
// variables where a driver chooses the address). All of it is the executor's thread's; handlers change it, a snapshot reads it.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "device/device.h"
#include "journal/layout.h"
#include "server/records/record.h"
#include "server/records/stored_records.h"

namespace xmig::server {

inline constexpr uint32_t kMaxStreams = 1u << 16;
inline constexpr uint32_t kMaxModules = 1u << 16;
inline constexpr uint32_t kMaxGraphs = 1u << 20;
using journal::kKernelBits;
using journal::kMaxKernels;

struct Owner {
  uint32_t context = 0;
  uint16_t ordinal = 0;
};

struct Stream {
  CUstream real = nullptr;
  Owner owner;
  StoredRecords::Kept creation;
};

struct Event {
  CUevent real = nullptr;
  Owner owner;
  StoredRecords::Kept creation;
  uint64_t recorded = 0;              // sequence of the last record of it
  std::optional<CUstream> publisher;  // the stream that publishes its completion
};

struct Kernel {
  CUfunction real;
  std::optional<uint32_t> parameter_bytes;  // once somebody has requested
  bool loaded = false;
};

struct Module {
  CUmodule real = nullptr;
  Owner owner;
  uint64_t image = 0;
  std::vector<Kernel> kernels;
  std::vector<device::Global> globals;
  std::vector<std::byte> description;  // module_info.h
  StoredRecords::Kept creation;
  std::map<std::pair<uint64_t, uint64_t>, StoredRecords::Kept> settings;  // by what is set
};

struct GraphExec {
  bool is_there() const { return image != 0; }

  CUgraphExec real = nullptr;  // null: at a recovery its memory or its kernels were gone; it is made when it is launched
  CUgraph graph = nullptr;  // what it was made of, if it has conditions: they belong to that
  Owner owner;
  uint64_t image = 0;
  uint64_t flags = 0;
  bool touches_host = false;  // a kernel of it got an address of the program's page-locked memory
  StoredRecords::Kept creation;
};

inline constexpr unsigned int kPinFlags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;

// Page-locked memory that the devices have been informed of.
struct Pin {
  uint64_t bytes = 0;
  Owner owner;
  StoredRecords::Kept creation;
};

// Numbers of optimizer state (journal/numbers.h).
struct Named {
  uint64_t bytes = 0;
  StoredRecords::Kept creation;
};

// A limit that the program has set in one of its contexts. There is one real context, so it holds for all of them.
struct Limit {
  Owner owner;
  size_t before = 0;  // what it was, and is again when the context is reset
  StoredRecords::Kept creation;
};

// A device that reaches another one's memory, as the program requested it in a context.
struct PeerKey {
  uint32_t context;  // the asking one; 0, as below: for as long as the job lives
  uint32_t peer;     // the one whose memory is meant
  uint32_t device, memory;  // their ordinals
  auto operator<=>(const PeerKey&) const = default;
};

// A flat table of objects that come and go; `real` says whether there is one, or they say it themselves.
template <typename T>
class Table {
 public:
  explicit Table(uint32_t limit) : limit_(limit) {}
  T* find(uint32_t index) { return index < slots_.size() && is_there(slots_[index]) ? &slots_[index] : nullptr; }
  // An empty slot; nullptr if it is taken, or the number is too large.
  T* place(uint32_t index) {
    if (index >= limit_ || find(index)) return nullptr;
    if (index >= slots_.size()) slots_.resize(std::min<size_t>(limit_, std::max<size_t>(index + 1, slots_.size() * 2)));
    return &slots_[index];
  }
  void erase(uint32_t index) { slots_[index] = T{}; }
  template <typename F>
  void for_each(F&& f) {
    for (uint32_t i = 0; i < slots_.size(); ++i) {
      if (is_there(slots_[i])) f(i, slots_[i]);
    }
  }

 private:
  static bool is_there(const T& slot) {
    if constexpr (requires { slot.is_there(); }) return slot.is_there();
    else return slot.real;
  }

  uint32_t limit_;
  std::vector<T> slots_;
};

struct Objects {
  StoredRecords records;  // of all of the following
  Table<Stream> streams{kMaxStreams};
  Table<Event> events{journal::kMaxEvents};
  Table<Module> modules{kMaxModules};
  Table<GraphExec> graphs{kMaxGraphs};
  std::map<uint64_t, Pin> pins;  // by address
  std::map<uint64_t, Named> numbers;  // by address; no two overlap, and all of it is live
  std::map<std::pair<uint16_t, uint32_t>, Limit> limits;  // by ordinal and CUlimit
  std::map<PeerKey, StoredRecords::Kept> peers;

  // Of what is named, whatever has bytes of this.
  void forget_numbers(uint64_t address, uint64_t bytes) {
    if (numbers.empty()) return;
    auto at = numbers.upper_bound(address);
    if (at != numbers.begin() && address - std::prev(at)->first < std::prev(at)->second.bytes) --at;
    while (at != numbers.end() && (at->first <= address || at->first - address < bytes)) at = numbers.erase(at);
  }

  Kernel* kernel(uint32_t index) {
    Module* const module = modules.find(index >> kKernelBits);
    const uint32_t number = index & (kMaxKernels - 1);
    return module && number < module->kernels.size() ? &module->kernels[number] : nullptr;
  }
  // The program's handle becomes the driver's; of streams Streams::translate(), for it is what the record uses.
  bool translate(uint64_t handle, CUevent* real) {
    const Event* const event =
        journal::handle_is(handle, journal::Kind::kEvent) ? events.find(journal::handle_index(handle)) : nullptr;
    if (event) *real = event->real;
    return event != nullptr;
  }
  bool translate(uint64_t handle, CUfunction* real) {
    const Kernel* const known =
        journal::handle_is(handle, journal::Kind::kFunction) ? kernel(journal::handle_index(handle)) : nullptr;
    if (known) *real = known->real;
    return known != nullptr;
  }
};

}  // namespace xmig::server
