// Content that comes before its job: of a program that moves here from another node, and still runs there
// (docs/decisions/0100).
//
// In rounds. Each is a snapshot of the program, and the memory in which its chunks lie. Memory is made for it on the devices, and
// chunks that are not known to be there are copied and hashed. When the job comes, as a resumption, it is given that memory, and
// what is known of it. Whatever else it has is brought then: without a round, that is all of it.
//
// All calls are the control thread's, and there is no job meanwhile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "common/result.h"
#include "device/runtime.h"
#include "server/channel/daemon.h"
#include "server/channel/hosted.h"
#include "server/channel/requests.h"
#include "server/contexts.h"
#include "server/memory/hosting.h"
#include "server/memory/physical.h"
#include "server/memory/staging_copy.h"
#include "server/migration/incoming.h"
#include "server/snapshot/snapshot_file.h"

namespace xmig::server {

class Ahead {
 public:
  Ahead(device::Runtime& device, Contexts& contexts, Physical& physical)
      : device_(device),
        contexts_(contexts),
        physical_(physical),
        hosting_(physical, Physical::When::kBeforehand),
        staging_copy_(device, [&contexts](uint32_t ordinal) { contexts.use(ordinal); }) {}
  Ahead(const Ahead&) = delete;

  // A round: what the one before it has not copied yet is not.
  void open(RoundAhead round);
  bool is_open() const { return round_.has_value(); }
  // Has there been a round?
  bool used() const { return report_.number != 0; }
  void add(Hosted source) { sources_.insert_or_assign(source.address, std::move(source)); }
  // All of it has been named. Returns its snapshot. The error's code is `no_room`, `bad_snapshot` or `failed`.
  Result<SnapshotContent> begin();
  // Is there something left to copy?
  bool pending() const { return next_ < wanted_.size(); }
  // Some of it.
  Result<> step();
  // What the round has done. What it has copied from is given back.
  RoundReport end();

  // The job is here, with `given`, which this memory follows, with numbers from `first_id` on.
  void hand_over(std::vector<Hosted>& given, uint64_t first_id, Incoming& incoming);

 private:
  Result<> check(const SnapshotContent& content) const;
  Result<> make(const SnapshotContent& content);
  Result<> compare(const std::vector<ChunkState>& chunks);
  Result<> clear(const std::vector<uint64_t>& granules);
  std::optional<StagingCopy::Piece> source_of(const ChunkState& chunk) const;
  void forget();

  device::Runtime& device_;
  Contexts& contexts_;
  Physical& physical_;
  Hosting hosting_;
  StagingCopy staging_copy_;
  std::map<uint64_t, uint64_t> known_;  // hashes of the devices' granules, by address
  std::optional<RoundAhead> round_;
  std::map<uint64_t, Hosted> sources_;  // of the round, by address
  std::vector<std::pair<ChunkState, StagingCopy::Piece>> wanted_;  // by address
  size_t next_ = 0;  // of these
  uint64_t began_ = 0;
  RoundReport report_;
};

}  // namespace xmig::server
