// What the daemon may ask of a server: its messages, checked and typed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "common/result.h"
#include "device/runtime.h"
#include "ipc/fd.h"
#include "server/channel/hosted.h"
#include "server/sharing/sharing.h"

namespace xmig::server {

// kMove: copy another server's memory in rounds, take its job over later. kResume: a suspended one, whose device memory is
// gone.
enum class AssignMode { kFresh, kRecover, kLost, kMove, kResume };

// A fault that belongs to the program: replay up to this record, then hand it over.
struct Delivery {
  uint64_t sequence;
  int error;
};

// The records after `after`, up to `until`: one by one, to find the one whose work faults.
struct Careful {
  uint64_t after;
  uint64_t until;
};

struct JobFds {
  ipc::UniqueFd journal, staging, pinned, snapshot[2];
  ipc::UniqueFd quota;  // none: there is no quota

  std::vector<int> all() const {
    std::vector<int> fds{journal.get(), staging.get(), pinned.get(), snapshot[0].get(), snapshot[1].get()};
    if (quota) fds.push_back(quota.get());
    return fds;
  }
};

struct Assign {
  std::string job;
  AssignMode mode = AssignMode::kFresh;
  int client_pid = 0;
  double snapshot_cost = 0.01;   // share of time that snapshots may cost
  double stall_bound = 0.2;   // seconds that a recovery is to keep the program waiting at most
  double hang_timeout = 0;  // seconds; 0: never
  uint64_t memory_quota = 0;  // bytes of each device that the job's programs may have together; 0: all
  std::vector<uint64_t> quota_slots;  // of this process in its page, by ordinal
  bool copies_on_host = false;  // what copies from page-locked memory bring is kept in host memory (memory/copy_log.h)
  std::optional<Delivery> deliver;
  std::optional<Careful> careful;
  std::vector<device::Injection> injections;
  // kRecover: the server before it has not ended yet. kResume: other ranks are resumed with it. Nothing is entered until Enter comes.
  bool ahead = false;
  bool hold = false;  // kRecover: it stands before the replay
  int error = 0;  // kLost
  std::string text;
  // kRecover, of a process in communicators: the last round that its group has decided, and communicators that are not made again.
  uint64_t decided = 0;
  std::vector<std::string> gone;
  std::vector<uint64_t> communicators;  // attempts that all ranks have prepared
  // kRecover: chunks of this snapshot that are not what most replicas hold there; by address, the hash of what they hold.
  uint64_t differing_snapshot = 0;
  std::vector<ChunkHash> differing;
  uint64_t first_id = 1;  // of the memory that this server makes: smaller numbers are another's
  JobFds fds;
};
struct MemoryAdd {
  Hosted memory;
};
// kMove: the source holds it no longer.
struct MemoryDrop {
  uint64_t id = 0;
};
struct Go {};
// The server before this one has ended, or all ranks of a group that is resumed are as far: the job is this one's.
struct Enter {
  std::vector<std::string> gone;  // kResume: as Assign's
};
struct Inject {
  device::Injection injection;
};
struct TakeSnapshot {
  std::optional<bool> host;  // from now on, is the whole shadow kept in host memory?
};
// kMove: copy what this snapshot holds and is not here yet.
struct Round {
  uint64_t number = 0;
  uint64_t snapshot = 0;
};
// Stop for good, at a snapshot: another server goes on from there.
struct Handover {};
// kMove: that snapshot of the source is its last one. The job is this server's.
struct Take {
  uint64_t snapshot = 0;
  std::vector<uint64_t> communicators;  // of a rank: attempts that the others use, too
};
// Empty host memory that has its pages, of kPlainBytes each: for the suspension that is prepared next, or the copy of a snapshot.
struct Room {
  std::vector<ipc::UniqueFd> slabs;
};
enum class SuspendTo { kHost, kFile };
// Bring the shadow to where it can stay without a server, while the program runs.
struct PrepareSuspend {
  SuspendTo to = SuspendTo::kHost;
  uint64_t bytes_hint = 0;
  ipc::UniqueFd directory;            // kFile
  std::vector<ipc::UniqueFd> room;  // kHost: what came before it
};
struct Suspend {};
// To a standby: a bit for each device that the process uses by now.
struct OpenDevices {
  uint64_t devices = 0;
};
// To a standby: load what these snapshots of the process have that it may get.
using SnapshotFiles = std::array<ipc::UniqueFd, 2>;
struct LoadAhead {
  SnapshotFiles snapshots;
};
// To a server without a job: a round of what comes before it. Memory in which its chunks lie, and images, follow as `memory` `add`, and
// then Go. `most_bytes`: of the program on each device, by ordinal.
struct RoundAhead {
  uint64_t number = 0;
  std::vector<uint64_t> most_bytes;
  SnapshotFiles snapshots;
};
// Make the communicator with this name, as these snapshots have it, beside all others (cuda/objects/prepared_communicators.h).
struct PrepareCommunicator {
  uint64_t attempt = 0;
  std::string name;
  SnapshotFiles snapshots;
};
struct ForgetCommunicator {
  uint64_t attempt = 0;
};
// Answer to `memory_short`: so much of it comes free now.
struct MemoryGivenUp {
  uint64_t number = 0;
  uint64_t bytes = 0;
};
struct AbortSuspend {};
struct Pause {
  bool at_snapshot = false;  // take one there, if that is possible
};
// While it is paused at this snapshot: copy its content to memory of its own, with what came as Room before (snapshot/snapshot_copy.h).
struct CopySnapshot {
  uint64_t number = 0;
  uint64_t since = 0;  // a snapshot of this server whose content the daemon has; 0: none
  uint32_t keep_bits = 0;  // of the mantissas of named numbers (rounding.h); 0: all, the copy is exact
  std::vector<ipc::UniqueFd> room;
};
struct ForgetSnapshotCopy {};
struct Rebind {
  ipc::UniqueFd journal, staging, pinned;
  int client_pid = 0;  // 0: as before
};
struct Continue {
  bool if_paused = false;  // otherwise it is an error that it is not
};
// From now on print there: nobody reads the pipe that the daemon before this one gave.
struct Output {
  ipc::UniqueFd pipe;
};
// From now on each change of memory is reported there, too: the next daemon hears of it, if this one and the server die at once.
struct Backlog {
  ipc::UniqueFd socket;
};
// To a rank that met the others: what all of them offer, and the daemon's name for that. Or who is missing until now, or why it is not
// let in; or `over`: all ranks have reported that they were answered.
struct Met {
  std::string meeting;
  uint32_t rank = 0;
  std::vector<std::string> offers;
  std::string missing;
  std::string refused;
  std::string answer;
  bool over = false;
};
// How far the ranks of a communicator are: its collectives by its name, sends of one rank to another by "name:from>to".
using GroupCounts = std::map<std::string, uint64_t>;
// A snapshot that all ranks of a group take at positions that fit (server/snapshot/group_snapshot.h). Stop once this far; if possible so many
// launches and copies behind a collective, or, where there is no such number, right behind the next one.
struct GroupStop {
  uint64_t round = 0;
  GroupCounts counts;
  std::optional<uint64_t> behind;
};
// All positions fit: prepare everything. `gone`: communicators that will not be made again.
struct GroupHold {
  uint64_t round = 0;
  bool suspends = false;  // all ranks, as it was prepared
  std::vector<std::string> gone;
};
// All have prepared everything: take it. Where a rank moves: from then on, use what these attempts have prepared.
struct GroupTake {
  uint64_t round = 0;
  bool moves = false;
  bool leaves = false;  // this one is it: hand over
  bool suspends = false;  // all stand still behind it
  bool pauses = false;    // likewise, and nothing leaves its device
  std::vector<uint64_t> communicators;
};
// There will be none now: go on.
struct GroupContinue {
  uint64_t round = 0;
};
// A communicator has failed, and nobody recovers what it has lost.
struct CommunicatorLost {
  std::string name;
};
// Where a server finds content that its process has lost with a device (recovery/replicas.h): a rank that is at the same round; memory of
// that rank's shadow; that is all of it.
struct ReplicaRank {
  SnapshotFiles snapshots;
};
struct ReplicaMemory {
  Hosted memory;
};
// `far`: and so many ranks of other nodes, whose content comes chunk by chunk (ChunksBrought).
struct ReplicasNamed {
  uint32_t far = 0;
};
// Of a rank of another node, for one that has lost memory: of those chunks that were requested of it last it was looked for the first
// `examined`, and what was found of them, in order, lies here. `why`: nothing more comes from that rank.
struct ChunksBrought {
  size_t examined = 0;
  std::vector<uint64_t> found;  // by their place among those that were requested
  std::string why;
  ipc::UniqueFd content;
};
// And for this one: copy what the last snapshot has of these there, the first kChunksAtOnce that it has (snapshot/chunk_reader.h).
struct ReadChunks {
  uint64_t number = 0;  // of this request
  std::vector<ChunkHash> chunks;
  ipc::UniqueFd memory;
};
// After a snapshot of all ranks, those of this node on other devices having been named (ReplicaRank): copy what they do not have to host
// memory, if it is not more than this (snapshot/host_copies.h). `elsewhere`: hashes of what ranks of other nodes have; none: of nothing.
// `snapshot`: that what the others have was compared with. Of a newer one nothing is known.
struct CopyUnique {
  uint64_t snapshot = 0;
  uint64_t bytes = 0;
  ipc::UniqueFd elsewhere;
};
// Memory of the daemon's for what this server writes down of its program's work (profiling/pages.h). `every`: one of so many operations
// is timed, or fewer; 0: none.
struct Profile {
  uint32_t every = 0;
  ipc::UniqueFd page;
};
struct Trace {
  ipc::UniqueFd page;
};
struct EndTrace {};
struct Stop {
  std::string reason;
};

using Request = std::variant<Assign, MemoryAdd, MemoryDrop, Go, Enter, Inject, TakeSnapshot, Round, Handover, Take, Room,
                             PrepareSuspend, Suspend, AbortSuspend, OpenDevices, LoadAhead, RoundAhead, PrepareCommunicator, ForgetCommunicator,
                             MemoryGivenUp, Pause, CopySnapshot, ForgetSnapshotCopy, Rebind, Continue, Output,
                             Backlog, Met, GroupStop, GroupHold, GroupTake, GroupContinue, CommunicatorLost, ReplicaRank, ReplicaMemory,
                             ReplicasNamed, ChunksBrought, ReadChunks, CopyUnique, Profile, Trace, EndTrace, Share, Stop>;

inline constexpr size_t kMaxMessageBytes = 64 << 10;
inline constexpr size_t kMaxRequestFds = 250;  // of `room`

// The message has to fit its schema.
Result<Request> parse_request(std::span<const std::byte> message, std::vector<ipc::UniqueFd> fds);

}  // namespace xmig::server
