// The executor: reads the journal, drives the device. One thread; it never waits for the device except to take a cut.
//
// Invariants:
//   position_ is the start of the next record; everything before it was executed once, in order.
//   A record is acted upon only from the private copy in record_; payloads are read in place, as data.
//   Nothing is answered after a sticky fault (Faults), nothing is answered twice (Record::replied).
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

#include "device/device.h"
#include "journal/module_info.h"
#include "server/channel/daemon.h"
#include "server/channel/entry.h"
#include "server/channel/job.h"
#include "server/channel/requests.h"
#include "server/contexts.h"
#include "server/executor/placement.h"
#include "server/executor/progress.h"
#include "server/executor/record.h"
#include "server/executor/replies.h"
#include "server/executor/waits.h"
#include "server/executor/working.h"
#include "server/faults/faults.h"
#include "server/faults/injector.h"
#include "server/faults/watchdog.h"
#include "server/memory/bounce.h"
#include "server/memory/copy_log.h"
#include "server/memory/hosting.h"
#include "server/memory/images.h"
#include "server/memory/intake.h"
#include "server/memory/live_set.h"
#include "server/memory/scratch.h"
#include "server/memory/shadow.h"
#include "server/migration/arrival.h"
#include "server/objects/linker.h"
#include "server/objects/objects.h"
#include "server/objects/placed_variables.h"
#include "server/recovery/preload.h"
#include "server/recovery/redo_times.h"
#include "server/snapshot/cut_file.h"
#include "server/snapshot/cut_policy.h"
#include "server/snapshot/stall.h"

namespace xmig::server {

// Why a move or a resumption cannot be, in the words of the protocol.
struct Trouble {
  std::string code, text;
};

class Executor;
using Handler = CUresult (*)(Executor&, Record&);
extern const Handler kHandlers[];  // by Op; generated

class Executor final : public Witness {
 public:
  // `hang_timeout`: seconds without progress after which the device's work counts as hung; 0: never. `stall_bound`: seconds
  // that a recovery is to keep the program waiting at most; `cut_budget`: the share of time that may be spent for that.
  Executor(device::Device& device, Contexts& contexts, Daemon& daemon, Log& log, Faults& faults, Injector& injector,
           Preload& preload, Physical& physical, Job& job, double cut_budget, double hang_timeout = 0,
           double stall_bound = 0.2);
  ~Executor() override;

  // Before run(): a job that starts from nothing, or one that an earlier server had. `given` is what the daemon holds.
  // False, and `why`: the job cannot be served.
  bool start_fresh(std::string& why);
  // A recovery does all that writes only what is this server's, then waits for its `entry`, if that is not open yet.
  bool recover(std::vector<Hosted> given, std::optional<Delivery> deliver, std::optional<Careful> careful, Entry& entry,
               std::string& why);
  // The target of a move (move.cc), in this order, all on one thread. False, and `trouble`: it cannot be; the job is as it
  // was. `first_id`: of the memory that is made here.
  bool begin_move(uint64_t first_id, Trouble& trouble);
  bool import(Hosted memory, Trouble& trouble);
  void forget(uint64_t id);
  bool round(uint64_t number, uint64_t cut, Trouble& trouble);
  bool take(uint64_t cut, Trouble& trouble);

  // A job that no server has, whose memory is all in its shadow: first what can be done before that has come, then the rest.
  void prepare_resumption();
  bool resume_suspended(std::vector<Hosted> given, Trouble& trouble);

  // Until stop(). False, and `why`, when the ring does not decode or the state is lost.
  bool run(std::string& why);
  // Only what the journal holds now, for tests without a thread.
  void run_to_tail();

