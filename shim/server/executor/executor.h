// The executor: reads the journal, drives the device. One thread; it never waits for the device except to take a snapshot.
//
// Invariants:
//   position_ is the start of the next record; everything before it was executed once, in order.
//   A record is acted upon only from the private copy in record_; payloads are read in place, as data.
//   Nothing is answered after a sticky fault (Faults), nothing is answered twice (Record::replied).
//
// It reads records and dispatches them to their handlers, which are its methods, in files by what they are about (handlers/), and may
// touch all that is its own. What else a job needs are parts with
// state of their own, which it owns and brings together: snapshots_ and schedule_ (snapshot/), recovery_ and replay_ (recovery/),
// incoming_, relocation_ and departure_ (migration/). They ask of it what execution.h says, and see nothing else of it. Other
// threads ask for something through interrupts_, and find what they may call in "From other threads" below.
#pragma once

#include <cuda.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "common/result.h"
#include "device/device.h"
#include "journal/module_info.h"
#include "server/channel/interrupts.h"
#include "server/execution.h"
#include "server/executor/placement.h"
#include "server/executor/progress.h"
#include "server/executor/replies.h"
#include "server/executor/waits.h"
#include "server/executor/working.h"
#include "server/faults/watchdog.h"
#include "server/memory/adoption.h"
#include "server/memory/granules.h"
#include "server/memory/intake.h"
#include "server/memory/process_memory.h"
#include "server/memory/scratch.h"
#include "server/migration/departure.h"
#include "server/migration/incoming.h"
#include "server/migration/relocation.h"
#include "server/objects/linker.h"
#include "server/objects/objects.h"
#include "server/objects/placed_variables.h"
#include "server/records/record.h"
#include "server/recovery/recovery.h"
#include "server/recovery/replay.h"
#include "server/services.h"
#include "server/snapshot/preload.h"
#include "server/snapshot/schedule.h"
#include "server/snapshot/snapshots.h"
#include "server/snapshot/staging.h"

namespace xmig::server {

class Executor;
using Handler = CUresult (*)(Executor&, Record&);
extern const Handler kHandlers[];  // by Op; generated

struct Limits {
  double snapshot_cost;          // the share of time that may be spent on snapshots
  double hang_timeout = 0;    // seconds without progress after which the device's work counts as hung; 0: never
  double stall_bound = 0.2;   // seconds that a recovery is to keep the program waiting at most
};

class Executor final : public Witness, private Execution {
 public:
  Executor(const Services& services, Preload& preload, Physical& physical, const Limits& limits);
  ~Executor() override;

  // Before run(), on its thread: a job that starts from nothing, or one that an earlier server had.
  Result<> start_fresh();
  Result<> recover(std::vector<Hosted> given, std::optional<Delivery> deliver, std::optional<Careful> careful, Entry& entry) {
    return recovery_.follow(std::move(given), deliver, careful, entry);
  }
  // The job of a move's source, whose last snapshot is this one. Before that, and before a resumption: Incoming.
  Result<> take(uint64_t snapshot);
  // A job that no server has, whose memory is all in its shadow.
  Result<> resume_suspended(std::vector<Hosted> given);
  Incoming& incoming() { return incoming_; }

  // Until stop(). The error: the ring does not decode, or the state is lost.
  Result<> run();
  // Only what the journal holds now, for tests without a thread.
  void run_to_tail();

  // From other threads.
  void stop() { interrupts_.request(Interrupts::kStop); }
  void ask_for_snapshot() { interrupts_.request(Interrupts::kSnapshot | Interrupts::kAnswer); }
  void pause() { interrupts_.request(Interrupts::kPause); }
  // Stop at a snapshot: another server takes the job, unless unpause() comes first.
  void hand_over() { interrupts_.request(Interrupts::kHandover); }
  void suspend() { interrupts_.request(Interrupts::kSuspend); }
  Departure& departure() { return departure_; }
  // Continue, with the job's new files if there are any. The executor is paused.
  Result<> unpause(std::optional<Rebind> rebind);
  // Tell a daemon that is new to this job everything that it must hold; from then on it hears everything.
  void announce(ipc::UniqueFd socket, const std::string& device);

  std::string operation(uint64_t sequence) const override;
  Culprit culprit() const override;

