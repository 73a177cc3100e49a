// Chunks of the last snapshot, for a rank of another node that has lost them with its device (docs/decisions/0079): copied out of the
// shadow into memory of the daemon's, which sends it there.
//
// A thread of its own copies, beside a replay that waits for that rank. It keeps a snapshot waiting for one request at most.
#pragma once

#include <atomic>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "common/result.h"
#include "server/channel/requests.h"
#include "server/memory/granules.h"
#include "server/memory/process_memory.h"
#include "server/services.h"
#include "server/snapshot/snapshots.h"
#include "server/snapshot/staging.h"

namespace xmig::server {

class ChunkReader {
 public:
  ChunkReader(const Services& services, ProcessMemory& memory, Granules& granules, Staging& staging, const Snapshots& snapshots)
      : services_(services), memory_(memory), granules_(granules), staging_(staging), snapshots_(snapshots) {}
  ~ChunkReader() { stop(); }
  ChunkReader(const ChunkReader&) = delete;

  // From the control thread. One request at a time: nobody waits for the one before any more.
  void read(ReadChunks request);
  // An answer that is still to come is not sent.
  void stop();

 private:
  void run(const ReadChunks& request);
  std::unordered_map<uint64_t, uint64_t> look(const std::vector<ChunkHash>& chunks) const;
  Result<> copy(uint64_t slot, int to, uint64_t offset, std::vector<StagingCopy::Piece>& from_device) const;

  const Services services_;
  ProcessMemory& memory_;
  Granules& granules_;
  Staging& staging_;
  const Snapshots& snapshots_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;  // the control thread's
};

}  // namespace xmig::server