  // From other threads.
  void stop() { request(kStop); }
  void ask_for_cut() { request(kCut | kAnswer); }
  void pause() { request(kPause); }
  // Stop at a cut: another server takes the job, unless resume() comes first.
  void hand_over() { request(kHandover); }
  // suspend.cc. From now on, is the whole shadow kept in host memory?
  void keep_on_host(bool host);
  void prepare_suspend(PrepareSuspend prepare);
  void suspend() { request(kSuspend); }
  void abort_suspend();
  // Continue, with the job's new files if there are any. The executor is paused.
  bool resume(std::optional<Rebind> rebind, std::string& why);
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
  bool live(uint64_t address, uint64_t bytes) const { return live_.contains(address, bytes); }
  // What the program knows at an address of its own memory may be a variable, which the driver has placed somewhere else.
  CUdeviceptr where_the_device_has(uint64_t address) const {
    return variables_.empty() ? address : variable_at(address);
  }
  // May a record's work touch this? Device memory that is allocated; the program's page-locked memory too, which a
  // redo would write once more than the program expects, so that a cut follows.
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
  // kAnswer: if there is nothing to cut, the daemon is told so.
  enum Requests : uint32_t { kStop = 1, kCut = 2, kPause = 4, kHandover = 8, kSuspend = 16, kAnswer = 32 };
  enum class Mode {
    kRun,      // from the ring
    kRestore,  // object records of a cut
    kObjects,  // from the ring, but the device's work is done already: objects only
  };
  // Execution has stopped until the device is idle, to take a cut or to pause.
  struct Stop {
    const char* reason;
    uint64_t since;
    uint64_t deadline;  // then it goes on without, unless the device has come further since
    Requests request;   // that it is for
    uint64_t progress = 0;  // of the device, when that was last looked at
  };
  struct HostCall;     // host_functions.cc
  class GraphBuilder;  // graphs.cc
  struct Plane;        // copies.cc
  struct PinnedWrite;  // copies.cc

  // executor.cc
  // Is it executed even while an ordinal answers everything else with the program's own fault?
  static bool keeps_books(Op op);
  void request(uint32_t what);
  bool execute_batch();
  bool pass_barrier();
  bool load_next(uint64_t tail);
  void execute_one();
  void execute_struck();
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
  void wait_paused();
  void park(const std::function<void()>& tell);
  void register_shared();
  void unregister_shared();
  const std::vector<CUstream>& busy_streams(uint32_t ordinal);
  CUstream thread_stream();
  bool check_finished_redo();

  // cut.cc
  void consider_cut(bool idle);
  std::optional<Stop> wants_cut(bool idle, uint64_t now);
  CutPolicy::Now policy_now(uint64_t now) const;
  bool external_waits();
  bool device_idle();
  void drain();
  bool take_cut(const char* reason, uint64_t stopped = 0);
  std::string attempt_cut(CutReport& report, uint64_t& once_ns);
  std::optional<uint64_t> zeros_hash();
  bool must_leave(uint64_t slot) const;
  bool may_return(uint64_t slot) const;
  std::array<uint64_t, journal::kMaxDevices> slots_wanted(const std::vector<uint64_t>& granules,
                                                          const std::vector<uint64_t>& hashes) const;
  enum class While { kDrained, kRunning };  // the device, where it has to hash or to copy
  device::Device::Where where(uint32_t ordinal, While when) const;
  bool hash_chunks(const std::vector<uint64_t>& granules, std::vector<uint64_t>& hashes, While when = While::kDrained);
  // Copies of granules, `to` and `from`, by how they have to be made: plain memory the device cannot reach.
  struct Moves {
    std::vector<std::pair<uint64_t, uint64_t>> direct;
    std::vector<Bounce::Piece> to_plain, from_plain;
  };
  void add_move(Moves& moves, uint64_t to, uint64_t from) const;
  bool copy_chunks(const std::vector<std::pair<uint64_t, uint64_t>>& moves);
  bool copy(const Moves& moves, std::string& why, While when = While::kDrained);
  // Chunks of a cut whose content goes to their slots: where each is in the list, and its content's hash in the last cut if that
  // had the slot, too.
  struct Changed {
    size_t chunk;
    std::optional<uint64_t> before;
  };
  std::vector<bool> likely_changed(const std::vector<uint64_t>& granules) const;
  bool fill_shadow(std::vector<ChunkState>& chunks, const std::vector<Changed>& changed);
  void trim();
  void trim_shadow(bool whole = false);

  // redo.cc
  bool enter(Entry& entry, uint64_t began, std::string& why);
  bool adopt(std::vector<Hosted> given, std::string& why);
  CUresult adopt_one(Hosted memory, std::string& why);
  CUresult add_twin(uint32_t module, uint64_t address, std::string name);
  CUdeviceptr variable_at(uint64_t address) const;
  void to_variable(Variable& variable);
  void from_variable(Variable& variable);
  bool restore_variables(std::string& why);
  bool restore_objects(const CutContent& content, std::string& why);
  bool take_over_chunks(CutContent& content, std::string& why);
  void discard_what_was_not_kept();
  void restore_memory(const std::vector<Extent>& fresh);
  bool keep_copies(uint64_t from, uint64_t until, std::string& why);
  bool replay_objects(uint64_t until, std::string& why);