  // For the generated dispatch.
  const DriverTable& driver() const { return driver_; }
  bool translate(journal::Kind kind, uint64_t handle, CUstream* real);
  bool translate(journal::Kind kind, uint64_t handle, CUevent* real);
  bool translate(journal::Kind kind, uint64_t handle, CUmodule* real);
  bool translate(journal::Kind kind, uint64_t handle, CUfunction* real);
  void created(journal::Kind kind, uint64_t handle, CUstream real, const Record& record);
  void created(journal::Kind kind, uint64_t handle, CUevent real, const Record& record);
  void destroyed(journal::Kind kind, uint64_t handle);
  bool live(uint64_t address, uint64_t bytes) const { return memory_.live.contains(address, bytes); }
  // What the program knows at an address of its own memory may be a variable, which the driver has placed somewhere else.
  CUdeviceptr where_the_device_has(uint64_t address) const {
    return variables_.empty() ? address : variable_at(address);
  }
  // May a record's work touch this? Device memory that is allocated; the program's page-locked memory too, which a
  // replay would write once more than the program expects, so that a snapshot follows.
  bool reachable(uint64_t address, uint64_t bytes) {
    if (live(address, bytes)) return true;
    if (!job_.is_pinned(address, bytes)) return false;
    uses_pinned();
    return true;
  }

  // peers.cc: `work`, which gets a stream, on memory at this address, in the order of `stream`. Where that is another
  // device's, which may not reach the memory, it goes into a stream of ours on the memory's own device.
  template <typename Work>
  CUresult where_it_is(uint64_t address, CUstream stream, Work&& work) {
    return on_device_of(home_of(address), stream, std::forward<Work>(work));
  }

  CUresult on_cuCtxSynchronize(Record& record);
  CUresult on_cuStreamSynchronize(Record& record);
  CUresult on_cuEventSynchronize(Record& record);
  CUresult on_cuStreamQuery(Record& record);
  CUresult on_cuEventElapsedTime_v2(Record& record);
  CUresult on_cuEventRecordWithFlags(Record& record);
  CUresult on_cuMemGetInfo_v2(Record& record);
  CUresult on_cuStreamDestroy_v2(Record& record);
  CUresult on_cuStreamWaitValue32_v2(Record& record);
  CUresult on_cuStreamWaitValue64_v2(Record& record);
  CUresult on_cuFuncSetAttribute(Record& record);
  CUresult on_cuMemcpyDtoDAsync_v2(Record& record);
  CUresult on_xmLimit(Record& record);
  CUresult on_xmPeer(Record& record);
  CUresult on_xmContextReset(Record& record);
  CUresult on_xmGrow(Record& record);
  CUresult on_xmShrink(Record& record);
  CUresult on_xmPin(Record& record);
  CUresult on_xmUnpin(Record& record);
  CUresult on_xmAlloc(Record& record);
  CUresult on_xmFree(Record& record);
  CUresult on_xmDiscard(Record& record);
  CUresult on_xmReuse(Record& record);
  CUresult on_xmCopyFromHost(Record& record);
  CUresult on_xmCopyFromPinned(Record& record);
  CUresult on_xmCopyToHost(Record& record);
  CUresult on_xmCopyToPinned(Record& record);
  CUresult on_xmCopy2D(Record& record);
  CUresult on_xmHostFunc(Record& record);
  CUresult on_xmImage(Record& record);
  CUresult on_xmImageFile(Record& record);
  CUresult on_xmModuleLoad(Record& record);
  CUresult on_xmModuleInfo(Record& record);
  CUresult on_xmKernel(Record& record);
  CUresult on_xmGlobal(Record& record);
  CUresult on_xmTwin(Record& record);
  CUresult on_xmVariables(Record& record);
  CUresult on_xmLink(Record& record);
  CUresult on_xmLinkEnd(Record& record);
  CUresult on_xmClusters(Record& record);
  CUresult on_xmTensorMap(Record& record);
  CUresult on_xmBindGlobal(Record& record);
  CUresult on_cuModuleUnload(Record& record);
  CUresult on_xmLaunch(Record& record);
  CUresult on_xmFirstLaunch(Record& record);
  CUresult on_xmGraph(Record& record);
  CUresult on_xmGraphLaunch(Record& record);
  CUresult on_xmGraphDestroy(Record& record);

 private:
  enum class Mode {
    kRun,      // from the ring
    kRestore,  // object records of a snapshot
    kObjects,  // from the ring, but the device's work is done already: objects only
  };
  struct HostCall;     // host_functions.cc
  class GraphBuilder;  // graphs.cc
  struct Plane;        // copies.cc
  struct PinnedWrite;  // copies.cc

  // executor.cc
  // Is it executed even while an ordinal answers everything else with the program's own fault?
  static bool keeps_books(Op op);
  bool execute_batch();
  bool pass_barrier();
  bool load_next(uint64_t tail);
  void execute_one();
  void execute_injected();
  void execute();
  std::optional<std::pair<device::InjectPoint, CUstream>> work();
  bool settle();
  void look_at_device(uint64_t now);
  void look_for_rest(uint64_t now);
  void mark_work();
  Watchdog::Look look() const;
  void hung();
  void dispatch();
  void fail_program(uint32_t ordinal, uint64_t sequence, CUresult error);
  void publish_executed();
  void sleep();
  void garbage(std::string text);
  void watch_tail();
  uint32_t hear(journal::JournalHeader& header);
  bool gives_way();
  void nap();
  void register_shared();
  void unregister_shared();
  const std::vector<CUstream>& busy_streams(uint32_t ordinal);
  CUstream thread_stream();
  bool check_finished_replay();

