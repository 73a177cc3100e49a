// The shadow goes to another place while the program runs: off the device, for a suspension (docs/decisions/0009) or a move
// between devices that cannot reach each other; or to this device, after a move or a resumption (docs/decisions/0008).
//
// Room for it is made, then content is brought there, out of the shadow and never out of live memory. The next snapshot finds it
// there (snapshot/staging.h), and has to copy no more than what has changed since the last one.
//
// Lock order: mutex_, then what staging.h says.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "ipc/fd.h"
#include "server/channel/interrupts.h"
#include "server/memory/granules.h"
#include "server/memory/process_memory.h"
#include "server/services.h"
#include "server/snapshot/snapshots.h"
#include "server/snapshot/staging.h"

namespace xmig::server {

class Relocation {
 public:
  enum class Purpose { kSuspension, kMoveThroughHost, kSettling };
  // ns: then a snapshot that is due copies the rest of what settles itself.
  static constexpr uint64_t kPatienceToSettle = 2'000'000'000;

  Relocation(const Services& services, ProcessMemory& memory, Granules& granules, Staging& staging,
             const Snapshots& snapshots, Interrupts& interrupts);
  ~Relocation();
  Relocation(const Relocation&) = delete;

  // From any thread. What was under way is given up, and what was staged.
  void start(Purpose purpose, Place to, uint64_t bytes_hint, std::vector<ipc::UniqueFd> room);
  // Nothing is staged any more after this; what has been is kept for a snapshot, or given up.
  void end(bool drop);

  // The executor's thread. After a move or a resumption the shadow comes to this device: from then on (ns); 0: not.
  void settle_at(uint64_t time) { settle_at_ = time; }
  uint64_t settle_at() const { return settle_at_; }
  // False: another relocation is under way, which wants a snapshot anyway.
  bool begin_settling();
  bool settling() const { return settling_; }
  // A snapshot has put the shadow where it belongs, or the program needs the room.
  void end_settling();

 private:
  class Transfer;

  const Services services_;
  ProcessMemory& memory_;
  Granules& granules_;
  Staging& staging_;
  const Snapshots& snapshots_;
  Interrupts& interrupts_;
  uint64_t settle_at_ = 0;  // the executor's
  bool settling_ = false;   // likewise: it is on its way
  std::mutex mutex_;
  std::unique_ptr<Transfer> transfer_;  // guarded by mutex_
};

}  // namespace xmig::server
