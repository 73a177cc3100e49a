#include "client/memory/cached_blocks.h"

#include <sys/mman.h>

#include <algorithm>

#include "client/bootstrap/message.h"
#include "client/journal/append.h"
#include "client/memory/memory_heap.h"
#include "client/memory/named_numbers.h"
#include "journal/layout.h"
#include "records.h"

namespace xmig::client {

namespace {

using journal::kDeviceBase;
using journal::kGranule;

constexpr uint64_t kGranules = journal::kMaxDevices * (journal::kDeviceSpan / kGranule);
constexpr uint64_t kTableBytes = kGranules * sizeof(uint32_t);  // of addresses; pages come as they are touched
constexpr uint64_t kEnd = kDeviceBase + kGranules * kGranule;

constexpr bool on_devices(uint64_t address, uint64_t bytes) {
  return address >= kDeviceBase && address < kEnd && bytes <= kEnd - address;
}
constexpr uint64_t index_of(uint64_t address) { return (address - kDeviceBase) / kGranule; }
constexpr uint64_t address_of(uint64_t index) { return kDeviceBase + index * kGranule; }

// Collects granules that follow one another into one record.
class Run {
 public:
  explicit Run(Op op) : op_(op) {}
  ~Run() { tell(); }
  Run(const Run&) = delete;

  void add(uint64_t index) {
    if (count_ != 0 && index != first_ + count_) tell();
    if (count_++ == 0) first_ = index;
  }
  void forget() { count_ = 0; }

 private:
  // One that fails belongs to a job that is lost, which the program hears from its next call.
  void tell() {
    if (count_ == 0) return;
    const Args_xmDiscard args{.address = address_of(first_), .bytes = count_ * kGranule};
    static_assert(sizeof(args) == sizeof(Args_xmReuse));
    append(op_, &args, sizeof(args));
    count_ = 0;
  }

  const Op op_;
  uint64_t first_ = 0, count_ = 0;
};

}  // namespace

CachedBlocks& cached_blocks() {
  static auto& blocks = *new CachedBlocks;
  return blocks;
}

uint32_t* CachedBlocks::counts() {
  if (counts_ || given_up_) return counts_;
  void* const table =
      ::mmap(nullptr, kTableBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (table == MAP_FAILED) {
    given_up_ = true;
  } else {
    counts_ = static_cast<uint32_t*>(table);
  }
  return counts_;
}

void CachedBlocks::segment(uint64_t address, uint64_t bytes) {
  if (bytes == 0 || address % kGranule != 0 || bytes % kGranule != 0 || !on_devices(address, bytes)) return;
  const std::lock_guard guard(lock_);
  uint32_t* const table = counts();
  if (!table) return;
  const uint64_t first = index_of(address), end = first + bytes / kGranule;
  lowest_ = std::min(lowest_, first);
  highest_ = std::max(highest_, end);
  Run discarded(Op::xmDiscard);
  for (uint64_t i = first; i < end; ++i) {
    table[i] = 1;
    discarded.add(i);
  }
}

// What becomes of the memory the server hears from its owner: an xmFree ends everything that was reported about it.
void CachedBlocks::segment_gone(uint64_t address, uint64_t bytes) {
  if (bytes == 0 || !on_devices(address, bytes)) return;
  const std::lock_guard guard(lock_);
  if (!counts_) return;
  const uint64_t end = index_of(address + bytes - 1) + 1;
  for (uint64_t i = index_of(address); i < end; ++i) counts_[i] = 0;
  named_numbers().forget(address, bytes);
}

// Each granule that the block has bytes of, and how many.
template <typename OneGranule>
void CachedBlocks::change(Op op, uint64_t address, uint64_t bytes, OneGranule&& change) {
  if (bytes == 0 || !on_devices(address, bytes)) return;
  const uint64_t end = std::min(address + round_to_units(bytes), kEnd);
  const std::lock_guard guard(lock_);
  if (!counts_) return;
  Run reported(op);
  for (uint64_t at = address; at < end;) {
    const uint64_t index = index_of(at);
    const uint64_t next = std::min(address_of(index + 1), end);
    const Change done = counts_[index] == 0 ? Change::kNone : change(counts_[index], static_cast<uint32_t>(next - at));
    if (done == Change::kUnsound) {
      reported.forget();
      return give_up();
    }
    if (done == Change::kReported) reported.add(index);
    at = next;
  }
}

void CachedBlocks::allocated(uint64_t address, uint64_t bytes) {
  change(Op::xmReuse, address, bytes, [](uint32_t& count, uint32_t used) {
    const bool first = count == 1;
    count += used;
    if (count - 1 > kGranule) return Change::kUnsound;
    return first ? Change::kReported : Change::kNone;
  });
}

void CachedBlocks::freed(uint64_t address, uint64_t bytes) {
  if (on_devices(address, bytes)) named_numbers().forget(address, round_to_units(bytes));
  change(Op::xmDiscard, address, bytes, [](uint32_t& count, uint32_t used) {
    if (count - 1 < used) return Change::kUnsound;
    count -= used;
    return count == 1 ? Change::kReported : Change::kNone;
  });
}

bool CachedBlocks::name(const journal::NamedNumbers& numbers) {
  if (!on_devices(numbers.address, numbers.bytes)) return false;
  const std::lock_guard guard(lock_);
  if (!counts_) return false;
  const uint64_t end = index_of(numbers.address + numbers.bytes - 1) + 1;
  for (uint64_t i = index_of(numbers.address); i < end; ++i) {
    if (counts_[i] <= 1) return false;  // no block of anybody's has bytes of it
  }
  return named_numbers().name(numbers);
}

// lock_ is held.
void CachedBlocks::give_up() {
  named_numbers().forget_all();
  Run reused(Op::xmReuse);
  for (uint64_t i = lowest_; i < highest_; ++i) {
    if (counts_[i] == 0) continue;
    counts_[i] = 0;
    reused.add(i);
  }
  ::munmap(counts_, kTableBytes);
  counts_ = nullptr;
  given_up_ = true;
  say("what the program's caching allocator says of its memory does not add up: all of it counts as in use");
}

}  // namespace xmig::client