  void settle_after_arrival();

  // stops.cc
  void consider_snapshot(bool idle);
  std::optional<Schedule::Stop> wants_stop(bool idle, uint64_t now);
  bool nothing_to_snapshot(uint32_t requested);
  void act_upon(const Schedule::Stop& stop);
  bool external_waits();
  bool device_idle();
  void drain();
  void wait_paused();

  // Execution: stops.cc, remake.cc, modules.cc
  uint64_t position() const override { return position_; }
  bool replaying() const override { return replay_.running(); }
  void come_to_rest() override;
  Result<> take_snapshot(const char* reason, uint64_t stopped = 0) override;
  void park(const std::function<void()>& tell) override;
  void go_on() override;
  void entered() override;
  void start_at(const SnapshotContent& content, uint64_t executed) override;
  Result<> make_objects(const SnapshotContent& content) override;
  Result<> restore_variables() override;
  Result<> execute_objects(uint64_t until) override;
  void begin_replay(uint64_t executed, std::optional<Delivery> deliver, std::optional<Careful> careful) override;

  // remake.cc
  Result<> make_object(std::span<const std::byte> stored);
  void record_again(const RecordedEvent& recorded);

  // modules.cc
  CUresult add_twin(uint32_t module, uint64_t address, std::string name);
  CUdeviceptr variable_at(uint64_t address) const;
  void to_variable(Variable& variable);
  void from_variable(Variable& variable);
  CUresult unload(uint32_t index);
  void note_image(uint64_t number, CUresult result);

  // copies.cc
  CUresult between(const Plane& to, const Plane& from, CUstream stream);
  CUresult to_peer(const Plane& to, const Plane& from, CUstream stream);
  CUresult to_device(const Plane& to, const Plane& from, CUstream stream);
  CUresult to_device_in_turn(const Plane& to, const Plane& from, uint32_t ordinal, CUstream stream);
  CUresult to_host(const Plane& to, const Plane& from, CUstream stream);
  CUresult on_device(const Plane& to, const Plane& from, CUstream stream);
  std::optional<uint64_t> log_space(uint32_t ordinal, uint64_t bytes);
  CUresult bring(Record& record, uint32_t ordinal, const Plane& kept, const Plane& from, CUstream stream);
  CUresult note_copied(Record& record, uint64_t kept, CUstream stream);
  CUresult compare_with_pinned(Record& record, const Plane& from, CUstream stream);

  // peers.cc
  // The device of the record's stream, or of its context if it names none.
  uint32_t stream_ordinal() const {
    if (capture_) return capture_->second;
    return used_stream_ ? used_stream_->second : record_.header().ordinal;
  }
  // The device whose memory this is; the stream's, if it is none's.
  uint32_t home_of(uint64_t address) const;
  template <typename Work>
  CUresult on_device_of(uint32_t ordinal, CUstream stream, Work&& work) {
    if (capture_ || ordinal == stream_ordinal()) {
      contexts_.use(stream_ordinal());  // a snapshot that was taken meanwhile may have left another one
      return work(stream);
    }
    CUstream aside = nullptr;
    if (const CUresult result = step_aside(ordinal, stream, &aside); result != CUDA_SUCCESS) return result;
    const CUresult result = work(aside);
    const CUresult back = come_back(ordinal, stream, aside);
    return result == CUDA_SUCCESS ? back : result;
  }
  CUresult aside_mark(uint32_t ordinal, CUevent* mark);
  CUresult step_aside(uint32_t ordinal, CUstream stream, CUstream* aside);
  CUresult come_back(uint32_t ordinal, CUstream stream, CUstream aside);
  void drop_asides(CUstream gone);
  void close_asides();
  bool is_shared(uint32_t memory, uint32_t device) const;
  CUresult share(uint32_t memory, uint32_t device, bool on);
  void reset_peers(uint32_t context);

  // memory.cc
  uint64_t shadow_bytes(uint32_t ordinal);
  uint64_t free_bytes(uint32_t ordinal);
  // Until `wanted` bytes of the device are free, if as many are when everybody has let go of what was released.
  void wait_for_room(uint32_t ordinal, uint64_t wanted, uint64_t coming);
  void reset_context(uint32_t context);

  // events.cc
  template <typename Args, typename Call>
  CUresult wait_for_value(Record& record, Call&& call);
  CUresult await(Record& record, std::unique_ptr<Wait> wait);
  CUresult record_event(Event& event, uint32_t index, CUstream stream, unsigned int flags, uint64_t sequence);
  CUstream publisher_stream();
  void leave_work(CUstream gone);

