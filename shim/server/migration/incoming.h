// A job that comes without its device memory: a move, which is a planned recovery on another device, with memory that was copied
// before (docs/decisions/0008); or a resumption (0009).
//
// The target of a move copies what the source's last snapshot holds out of the source's shadow, which is mapped here at its own
// addresses, and never touches what is the program's or the source's until it takes the job. The source may take its next snapshot at
// any time, and write into the shadow while it is read. That is no harm: what counts is the hash of what has arrived, and what
// is not as the snapshot says is copied again in a later round, in the last resort when the source stands still.
//
// All calls are made on one thread, which becomes the executor's.
#pragma once

#include <cstdint>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "common/result.h"
#include "server/memory/adoption.h"
#include "server/memory/granules.h"
#include "server/memory/process_memory.h"
#include "server/migration/arrival.h"
#include "server/services.h"
#include "server/snapshot/snapshot_file.h"
#include "server/snapshot/preload.h"

namespace xmig::server {

class Incoming {
 public:
  Incoming(const Services& services, ProcessMemory& memory, Granules& granules, Adoption& adoption, Preload& preload)
      : services_(services), memory_(memory), granules_(granules), adoption_(adoption), preload_(preload) {}
  Incoming(const Incoming&) = delete;

  // A move, in this order; then the recovery takes over. If one of them fails, the job is as it was. `first_id`: of the memory
  // that is made here.
  Result<> begin_move(uint64_t first_id);
  Result<> import(Hosted memory);
  void forget(uint64_t id);
  Result<> round(uint64_t number, uint64_t snapshot);
  // A resumption: what is on its devices already (ahead.h), hashes by address, of which the last round has copied so many bytes;
  // and what can be done while descriptors still come in. `all`: of its content nothing has come ahead.
  void know(const std::map<uint64_t, uint64_t>& hashes, uint64_t bytes);
  void prepare_resumption(bool all);

  // The recovery, with what the last snapshot holds: memory for it, its content. `sequence`: of its last record.
  void begin_arrival(const SnapshotContent& content);
  Result<> make_missing(const SnapshotContent& content);
  Result<> fill(const std::vector<ChunkState>& chunks, uint64_t sequence);

  // What was known of the memory is no longer so: the job is executed. Did it come without its memory?
  bool end();
  // Nothing arrives any more: the server ends.
  void give_up() { arrival_.reset(); }

 private:
  struct Known {  // of this device's memory
    uint64_t address;
    std::optional<uint64_t> hash;
  };
  Result<> claim(const SnapshotContent& content);
  // A round under way.
  struct Round;

  std::optional<SnapshotContent> read_snapshot(uint64_t at_least) const;
  std::optional<uint64_t> known_hash(std::vector<Known>::const_iterator& at, uint64_t address) const;
  Result<> compare(Round& round);
  Result<> copy(Round& round);
  void make_buffers();
  void end_arrival();

  const Services services_;
  ProcessMemory& memory_;
  Granules& granules_;
  Adoption& adoption_;
  Preload& preload_;
  bool comes_ = false;
  std::vector<Known> known_;   // of the last round's chunks, in their order
  std::future<void> buffers_;  // being made, for what arrives
  std::unique_ptr<Arrival> arrival_;
  uint64_t began_ = 0;          // what is missing, to come
  uint64_t arrived_bytes_ = 0;  // of its content, since the program stopped, beside the rest
};

}  // namespace xmig::server
