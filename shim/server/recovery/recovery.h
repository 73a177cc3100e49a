// The job of a server that is gone, or that has given it away, continued here.
//
// Memory is mapped, the last snapshot's objects are made again, its content is put back, and then the records since are simply
// executed (replay.h). What the program has already is compared (Record::replied, CopyState, CallbackState).
//
// There are three ways to the content, each a path of its own:
//   from the shadow, after a server that was lost between two snapshots: chunks that are not as the snapshot says come from there. If a
//     device was lost with its memory, what lay there is made again, and its content comes from other ranks (replicas.h);
//   from memory, after one that was lost while it took a snapshot (`committing`): the device memory is the state at that snapshot, and the
//     shadow is not to be trusted. Only the objects are brought forward to it, and the snapshot is taken again;
//   from elsewhere, for a job that comes without its device memory (migration/incoming.h).
//
// What lies in this folder: recovery, replicas, and replay with replay_times (the only state: how far it is, the executor's thread's). What a
// recovery makes belongs to ProcessMemory, Snapshots and the executor, through which it works (Execution). A recovery of several
// processes would agree on a snapshot before these paths, and on their entry.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "common/result.h"
#include "server/channel/entry.h"
#include "server/channel/requests.h"
#include "server/execution.h"
#include "server/memory/adoption.h"
#include "server/memory/granules.h"
#include "server/memory/process_memory.h"
#include "server/migration/incoming.h"
#include "server/recovery/replicas.h"
#include "server/services.h"
#include "server/snapshot/snapshot_file.h"
#include "server/snapshot/snapshots.h"

namespace xmig::server {

class Recovery {
 public:
  Recovery(const Services& services, ProcessMemory& memory, Granules& granules, Snapshots& snapshots, Adoption& adoption,
           Incoming& incoming, Execution& execution)
      : services_(services),
        memory_(memory),
        granules_(granules),
        snapshots_(snapshots),
        adoption_(adoption),
        incoming_(incoming),
        execution_(execution),
        replicas_(services, memory, granules) {}

  // After a server that is gone. All is done that writes only what is this server's; then its `entry` is waited for, if that is
  // not open yet. `given` is what the daemon holds.
  Result<> follow(std::vector<Hosted> given, const Assign& assignment, Entry& entry);
  // A job that comes without its device memory. `awaited`: if given, nothing is executed before it returns, and no communicator is made.
  Result<> arrive(std::vector<Hosted> given, const std::function<Result<>()>& awaited);

 private:
  // What there is to recover.
  struct Found {
    SnapshotContent content;
    uint64_t tail = 0, executed = 0;
    uint64_t committing = 0;  // JournalHeader::committing
    uint64_t round = 0;       // that it is of, with the other ranks of a group
    std::vector<ChunkState> lost;       // whose place in the shadow went with a device
    std::vector<ChunkState> differing;  // from what most replicas hold, with the hash of that
    // Was a snapshot being taken, or had just been, so that memory is its state? And is it to be taken again?
    bool memory_is_state() const { return committing != 0 && committing - 1 >= content.position; }
    bool snapshot_again() const { return committing != 0 && committing - 1 > content.position; }
  };
  // When what was done, for the log.
  struct Times {
    uint64_t began = 0, mapped = 0, made = 0;
  };

  Result<> check_journal() const;
  Result<Found> look() const;
  void find_unfinished(Found& found, uint64_t decided) const;
  void find_differing(Found& found, const Assign& assignment) const;
  Result<> check_reach(const Found& found) const;
  // `entry`: to be waited for before this server writes what is not its own; null if it has been entered.
  Result<> from_shadow(Found& found, std::vector<Hosted> given, Entry* entry, Times& times);
  Result<> from_memory(Found& found, std::vector<Hosted> given, Entry* entry, Times& times);
  // `joins`: communicators are made as soon as they are known.
  Result<> from_elsewhere(Found& found, std::vector<Hosted> given, Times& times, bool joins);

  Result<> enter(Entry& entry, const Times& times);
  void begin_to_write();
  Result<> adopt(std::vector<Hosted> given);
  void find_lost(Found& found);
  Result<> replace_lost_memory(const SnapshotContent& content, bool entered);
  Result<std::vector<Extent>> back(const SnapshotContent& content);
  Result<> make_objects(Found& found, bool joins = true);
  Result<> restore_live(const SnapshotContent& content);
  void discard_what_was_not_kept();
  Result<> keep_copies(const Found& found);
  Result<> restore_memory(const std::vector<Extent>& fresh, const Found& found);
  Result<> replace_differing(const Found& found);
  Result<> restored(const Found& found, const Times& times);
  Result<> take_snapshot_again(const Found& found);
  void hand_to_execution(const Found& found, std::optional<Delivery> deliver, std::optional<Careful> careful);

  const Services services_;
  ProcessMemory& memory_;
  Granules& granules_;
  Snapshots& snapshots_;
  Adoption& adoption_;
  Incoming& incoming_;
  Execution& execution_;
  Replicas replicas_;
};

}  // namespace xmig::server
