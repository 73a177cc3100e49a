// The executor: reads the journal, drives the device. One thread; it never waits for the device except to take a snapshot.
//
// Invariants:
//   current_.position is the start of the next record; everything before it was executed once, in order.
//   A record is acted upon only from the private copy in current_.record; payloads are read in place, as data.
//   Nothing is answered after a sticky fault (Faults), nothing is answered twice (Record::replied).
//
// It reads records and dispatches them: what they do, and the state that they have for that, is the handlers' (cuda/handlers/). What else
// a job needs are parts with state of their own, which it owns and brings together: snapshots_ and schedule_ (snapshot/), recovery_
// and replay_ (recovery/), incoming_, relocation_ and departure_ (migration/). They ask of it what execution.h says, and see nothing
// else of it. Other threads ask for something through interrupts_, and find what they may call in "From other threads" below; the
// fields that they touch are named at the end.
#pragma once

#include <cuda.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/result.h"
#include "device/device.h"
#include "server/channel/interrupts.h"
#include "server/cuda/handlers/handlers.h"
#include "server/cuda/objects/objects.h"
#include "server/cuda/timing/timing.h"
#include "server/execution.h"
#include "server/executor/current.h"
#include "server/executor/placement.h"
#include "server/executor/program_errors.h"
#include "server/executor/progress.h"
#include "server/executor/replies.h"
#include "server/executor/waits.h"
#include "server/executor/working.h"
#include "server/faults/watchdog.h"
#include "server/memory/adoption.h"
#include "server/memory/granules.h"
#include "server/memory/process_memory.h"
#include "server/migration/departure.h"
#include "server/migration/incoming.h"
#include "server/migration/relocation.h"
#include "server/recovery/recovery.h"
#include "server/recovery/replay.h"
#include "server/services.h"
#include "server/sharing/turns.h"
#include "server/snapshot/group_snapshot.h"
#include "server/snapshot/chunk_reader.h"
#include "server/snapshot/host_copies.h"
#include "server/snapshot/snapshot_copy.h"
#include "server/snapshot/schedule.h"
#include "server/snapshot/snapshots.h"
#include "server/snapshot/staging.h"

namespace xmig::server {

struct Limits {
  double snapshot_cost;       // the share of time that may be spent on snapshots
  double hang_timeout = 0;    // seconds without progress after which the device's work counts as hung; 0: never
  double stall_bound = 0.2;   // seconds that a recovery is to keep the program waiting at most
  bool copies_on_host = false;  // what copies from page-locked memory bring is kept there
};

class Executor final : public Witness, private Execution {
 public:
  Executor(const Services& services, device::Device& device, ModulePreload& preload, PreparedCommunicators& prepared, Physical& physical,
           const Limits& limits);
  ~Executor() override;

  // The journal of a job that starts from nothing, before its program may have it. The devices need not be open.
  static Result<> prepare_journal(const Services& services, const device::Device& device);
  // Before run(), on its thread: such a job, or one that an earlier server had.
  Result<> start_fresh();
  Result<> recover(std::vector<Hosted> given, const Assign& assignment, Entry& entry) {
    handlers_.collectives.forget(assignment.gone);
    return recovery_.follow(std::move(given), assignment, entry);
  }
  // The job of a move's source, whose last snapshot is this one. Before that, and before a resumption: Incoming.
  Result<> take(uint64_t snapshot);
  // A job that no server has, whose memory is all in its shadow. With `assignment.ahead` nothing is executed before it is entered.
  Result<> resume_suspended(std::vector<Hosted> given, const Assign& assignment, Entry& entry);
  Incoming& incoming() { return incoming_; }

  // Until stop(). The error: the ring does not decode, or the state is lost.
  Result<> run();
  // Only what the journal holds now, for tests without a thread.
  void run_to_tail();