  // Work of the device reads or writes page-locked memory by itself.
  void uses_pinned() {
    schedule_.set_snapshot_now(true);
    intake_.may_write_all();
  }

  // launches.cc
  Kernel* find_kernel(uint64_t handle);
  CUresult launch(Record& record, const Args_xmLaunch& args);
  std::vector<std::byte> with_variables(std::span<const std::byte> parameters) const;

  // host_functions.cc
  void post_callback(uint64_t position);

  // graphs.cc
  CUresult graph_stream(uint32_t ordinal, CUstream* stream);
  uint32_t home_of_work(Op op, std::span<const std::byte> arguments);
  GraphExec* find_graph(uint64_t handle);
  CUresult destroy(const GraphExec& graph);
  CUresult make_graph(std::span<const std::byte> image, uint64_t flags, GraphExec& made, GraphExec* before);

  const Services services_;
  device::Device& device_;
  const DriverTable& driver_;
  Contexts& contexts_;
  Daemon& daemon_;
  Log& log_;
  Faults& faults_;
  Injector& injector_;
  Job& job_;
  Preload& preload_;

  ProcessMemory memory_;
  Granules granules_;
  Intake intake_;
  Linker linker_;
  Objects objects_;
  std::vector<CUstream> thread_streams_;  // [thread slot * ordinals + ordinal]: per-thread default streams
  std::array<CUstream, journal::kMaxDevices> publishers_{};  // see record_event()
  std::array<CUstream, journal::kMaxDevices> graph_streams_{};  // graphs are captured from these
  std::optional<std::pair<CUstream, uint32_t>> capture_;         // while one is, which, and of which device
  // Streams of ours beside one of the program's (its device's ordinal, the stream), on another device: on_device_of().
  std::map<std::tuple<uint32_t, CUstream, uint32_t>, CUstream> asides_;
  std::array<CUevent, journal::kMaxDevices> aside_marks_{};
  // Memory (its device's ordinal) that a device reaches although the program did not ask: its graphs' copies.
  std::set<std::pair<uint32_t, uint32_t>> lasting_shares_;
  ScratchPool scratch_;
  Replies replies_{&job_};
  std::map<uint64_t, Variable> variables_;  // by the twin's address
  PlacedVariables placed_;
  Waits waits_;
  Progress progress_;
  Working working_;

  Record record_;
  Mode mode_ = Mode::kRun;
  uint64_t position_ = 0;
  uint64_t sequence_ = 0;   // of the last record executed
  std::atomic<uint64_t> executing_{0};  // sequence_, or the one that is being executed
  std::atomic<bool> alone_{false};      // and what came before it is done
  std::optional<std::pair<CUstream, uint32_t>> used_stream_;  // by that record, and of which device it is
  CUstream last_stream_ = nullptr;       // that any record has used
  uint32_t last_ordinal_ = 0;
  uint64_t looked_at_ = 0;  // when the device was last queried how it is
  uint64_t rest_look_at_ = 0;  // when it is queried whether it has come to rest; 0: not while there are records
  uint64_t rest_after_ = 0;    // ns, between two such looks
  uint32_t batches_ = 0;
  uint32_t caller_ = 0;     // slot of the thread that the last record came from
  uint64_t heard_at_ = 0;  // when it last began to run
  uint32_t heard_ = 0;  // JournalHeader::doorbell, then
  bool resting_ = false;   // its last sleep was over by itself
  uint64_t published_ = 0;  // what `executed` says
  uint64_t record_position_ = 0;
  Failures failures_{};
  bool any_failure_ = false;
  std::optional<std::string> broken_;  // the job is over, and why

  std::string snapshot_trouble_;  // the last reason why a snapshot was not possible: logged once
  std::atomic<uint64_t> outside_waits_{0};  // host functions that the program has yet to run
  std::atomic<bool> value_waits_{false};    // a stream waits for a value that a later record may write

  uint64_t barrier_since_ = 0;

  uint32_t generation_ = 0;

  std::mutex callback_mutex_;
  const double hang_timeout_;
  std::optional<Watchdog> watchdog_;
  Placement placement_;

  // The parts. Each is given those before it, and Execution, which this is.
  Interrupts interrupts_;
  Staging staging_;
  Snapshots snapshots_;
  Schedule schedule_;
  Relocation relocation_;
  Departure departure_;
  Adoption adoption_;
  Incoming incoming_;
  Replay replay_;
  Recovery recovery_;

  std::mutex pause_mutex_;
  std::condition_variable pause_changed_;
  bool paused_ = false;           // guarded by pause_mutex_
  std::function<void()> parked_;  // likewise: tells the daemon once more why nothing is executed
};

}  // namespace xmig::server
