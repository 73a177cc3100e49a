// The last snapshot, and how the next one takes its place: see docs/architecture.md.
//
// The shadow is updated in place. That is safe because, from `committing` to the store of `snapshot`, the device memory itself
// is the state: a server that dies in between is followed by one that takes the same snapshot again. So before the first
// byte of the shadow changes, everything that the snapshot needs must be there: slots, and pages for its file.
//
// What lies in this folder: snapshot_file (what a snapshot is), snapshots (how one is taken), schedule, snapshot_policy and stall (when), staging
// (where its content goes, and what was brought there ahead), host_copies (of what no other device has), snapshot_copy
// (of all of it, for a checkpoint), preload (code that it needs, ahead of a recovery). A snapshot is of a
// position that the caller names: the executor's own, and one day one that several processes have agreed on.
//
// The executor's thread's, but: ShadowWishes are any thread's, and `chunks` may be read by who has begun a batch of staging.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/result.h"
#include "server/memory/granules.h"
#include "server/memory/process_memory.h"
#include "server/services.h"
#include "server/snapshot/snapshot_file.h"
#include "server/snapshot/staging.h"

namespace xmig::server {

// What is to be preserved beside memory: the program's objects, which are a vendor's.
class Preserved {
 public:
  // The snapshot's `objects`, `events` and `variables`; and the images that they are made of.
  virtual void describe(SnapshotContent& content, std::vector<uint64_t>& images) = 0;

 protected:
  ~Preserved() = default;
};

class Snapshots {
 public:
  Snapshots(const Services& services, ProcessMemory& memory, Granules& granules, Staging& staging)
      : services_(services), memory_(memory), granules_(granules), staging_(staging) {}
  Snapshots(const Snapshots&) = delete;

  // When it is, and what the program has been informed of.
  struct Moment {
    uint64_t position = 0, sequence = 0;
    const Failures& failures;
    Preserved& objects;
  };
  // From now on the device memory is the state; the device is drained, and no variable is elsewhere.
  void begin(const Moment& moment);
  struct Taken {
    SnapshotReport report;
    uint64_t end = 0;      // when it was over
    uint64_t once_ns = 0;  // of its time, what the next snapshot of the same work will not take, because this one found new places
                           // in the shadow
  };
  // After begin(). If it is not possible, nothing has changed. `gradually`: memory that becomes empty goes slab by slab.
  Result<Taken> take(const Moment& moment, bool gradually);
  // The same in two steps, between which execution stands still and nothing has changed yet. The second one cannot fail.
  Result<> prepare(const Moment& moment);
  Taken finish(const Moment& moment, bool gradually);
  // In its place: there will be none.
  void abandon();

  // Until this is over, the program needs the device memory that the shadow takes.
  void evict(bool on) { evict_ = on; }

  // Give the journal back up to the last snapshot, as far as nobody waits for a reply in it.
  void trim();
  // What the first snapshot after a move or a resumption has left empty goes slab by slab. All at once stopped a program of 40 GB
  // for 25 ms.
  void trim_shadow();
  void trim_shadow_at_once() { trim_slabs(~0ull); }
  uint64_t trim_shadow_at() const { return trim_shadow_at_; }

  // Recovery: this was the last one. The journal has been given back up to `trimmed`.
  Result<> take_over(SnapshotContent& content, uint64_t trimmed);
  // The places of these chunks were lost with a device; their content is in memory again, and now at the same places, too: others may
  // lose their devices before the next snapshot. Where there is no room that is put off until then.
  void place_again(const std::vector<ChunkState>& lost, uint64_t sequence);

  // These have other content now, memory and place.
  void replace(const std::vector<ChunkState>& chunks);

  uint64_t number() const { return number_; }
  uint64_t position() const { return position_; }
  uint64_t trimmed() const { return trimmed_; }
  const std::vector<ChunkState>& chunks() const { return chunks_; }  // by address
  // Of each of them, the snapshot that wrote its slot last, as far as this server knows. What is not newer than a snapshot of this server
  // is what that one had: not by its hash, but because nobody has written there.
  const std::vector<uint64_t>& written() const { return written_; }
  // What was lost with a device has no place in the shadow yet, and looks like zeros: only the program's memory has it.
  bool lacks_lost() const { return lacks_lost_; }