  // From other threads.
  void stop() { interrupts_.request(Interrupts::kStop); }
  void ask_for_snapshot() { interrupts_.request(Interrupts::kSnapshot | Interrupts::kAnswer); }
  // Until unpause(), which may come before it stands.
  void pause(bool at_snapshot);
  // Stands at once, before anything of the replay: what the last snapshot holds is to be copied. Until unpause().
  void hold();
  // The same, at the snapshot that its group is about to take in this round. False: it takes no part in that.
  bool pause_with_the_group(uint64_t round);
  // Stop at a snapshot: another server takes the job, unless unpause() comes first.
  void hand_over() { interrupts_.request(Interrupts::kHandover); }
  void suspend() { interrupts_.request(Interrupts::kSuspend); }
  Departure& departure() { return departure_; }
  // A step of a snapshot of all ranks of a group; and what has become of a communicator that failed.
  void step(GroupSnapshot::Step step) { group_.request(std::move(step)); }
  HostCopies& host_copies() { return host_copies_; }
  SnapshotCopy& snapshot_copy() { return snapshot_copy_; }
  ChunkReader& chunk_reader() { return chunk_reader_; }
  void follow_profiling() { interrupts_.request(Interrupts::kLook); }
  void communicator_lost(const std::string& name) { handlers_.collectives.lost(name); }
  // Continue, with the job's new files if there are any. The executor is paused.
  Result<> unpause(std::optional<Rebind> rebind);
  // Tell a daemon that is new to this job everything that it must hold; from then on it hears everything.
  void announce(ipc::UniqueFd socket, const std::string& device);

  std::string operation(uint64_t sequence) const override;
  Culprit culprit() const override;

 private:
  // executor.cc
  // Is it executed even while an ordinal answers everything else with the program's own fault?
  static bool keeps_books(Op op);
  bool execute_batch();
  bool pass_barrier();
  bool is_its_turn();
  void look_at_neighbours(bool worked);
  bool load_next(uint64_t tail);
  void execute_one();
  void execute_injected();
  void use_context();
  void execute();
  std::optional<std::pair<device::InjectPoint, CUstream>> work();
  bool settle();
  void look_at_device(uint64_t now);
  void look_for_rest(uint64_t now);
  Watchdog::Look look() const;
  uint64_t waited_for() const;
  void hung();
  void stuck(bool is);
  void dispatch();
  void fail_program(uint32_t ordinal, uint64_t sequence, CUresult error);
  void publish_executed();
  void sleep();
  void watch_tail();
  uint32_t hear(journal::JournalHeader& header);
  bool gives_way();
  void nap();
  void register_shared();
  void unregister_shared();
  bool check_finished_replay();
  void check_quota();

  void settle_after_arrival();

  // stops.cc
  void consider_snapshot(bool idle);
  std::optional<Schedule::Stop> wants_stop(bool idle, uint64_t now);
  std::optional<Schedule::Stop> proposed_stop(bool idle, uint64_t now);
  bool nothing_to_snapshot(uint32_t requested);
  void act_upon(const Schedule::Stop& stop);
  bool stands() const { return schedule_.stopping() || group_.stands(); }
  // group_stops.cc
  bool take_part(bool idle, uint64_t now);
  bool held_up_by_the_group(uint64_t now);
  void forsake_the_group();
  void make(GroupSnapshot::Step& step, uint64_t now);
  bool stop_with_the_group(uint64_t now, bool executed);
  uint64_t group_goes_on_until(uint64_t now) const;
  bool stop_in_front_of(Op next, uint64_t now);
  void stopped_with_the_group(uint64_t now);
  void count_work(Op op);
  void hold(uint64_t now);
  void take_with_the_group(const GroupTake& take);
  void go_on_alone();
  bool external_waits();
  bool device_idle();
  void drain();
  void wait_paused();
  void stay_paused(uint64_t snapshot);

  // Execution: stops.cc, remake.cc
  uint64_t position() const override { return current_.position; }
  void wake() override { interrupts_.request(Interrupts::kLook); }
  bool stopping() const override { return (interrupts_.pending() & Interrupts::kStop) != 0; }
  bool replaying() const override { return replay_.running(); }
  void come_to_rest() override;
  Result<> take_snapshot(const char* reason, uint64_t stopped = 0) override;
  Result<> take_snapshot_of_round(uint64_t round) override;
  void no_snapshot(const std::string& why);
  void snapshot_taken(Snapshots::Taken taken, const char* reason, uint64_t began, uint64_t stopped, uint64_t round);
  void park(const std::function<void()>& tell) override;
  void stay(const std::function<void()>& tell);
  void go_on() override;
  void entered() override;
  void start_at(const SnapshotContent& content, uint64_t executed) override;
  Result<> make_objects(const SnapshotContent& content) override;
  Result<> restore_variables() override { return handlers_.variables.restore(); }
  Result<> execute_objects(uint64_t until) override;
  void join_again() override { handlers_.collectives.join_again(); }
  void begin_replay(uint64_t executed, std::optional<Delivery> deliver, std::optional<Careful> careful) override;

