// The last snapshot's content in memory of its own, for a checkpoint (docs/decisions/0060).
//
// It is copied out of the shadow, never out of live memory, into descriptors that nobody else here has, and a snapshot's file is written
// that names the places there. With the images, and the program as it stood at this snapshot, that is the process. So the program stands
// still for a snapshot and for its own dump, and not for the copies.
//
// Of what the shadow has had since an earlier copy by this server, nothing is copied: it gets places in pieces that have no memory, and the
// daemon has it (docs/decisions/0068).
//
// A lossy copy has the numbers that the program's framework has named with fewer bits (rounding.h). That is done in the copy, behind the
// program, and the chunk's hash there is that of what the copy holds. Such a chunk is copied each time, and an exact copy never
// counts on one that may have been rounded (docs/decisions/0096).
//
// Slots are filled in place, so the next snapshot waits for the copies: the schedule puts it off, and one that cannot be put off stands
// still until they are made.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "ipc/fd.h"
#include "server/memory/granules.h"
#include "server/memory/process_memory.h"
#include "server/services.h"
#include "server/snapshot/snapshots.h"
#include "server/snapshot/staging.h"

namespace xmig::server {

class SnapshotCopy {
 public:
  SnapshotCopy(const Services& services, ProcessMemory& memory, Granules& granules, Staging& staging, const Snapshots& snapshots)
      : services_(services), memory_(memory), granules_(granules), staging_(staging), snapshots_(snapshots) {}
  ~SnapshotCopy() { stop(); }
  SnapshotCopy(const SnapshotCopy&) = delete;

  // From the control thread. Returns when no other snapshot can come before the copies. `since`: the
  // snapshot whose copy the daemon has, of this server; 0: none. `keep_bits`: of named numbers; 0: it is exact. `room`: empty memory of
  // kPlainBytes each.
  void make(uint64_t number, uint64_t since, uint32_t keep_bits, std::vector<ipc::UniqueFd> room);
  // It is given up.
  void stop();
  bool under_way() const { return under_way_; }

 private:
  // The daemon has it already; it is copied; it is, and has numbers that are rounded there.
  enum Kind : uint8_t { kKnown, kCopied, kRounded, kKinds };
  // Where content of one kind is copied to: one descriptor; or none, and the daemon has it all.
  struct Slab {
    uint32_t ordinal;
    uint64_t address, bytes;
    Kind kind;
    ipc::UniqueFd fd;
  };
  // Named numbers of one chunk, and where that is in the copy.
  struct Numbers {
    size_t chunk;
    uint64_t offset, bytes;  // in the chunk
    journal::NumberType type;
    int to = -1;
    uint64_t at = 0;
  };
  struct Copies {
    std::vector<uint64_t> slots;  // in the copy, of each chunk of the snapshot; 0: zeros
    std::vector<Numbers> numbers;  // by chunk
    RoundedByType rounded{};
    std::vector<Slab> slabs;
    std::vector<StagingCopy::Piece> from_device;
    struct Plain {
      Shadow::PlainAt from;
      int to;
      uint64_t offset;
    };
    std::vector<Plain> from_plain;
    uint64_t bytes = 0;
  };

  // The device's piece that is being filled, or made of places.
  struct Filling {
    std::optional<size_t> slab;
    uint64_t used = 0;  // bytes of it
    uint64_t left = 0;  // chunks to come
  };
  struct ByDevice {
    std::array<std::array<Filling, journal::kMaxDevices>, kKinds> filling{};
    std::array<uint64_t, journal::kMaxDevices> end{};  // where the next piece begins; 0: there is none yet
  };

  void run(uint64_t number, uint64_t since, uint32_t keep_bits, std::vector<ipc::UniqueFd> room);
  Result<SnapshotContent> copy(uint64_t number, uint64_t since, uint32_t keep_bits, Copies& copies, std::vector<ipc::UniqueFd> room);
  Result<ipc::UniqueFd> finish(uint32_t keep_bits, Copies& copies, SnapshotContent& content);
  Result<> find_numbers(const SnapshotContent& content, Copies& copies) const;
  Result<> place(uint64_t since, Copies& copies, std::vector<ipc::UniqueFd> room);
  static Result<> begin_slab(uint32_t ordinal, Kind kind, ByDevice& by_device, Copies& copies, std::vector<ipc::UniqueFd>& room);
  Result<> fill(const Copies& copies);
  Result<> round(uint32_t keep_bits, Copies& copies, SnapshotContent& content);
  static Result<ipc::UniqueFd> describe(SnapshotContent& content, const Copies& copies);

  const Services services_;
  ProcessMemory& memory_;
  Granules& granules_;
  Staging& staging_;
  const Snapshots& snapshots_;
  std::unordered_map<uint64_t, uint64_t> rounded_;  // the last snapshot in whose copy this chunk was rounded; the thread's
  std::atomic<bool> under_way_{false}, begun_{false}, stopping_{false};
  std::thread thread_;  // the control thread's
};

}  // namespace xmig::server