 private:
  // Chunks of a snapshot whose content goes to their slots: where each is in the list, and its content's hash in the last snapshot if that
  // had the slot, too.
  struct Changed {
    size_t chunk;
    std::optional<uint64_t> before;
  };
  // A snapshot on its way.
  struct Draft {
    const std::vector<uint64_t>& granules;
    std::vector<bool> unseen;      // is copied without a look
    std::vector<uint64_t> hashes;  // of the others
    SnapshotContent content;
    std::vector<Changed> changed;
    std::vector<uint64_t> taken, given_back;  // slots
    size_t fresh = 0;                         // of those taken, how many hold what had none
    std::array<uint64_t, journal::kMaxDevices> wanted{};
    std::vector<uint64_t> images;
  };
  struct Prepared {
    Prepared(Draft what, Taken begun, std::unique_lock<std::mutex> held)
        : draft(std::move(what)), taken(std::move(begun)), still(std::move(held)) {}
    Draft draft;
    Taken taken;
    std::unique_lock<std::mutex> still;
  };
  // The place that a granule's content gets, which needs no copy unless `differs`.
  struct Placed {
    std::optional<uint64_t> slot, before;
    bool differs = true;
  };

  // The steps. Until copy() nothing has changed; after it, nothing can fail.
  void hash(Draft& draft, const Moment& moment, SnapshotReport& report);
  Result<> place(Draft& draft);
  void describe(Draft& draft, const Moment& moment);
  Result<> reserve(const Draft& draft);
  void copy(Draft& draft, const Moment& moment);
  void commit(Draft& draft, const Moment& moment, bool gradually);
  void report(const Draft& draft, const Moment& moment, SnapshotReport& report) const;
  void give_up(const Draft& draft);

  Placed keep_or_move(Draft& draft, const ChunkState& old, uint64_t hash, bool zeros);
  std::optional<uint64_t> new_slot(Draft& draft, uint32_t ordinal);
  int file_of(const Draft& draft) const;
  void note_written(const Draft& draft);
  ChunkState& written_again(uint64_t address);
  bool fill_shadow(std::vector<ChunkState>& chunks, const std::vector<Changed>& changed, uint64_t sequence);
  std::optional<uint64_t> zeros_hash();
  Place place_now() const { return evict_ ? Place::kHost : place_; }
  bool must_leave(uint64_t slot, bool differs) const;
  bool may_return(uint64_t slot) const;
  std::optional<uint64_t> returned(uint32_t ordinal, uint64_t& wanted);
  std::vector<bool> likely_changed(const std::vector<uint64_t>& granules) const;
  std::array<uint64_t, journal::kMaxDevices> slots_wanted(const std::vector<uint64_t>& granules,
                                                          const std::vector<uint64_t>& hashes) const;
  void trim_slabs(size_t most);

  const Services services_;
  ProcessMemory& memory_;
  Granules& granules_;
  Staging& staging_;

  std::optional<Prepared> prepared_;
  uint64_t number_ = 0, position_ = 0;
  std::vector<ChunkState> chunks_;  // of the last committed snapshot, by address
  std::vector<uint64_t> written_;
  bool lacks_lost_ = false;
  std::vector<uint64_t> changed_;   // addresses of those whose content was not the one of the snapshot before
  std::optional<uint64_t> zeros_hash_;
  Place place_ = Place::kDevice;  // where content goes; changed between snapshots only
  bool evict_ = false;
  uint64_t trimmed_ = 0;
  std::optional<uint32_t> blocking_slot_;  // the thread whose unread reply keeps the journal from being trimmed
  uint64_t blocked_at_ = 0;
  uint64_t trim_shadow_at_ = 0;  // ns: then the next of the empty slabs goes; 0: there are none
};

}  // namespace xmig::server
