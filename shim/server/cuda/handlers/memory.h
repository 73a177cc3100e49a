// The program's memory: what is backed, what is live, what is page-locked. The executor's thread alone, but for what lies under
// ProcessMemory::mutex.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "server/cuda/handlers/session.h"
#include "server/migration/relocation.h"
#include "server/snapshot/snapshots.h"

namespace xmig::server {

class Memory {
 public:
  // `snapshots`, `relocation`: their room is the program's first.
  Memory(const Session& session, Snapshots& snapshots, Relocation& relocation);
  Memory(const Memory&) = delete;

  // Has everything been executed again, up to this record, that the last server had counted of the quota?
  bool quota_repeated(uint64_t sequence) const;
  // Then: what the program has is claimed. False: the quota has no room for it.
  bool keep_to_quota(uint64_t sequence);

  CUresult on_cuMemGetInfo_v2(Record& record);
  CUresult on_xmGrow(Record& record);
  CUresult on_xmShrink(Record& record);
  CUresult on_xmAlloc(Record& record);
  CUresult on_xmFree(Record& record);
  CUresult on_xmDiscard(Record& record);
  CUresult on_xmReuse(Record& record);
  CUresult on_xmPin(Record& record);
  CUresult on_xmUnpin(Record& record);
  CUresult on_xmNameNumbers(Record& record);
  CUresult on_xmForgetNumbers(Record& record);

 private:
  uint64_t shadow_bytes(uint32_t ordinal);
  uint64_t free_bytes(uint32_t ordinal);
  bool within_quota(uint64_t sequence, uint32_t ordinal, uint64_t address, uint64_t bytes);
  CUresult grow(uint32_t ordinal, uint64_t address, uint64_t bytes);
  void wait_for_room(uint32_t ordinal, uint64_t wanted, uint64_t coming);
  bool gives_up_standbys(uint32_t ordinal, uint64_t wanted);

  const DriverTable& driver_;
  Contexts& contexts_;
  Job& job_;
  StandbyMemory& standby_memory_;
  Quota& quota_;
  ProcessMemory& memory_;
  Objects& objects_;
  Current& current_;
  Execution& execution_;
  Snapshots& snapshots_;
  Relocation& relocation_;
};

}  // namespace xmig::server
