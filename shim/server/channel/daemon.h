// The server's side of the control socket: what it tells the daemon, from any thread.
//
// The daemon may be gone at any time. Then nothing is sent and nothing is lost: who comes back is sent everything that
// still matters by announce().
//
// What it was sent last is lost if it dies before it reads it, and nobody announces anything if the server dies, too. So
// changes of memory are also reported into the backlog: a socket whose other end is kept where the job's memory is.
//
// What lies in this folder: daemon (what is reported), requests and interrupts (what is requested), job (the files that came with it),
// meetings (of ranks), entry, hosted. All of it may be used from any thread, each piece under a lock of its own or by atomics; job is changed only while
// the executor is paused.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "ipc/fd.h"
#include "journal/numbers.h"
#include "server/channel/hosted.h"

namespace xmig::server {

struct SnapshotReport {
  uint64_t number = 0, position = 0, sequence = 0;
  double ms = 0;         // in which nothing was executed and the device was idle
  double waited_ms = 0;  // before that, for the device to finish what it had
  double hash_ms = 0, copy_ms = 0;  // of ms: hashing in place, and copying with hashes
  uint64_t hashed_bytes = 0;        // in place
  uint64_t chunks = 0, copied_bytes = 0, live_bytes = 0, journal_bytes = 0, objects = 0;
  bool off_device = false;  // the whole of its shadow
  std::string reason;
  uint64_t round = 0;  // that it was taken in, with the other ranks of a group
};

// Whose work it can have been that a device faulted at: `sequence`, if that is not 0, or else a record after `after` and
// not after `until`.
struct Culprit {
  uint64_t sequence = 0;
  uint64_t after = 0;
  uint64_t until = 0;
};

// What a round of a move has done. Of the bytes that the snapshot holds, `settled` are here and are right, `differing` are not
// (yet), `copied` were copied now. `loading_ms`: what code took to load, after the `ms` of the rest.
struct RoundReport {
  uint64_t number = 0, snapshot = 0;
  uint64_t total_bytes = 0, copied_bytes = 0, settled_bytes = 0, differing_bytes = 0;
  double ms = 0, loading_ms = 0;
};

// What a lossy copy has done with the named numbers of one type: so many `ranges` of so many `bytes`, of which so many numbers have
// changed. Errors are of numbers, the relative one against what the number was.
struct RoundedNumbers {
  uint64_t ranges = 0, bytes = 0, changed = 0;
  double largest_relative = 0, largest_absolute = 0;
};
using RoundedByType = std::array<RoundedNumbers, journal::kNumberTypes>;

struct ReplayReport {
  uint64_t records = 0, compared = 0, differing = 0;
  std::optional<uint64_t> first_difference;
};

// What a standby has loaded ahead, all in all.
struct PreloadReport {
  uint64_t modules = 0, kernels = 0;
  uint64_t device_bytes = 0;  // taken by that, about
};

// Between two words about what takes long, ns.
inline constexpr uint64_t kProgressEvery = 200'000'000;

class Job;

class Daemon {
 public:
  // Until the result is gone, only the calling thread is heard.
  std::unique_lock<std::recursive_mutex> attach(ipc::UniqueFd socket);
  void detach();
  bool attached() const;
  // From now on memory that comes and goes is counted there, heard or not.
  void count_changes(std::atomic<uint64_t>& changes);
  // And that it is reported there, too. Nobody waits for that: if it is full, what is missing in it is noticed by the count.
  void keep_backlog(ipc::UniqueFd socket);