  // move.cc
  std::optional<CutContent> read_cut(uint64_t at_least);
  struct Known {  // of this device's memory, for a job that comes without its own
    uint64_t address;
    std::optional<uint64_t> hash;
  };
  bool copy_and_hash(const std::vector<std::pair<uint64_t, uint64_t>>& moves, std::vector<uint64_t>& hashes);
  void hand_over(uint64_t stopped);
  void go_on();
  bool make_missing(const CutContent& content, std::string& why);
  std::optional<uint64_t> known_hash(std::vector<Known>::const_iterator& at, uint64_t address) const;
  void clear(const std::vector<uint64_t>& granules);
  void make_buffers();
  void begin_arrival(const CutContent& content);
  void end_arrival();
  bool fill(std::string& why);

  // relocation.cc
  class Relocation;
  enum class Purpose { kSuspension, kMoveThroughHost, kSettling };
  void start_relocation(Purpose purpose, Place to, uint64_t bytes_hint, std::vector<ipc::UniqueFd> room);
  void end_relocation(bool drop);
  void drop_staged();
  void start_settling();
  void end_settling();
  std::unique_lock<std::mutex> keep_staging_still();
  std::optional<uint64_t> staged(uint64_t address, uint64_t hash, bool& changed) const;
  void consume_staged(const ChunkState& chunk);

  // suspend.cc
  std::optional<uint64_t> returned(uint32_t ordinal, uint64_t& wanted);
  Place cut_place() const;
  void back_to_device();
  void suspend(uint64_t stopped);
  void fail_suspend(const std::string& why);

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
      contexts_.use(stream_ordinal());  // a cut that was taken meanwhile may have left another one
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
  void describe_peers();
  bool keeps_promises(Trouble& trouble) const;
  bool is_shared(uint32_t memory, uint32_t device) const;
  CUresult share(uint32_t memory, uint32_t device, bool on);
  void reset_peers(uint32_t context);

  // memory.cc
  uint64_t shadow_bytes(uint32_t ordinal);
  uint64_t free_bytes(uint32_t ordinal);
  // Until `wanted` bytes of the device are free, if as many are when everybody has let go of what was released.
  void wait_for_room(uint32_t ordinal, uint64_t wanted, uint64_t coming);
  void reset_context(uint32_t context);

  // modules.cc
  CUresult unload(uint32_t index);
  void note_image(uint64_t number, CUresult result);

  // events.cc
  template <typename Args, typename Call>
  CUresult wait_for_value(Record& record, Call&& call);
  CUresult await(Record& record, std::unique_ptr<Wait> wait);
  CUresult record_event(Event& event, uint32_t index, CUstream stream, unsigned int flags, uint64_t sequence);
  CUstream publisher_stream();
  void leave_work(CUstream gone);

  // Work of the device reads or writes page-locked memory by itself.
  void uses_pinned() {
    cut_now_ = true;
    intake_.may_write_all();
  }

  // launches.cc
  CUresult launch(Record& record, const Args_xmLaunch& args);
  std::vector<std::byte> with_variables(std::span<const std::byte> parameters) const;
  CUresult copy_attributes(CUlaunchAttribute* to, uint32_t count, const std::byte* from);

  // host_functions.cc
  void post_callback(uint64_t position);

  // graphs.cc
  CUresult graph_stream(uint32_t ordinal, CUstream* stream);
  uint32_t home_of_work(Op op, std::span<const std::byte> arguments);
  GraphExec* find_graph(uint64_t handle);
  CUresult destroy(const GraphExec& graph);
  CUresult make_graph(std::span<const std::byte> image, uint64_t flags, GraphExec& made, GraphExec* before);

  device::Device& device_;
  const DriverTable& driver_;
  Contexts& contexts_;
  Daemon& daemon_;
  Log& log_;
  Faults& faults_;
  Injector& injector_;
  Preload& preload_;
  Job& job_;

