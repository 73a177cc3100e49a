// Content that was lost with a device, or is not what most replicas hold, from where it is: in copies in host memory (snapshot/host_copies.h), in the shadows of
// other ranks, which are at the same round (docs/decisions/0048), and last in those of ranks of other nodes, from where the daemon brings
// it (docs/decisions/0079).
//
// A shadow outlives the server that made it, and is mapped here for as long as it is copied from; who has it does nothing. What is
// copied is hashed where it has arrived, and is used only if it is what the own snapshot says. So it does not matter what others' files
// and memory are: what is wrong in them is not found, or not right.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/result.h"
#include "server/channel/replica_sources.h"
#include "server/memory/granules.h"
#include "server/memory/process_memory.h"
#include "server/services.h"
#include "server/snapshot/snapshot_file.h"

namespace xmig::server {

// Error::code where the daemon has gone: another server can try again.
inline constexpr const char* kInterrupted = "interrupted";

class Replicas {
 public:
  Replicas(const Services& services, ProcessMemory& memory, Granules& granules)
      : services_(services), memory_(memory), granules_(granules) {}

  // There is memory for these chunks, which are in the order of their addresses. The error says what nobody has. `sequence`: of the
  // snapshot's last record.
  Result<> fill(const std::vector<ChunkState>& lost, uint64_t sequence);
  // From other ranks only. `what`: of these chunks, for the log.
  struct Brought {
    std::vector<ChunkState> missing;  // what nobody has
    size_t ranks = 0;                 // that could have it
  };
  Result<Brought> bring(const std::vector<ChunkState>& chunks, uint64_t sequence, const char* what);

 private:
  // A chunk that is wanted, and the slot that has the same content.
  struct Match {
    ChunkState chunk;
    uint64_t slot;
  };
  // Each returns what it could not bring.
  std::vector<ChunkState> take_copies(const std::vector<ChunkState>& wanted, uint64_t sequence);
  // Of another node. Interrupted, if the daemon goes.
  Result<std::vector<ChunkState>> take_far(uint32_t rank, const std::vector<ChunkState>& wanted, uint64_t sequence);
  std::vector<ChunkState> take(const ChunksBrought& brought, std::span<const ChunkState> wanted, uint64_t sequence);
  std::vector<ChunkState> take(ReplicaSource& source, const std::vector<ChunkState>& wanted, uint64_t sequence);
  std::vector<ChunkState> take(Hosted& slab, const std::vector<Match>& matches, uint64_t sequence);
  std::vector<ChunkState> take_mapped(Hosted& slab, const std::vector<Match>& matches, uint64_t sequence);
  std::vector<ChunkState> take_plain(const Hosted& slab, const std::vector<Match>& matches, uint64_t sequence);
  std::vector<ChunkState> differing(const std::vector<Match>& matches, uint64_t sequence);

  const Services services_;
  ProcessMemory& memory_;
  Granules& granules_;
};

}  // namespace xmig::server