  // remake.cc
  Result<> make_object(std::span<const std::byte> stored);

  const Services services_;
  device::Device& device_;
  const DriverTable& driver_;
  Contexts& contexts_;
  Daemon& daemon_;
  Log& log_;
  Faults& faults_;
  Injector& injector_;
  Job& job_;
  ModulePreload& preload_;
  PreparedCommunicators& prepared_;

  ProcessMemory memory_;
  Granules granules_;
  Objects objects_;
  Replies replies_{job_};
  Waits waits_;
  Progress progress_;
  Working working_;

  Current current_;
  ProgramErrors errors_;
  uint64_t looked_at_ = 0;     // when the device was last queried how it is
  uint64_t rest_look_at_ = 0;  // when it is queried whether it has come to rest; 0: not while there are records
  uint64_t rest_after_ = 0;    // ns, between two such looks
  uint32_t batches_ = 0;
  uint32_t caller_ = 0;     // slot of the thread that the last record came from
  uint64_t heard_at_ = 0;   // when it last began to run
  uint32_t heard_ = 0;      // JournalHeader::doorbell, then
  bool resting_ = false;    // its last sleep was over by itself
  uint64_t published_ = 0;  // what `executed` says
  uint64_t barrier_since_ = 0;
  uint32_t generation_ = 0;
  std::string snapshot_trouble_;  // the last reason why a snapshot was not possible: logged once
  const double hang_timeout_;
  Placement placement_;
  uint64_t full_since_ = 0;          // the journal, while the group cannot stand still; 0: it is not
  bool forsakes_the_group_ = false;  // the next snapshot is taken without it
  std::optional<uint64_t> behind_collective_;  // launches and copies since the last one; none: not known
  uint64_t work_ = 0;               // records that change device memory or what is allocated, since this server has the process
  uint64_t collective_at_ = 0;      // when the last one was begun
  uint64_t group_executed_at_ = 0;  // the last record, while it stops with the group
  uint64_t replay_began_ = 0;
  bool quota_is_open_ = false;  // what the last server had counted of it is not compared yet
  uint64_t quota_until_ = 0;    // the position at which it is, at the latest
  uint64_t rested_at_ = 0;  // when the device had come to rest for the group's snapshot

  // The parts. Each is given those before it, and Execution, which this is.
  Interrupts interrupts_;
  Staging staging_;
  Snapshots snapshots_;
  Schedule schedule_;
  GroupSnapshot group_;
  HostCopies host_copies_;
  SnapshotCopy snapshot_copy_;
  ChunkReader chunk_reader_;
  Relocation relocation_;
  Departure departure_;
  Adoption adoption_;
  Incoming incoming_;
  Replay replay_;
  Recovery recovery_;
  Handlers handlers_;
  Timing timing_;
  Turns turns_;

  // --- what other threads touch, beside parts that say so themselves

  // Written by the executor; read by who reports a fault.
  std::atomic<uint64_t> executing_{0};  // the record that is being executed, or the last one
  std::atomic<bool> alone_{false};      // and what came before it is done

  std::atomic<bool> stuck_{false};        // what stuck() was called with last
  std::optional<Watchdog> watchdog_;  // its thread calls look(), hung(), stuck()

  // The executor waits; the thread that listens to the daemon lets it go on.
  std::mutex pause_mutex_;
  std::condition_variable pause_changed_;
  bool pause_wanted_ = false, pause_at_snapshot_ = false;  // guarded by pause_mutex_
  bool paused_ = false;           // likewise
  std::function<void()> parked_;  // likewise: tells the daemon once more why nothing is executed
};

}  // namespace xmig::server