  Physical& physical_;
  Hosting hosting_;
  Shadow shadow_;
  CopyLog copy_log_;
  Intake intake_;
  Images images_;
  Linker linker_;
  std::mutex hosted_mutex_;  // over the four above: announce() reads them while the executor works
  LiveSet live_;
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
  Bounce bounce_;
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
  std::array<CUstream, journal::kMaxDevices> kernels_in_{};  // the stream of each device's last kernel
  uint64_t looked_at_ = 0;  // when the device was last asked how it is
  uint64_t rest_look_at_ = 0;  // when it is asked whether it has come to rest; 0: not while there are records
  uint64_t rest_after_ = 0;    // ns, between two such looks
  uint32_t batches_ = 0;
  uint32_t caller_ = 0;     // slot of the thread that the last record came from
  uint64_t heard_at_ = 0;  // when it last began to run
  uint32_t heard_ = 0;  // JournalHeader::doorbell, then
  bool resting_ = false;   // its last sleep was over by itself
  uint64_t published_ = 0;  // what `executed` says
  uint64_t record_position_ = 0;
  std::array<Failure, journal::kMaxDevices> failures_{};
  bool any_failure_ = false;
  std::optional<std::string> broken_;  // the job is over, and why

  const uint64_t stall_bound_;  // ns
  CutPolicy policy_;
  Stall stall_;
  std::optional<Stop> stop_;
  std::vector<ChunkState> chunks_;  // of the last committed cut, by address
  std::vector<uint64_t> changed_;   // addresses of those whose content was not the one of the cut before
  std::optional<uint64_t> zeros_hash_;
  uint64_t cut_number_ = 0;
  bool has_cut_ = false;  // this server
  std::atomic<uint64_t> cuts_decided_{0};  // taken, or found not to be needed or not possible
  uint64_t cut_position_ = 0;
  uint64_t trimmed_ = 0;
  std::optional<uint32_t> blocking_slot_;  // the thread whose unread reply keeps the journal from being trimmed
  uint64_t blocked_at_ = 0;
  uint64_t cut_blocked_until_ = 0;  // after one that was not possible
  uint64_t cut_retry_ = 0;
  bool cut_now_ = false;        // before another record: the device has read memory that the program may change
  bool evict_shadow_ = false;   // the program needs the device memory that the shadow takes
  std::string cut_trouble_;     // the last reason why a cut was not possible: logged once
  std::atomic<uint64_t> outside_waits_{0};  // host functions that the program has yet to run
  std::atomic<bool> value_waits_{false};    // a stream waits for a value that a later record may write

  uint64_t barrier_since_ = 0;

  // A job that comes without its device memory (a move, a resumption). What is known of this device's memory then:
  bool comes_without_memory_ = false;
  std::vector<Known> known_;  // of the last round's chunks, in their order
  std::future<void> buffers_;  // being made, for what arrives
  std::unique_ptr<Arrival> arrival_;
  Trouble trouble_;
  uint64_t imports_ = 0;  // of another device's memory
  uint64_t handover_by_ = 0;

  // Where cuts put content; changed between them only.
  Place place_ = Place::kDevice;
  std::atomic<Place> wanted_place_{Place::kDevice};
  std::atomic<bool> shadow_returns_{false};  // what is not on the device may go there with the next cut
  std::atomic<bool> must_settle_{false};     // a cut that is asked for is taken although nothing was executed
  uint64_t settle_at_ = 0;                   // ns: then the shadow comes to this device, and a cut follows
  bool settling_ = false;                    // it is on its way
  uint64_t trim_shadow_at_ = 0;              // ns: then the next of its empty slabs goes
  // What is being brought to where it can stay without a server, behind the executor. A cut keeps it still.
  struct Staged {
    uint64_t hash = 0, slot = 0;
  };
  std::mutex staging_mutex_;
  std::atomic<bool> cut_wants_staging_{false};
  std::unordered_map<uint64_t, Staged> staged_;  // by granule; changed under staging_mutex_
  std::atomic<Place> suspend_to_{Place::kHost};
  std::mutex relocation_mutex_;
  std::shared_ptr<Relocation> relocation_;  // guarded by relocation_mutex_
  std::function<void()> parked_;  // guarded by pause_mutex_: tells the daemon once more why nothing is executed
  uint32_t generation_ = 0;

  bool redoing_ = false;
  uint64_t redo_until_ = 0;
  uint64_t redone_ = 0;
  RedoTimes redo_times_;
  std::optional<Delivery> deliver_;
  std::optional<Careful> careful_;

  std::mutex callback_mutex_;
  const double hang_timeout_;
  std::optional<Watchdog> watchdog_;
  Placement placement_;

  std::atomic<uint32_t> requests_{0};
  std::mutex pause_mutex_;
  std::condition_variable pause_changed_;
  bool paused_ = false;  // guarded by pause_mutex_
};

}  // namespace xmig::server
