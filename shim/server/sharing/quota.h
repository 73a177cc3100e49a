// The memory quota that all processes of a job share on a device (xmigd/memory/quota.py has the same layout).
//
// The daemon makes one page for each job with a quota: a sealed file with a slot for each device of each process. A process's server
// writes into its slots how much of the device its program has; all slots of a device together are never more than the quota.
//
// Who may write: the daemon, and the job's servers, to which alone the page is passed. A program never has it. A kernel of the `cpu`
// device, which runs in its server, could write it, as it could change whatever the server counts; the page is its own job's only, so that no
// other job's quota is in its reach.
//
// Invariants:
//   A claim is one word, stored at once: a server that is killed has made it or has not, and nothing is left to be repaired.
//   Who stores a larger claim has the file's lock meanwhile. The kernel's lock: it ends with the process that has it.
//   A word says after which record it holds. A server that takes over executes older records again without changing it: what the server before
//   it had given back may be somebody else's by now, and what that one had claimed is still claimed.
//
// The executor's thread alone, but for use().
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "common/result.h"
#include "journal/layout.h"
#include "journal/mapping.h"

namespace xmig::server {

namespace quota {

inline constexpr uint64_t kMagic = 0x31746f7571676d78;
inline constexpr uint32_t kSlots = 1023;
inline constexpr uint32_t kSequenceBits = 40;
inline constexpr uint64_t kMostGranules = (1ull << (64 - kSequenceBits)) - 1;

struct alignas(64) PageHeader {
  uint64_t magic;
  std::atomic<uint32_t> used;  // slots below this number may be in use. Written by the daemon
};

struct alignas(64) Slot {
  std::atomic<uint32_t> state;   // 0: free. Written by the daemon, as is the rest but for the claim
  uint32_t ordinal;              // of the process's devices
  std::atomic<uint64_t> device;  // the same for all slots of one device, and no other
  std::atomic<uint64_t> claim;   // granules, above the last bits of the sequence number of the record after which that holds
  uint8_t process[16];
};

struct Page {
  PageHeader header;
  Slot slots[kSlots];
};
static_assert(sizeof(Slot) == 64 && sizeof(Page) == 64 << 10);

}  // namespace quota

class Quota {
 public:
  // Before there is an executor. `file` stays open, and is not opened or closed again in this process: that would end the lock. `slots`:
  // by ordinal.
  Result<> use(int file, std::span<const uint64_t> slots, uint64_t bytes);

  bool there_is() const { return static_cast<bool>(page_); }
  // Of each device, for all of the job's processes; 0: all there is.
  uint64_t bytes() const { return bytes_; }
  // What is left of it for the job.
  uint64_t left(uint32_t ordinal) const;

  // Of this process, in bytes.
  uint64_t claimed(uint32_t ordinal) const;

  // Was what this record changes counted by the server before this one?
  bool counted(uint32_t ordinal, uint64_t sequence) const { return sequence <= counted_[ordinal]; }
  // The program is to have so many bytes of the device after this record. False: that is more than the quota has, and nothing has changed.
  bool claim(uint32_t ordinal, uint64_t bytes, uint64_t sequence);
  // It has so many, which are not more than were claimed.
  void set(uint32_t ordinal, uint64_t bytes, uint64_t sequence);
  // This server goes on after this record, where the program has so many.
  void take_over(uint32_t ordinal, uint64_t bytes, uint64_t sequence);
  // Everything up to this record has been executed: a claim that is older than its word can say is stored anew.
  void refresh(uint64_t sequence);

 private:
  quota::Page& page() const { return *reinterpret_cast<quota::Page*>(page_.data()); }
  quota::Slot& mine(uint32_t ordinal) const { return page().slots[slots_[ordinal]]; }
  uint64_t others(uint32_t ordinal) const;

  int file_ = -1;
  uint64_t bytes_ = 0;
  journal::Mapping page_;
  std::array<uint32_t, journal::kMaxDevices> slots_{};
  uint32_t devices_ = 0;
  std::array<uint64_t, journal::kMaxDevices> counted_{};  // the sequence number of the last record whose change was
  std::array<uint64_t, journal::kMaxDevices> stored_{};   // that of the last claim
};

}  // namespace xmig::server