  void hello(const std::string& device, double warm_ms, uint64_t device_bytes);
  void unavailable(int error, std::string_view text);
  // `opened`: of its devices; otherwise opened() follows when they are.
  void ready(uint32_t generation, bool opened);
  void opened(uint64_t device_bytes);
  // Communicators of its process are being made, or no longer.
  void joining(bool joining);
  void preloaded(const PreloadReport& report);
  // `why` it is not; empty: it is, and takes so many bytes of the devices, about.
  void communicator_prepared(uint64_t attempt, uint64_t device_bytes, std::string_view why);
  // Of this device, so many bytes are missing for the program's own data: who has made communicators ahead is to give them up.
  void memory_short(uint64_t number, uint32_t ordinal, uint64_t bytes);
  void memory_add(const Hosted& memory);
  void memory_again(const Hosted& memory);  // in an announcement: it is nothing new
  void memory_drop(uint64_t id);
  void snapshot(const SnapshotReport& report);
  void snapshot_stands(uint64_t number);
  void fault(const Culprit& culprit, std::string_view op, int error, std::string_view text);
  void phase(std::string_view name);
  void replayed(const ReplayReport& report);
  void program_error(uint64_t sequence, int error);
  void injected(uint64_t id);
  void garbage(uint64_t position, std::string_view text);
  void announce(const Job& job, const std::string& device, uint32_t generation, bool opened);
  void announced();
  // `snapshot`: that was taken there; 0: none.
  void paused(uint64_t position, uint64_t snapshot);
  void continued(uint64_t position);
  // A rank of a communicator says what it offers the others. `answer`: the daemon's name for what it was answered; empty: it was not.
  void meet(const std::string& meeting, uint32_t rank, uint32_t ranks, const std::string& offer, const std::string& answer);
  // A communicator that this rank is in: "joined", "ended" by the program, "past" when no recovery would need it.
  void communicator(const std::string& name, uint32_t rank, uint32_t ranks, std::string_view state);
  // `severed`: the connection with another rank has ended, or cannot be made.
  void communicator_failed(const std::string& name, uint32_t rank, std::string_view why, bool severed);
  // Snapshots of a group (snapshot/group_snapshot.h).
  void group_wanted(std::string_view reason);
  // `behind`: launches and copies since the last collective; none: not known. `work`: records that change device memory, or what is
  // allocated of it, since this server has the process.
  void group_stopped(uint64_t round, const std::map<std::string, uint64_t>& counts, std::optional<uint64_t> behind, uint64_t work);
  void group_held(uint64_t round);
  void group_busy(uint64_t round, std::string_view why);
  // The device waits for other ranks, and the program for the device, without progress for so many seconds; 0: no longer.
  void group_stuck(double seconds);
  // So much of the process's memory was lost with a device: who has equal content?
  void replicas_wanted(uint64_t bytes);
  // What does this rank have of these? `rank`: of those of other nodes that were named.
  void chunks_wanted(uint32_t rank, std::span<const ChunkHash> chunks);
  // The answer to ReadChunks. `why`: nothing could be read.
  void chunks_read(uint64_t number, size_t examined, std::span<const uint64_t> found, std::string_view why);
  // So much is copied to host memory of what only this process's device has at this snapshot, and so much is not.
  void copies_made(uint64_t snapshot, uint64_t bytes, uint64_t missing_bytes, uint64_t brought_bytes);
  void bye(std::string_view reason);
  // Nothing more is reported: the process ends. To be called before it does, so that the last words arrive.
  void hang_up();

  void round(const RoundReport& report);
  void round_progress(uint64_t number, uint64_t copied_bytes);
  void move_failed(std::string_view code, std::string_view text);
  void handed_over(uint64_t snapshot, uint64_t position, uint64_t stopped, uint64_t drained, double snapshot_ms);
  void handover_failed(std::string_view text);
  void suspend_progress(uint64_t done_bytes, uint64_t total_bytes);
  void prepared(double ms);
  void suspended(uint64_t snapshot, uint64_t position, uint64_t bytes, double ms);
  void suspend_failed(std::string_view text);
  // Of a snapshot's content that was copied to memory of its own: each piece of that, then the file that names them. Or why not.
  // Without a descriptor: it has only what the daemon knows.
  void snapshot_slab(uint64_t number, uint32_t ordinal, uint64_t address, uint64_t bytes, bool rounded, int fd);
  void snapshot_copied(uint64_t number, uint64_t bytes, double ms, const RoundedByType& rounded, int fd);
  void snapshot_not_copied(uint64_t number, std::string_view why);
  void resume_failed(std::string_view code, std::string_view text);

 private:
  friend class Log;
  void send(const std::string& message, std::span<const int> fds = {});
  void changed(const std::string& message, std::span<const int> fds);

  mutable std::recursive_mutex mutex_;
  ipc::UniqueFd socket_;  // guarded by mutex_
  std::atomic<uint64_t>* changes_ = nullptr;  // guarded by mutex_
  ipc::UniqueFd backlog_;                     // guarded by mutex_
  std::map<uint64_t, uint64_t> unheard_;      // guarded by mutex_: bytes of memory that came while there was no daemon
  uint64_t held_for_nothing_ = 0;             // guarded by mutex_: bytes of it that were given up again
  bool joining_ = false;  // guarded by mutex_; the next daemon wants to know, too
  bool broken_ = false;   // guarded by mutex_: the daemon does not read; the control thread will notice
};

enum class Level { kInfo, kWarning, kError };
// A line for the job's log, and on stderr while nobody else can hear it.
class Log {
 public:
  explicit Log(Daemon& daemon) : daemon_(daemon) {}
  void operator()(Level level, std::string_view text);

 private:
  Daemon& daemon_;
};

}  // namespace xmig::server
