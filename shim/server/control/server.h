// The server's life: a warm standby, then one job, until its program ends.
//
// This thread listens to the daemon and watches the program; the job itself is the executor's thread. A server whose devices are to
// be opened late (first_record.h) has no executor before that: its thread opens them, and makes it.
//
// Its fields are this thread's, but for the steps of a move, under their lock, `serving_`, and until `executing_` the executor.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "common/result.h"
#include "device/device.h"
#include "server/channel/daemon.h"
#include "server/channel/entry.h"
#include "server/channel/job.h"
#include "server/channel/meetings.h"
#include "server/channel/replica_sources.h"
#include "server/channel/requests.h"
#include "server/contexts.h"
#include "server/control/first_record.h"
#include "server/executor/executor.h"
#include "server/faults/faults.h"
#include "server/faults/injector.h"
#include "server/migration/ahead.h"
#include "server/options.h"

namespace xmig::server {

class Server {
 public:
  Server(Options options, std::unique_ptr<device::Device> device);
  ~Server();

  // Until there is nothing more to do: the exit status of the process. `started` is when the process was.
  int run(uint64_t started);

 private:
  int live(uint64_t started);
  void leave();
  bool settle();
  bool rests();
  [[noreturn]] void end_idle();
  // Each returns an exit status when the server is to end.
  std::optional<int> listen();
  std::optional<int> reconnect();
  std::optional<int> handle(Request request);
  std::optional<int> operator()(Assign& request);
  std::optional<int> operator()(MemoryAdd& request);
  std::optional<int> operator()(MemoryDrop& request);
  std::optional<int> operator()(Go& request);
  std::optional<int> operator()(Enter& request);
  std::optional<int> operator()(Inject& request);
  std::optional<int> operator()(TakeSnapshot& request);
  std::optional<int> operator()(Round& request);
  std::optional<int> operator()(Handover& request);
  std::optional<int> operator()(Take& request);
  std::optional<int> operator()(Room& request);
  std::optional<int> operator()(PrepareSuspend& request);
  std::optional<int> operator()(Suspend& request);
  std::optional<int> operator()(AbortSuspend& request);
  std::optional<int> operator()(OpenDevices& request);
  std::optional<int> operator()(LoadAhead& request);
  std::optional<int> operator()(RoundAhead& request);
  std::optional<int> operator()(PrepareCommunicator& request);
  std::optional<int> operator()(ForgetCommunicator& request);
  std::optional<int> operator()(MemoryGivenUp& request);
  std::optional<int> operator()(Pause& request);
  std::optional<int> operator()(Rebind& request);
  std::optional<int> operator()(Continue& request);
  std::optional<int> operator()(Output& request);
  std::optional<int> operator()(Backlog& request);
  std::optional<int> operator()(Met& request);
  std::optional<int> operator()(GroupStop& request);
  std::optional<int> operator()(GroupHold& request);
  std::optional<int> operator()(GroupTake& request);
  std::optional<int> operator()(GroupContinue& request);
  std::optional<int> step(GroupSnapshot::Step step);
  std::optional<int> operator()(CommunicatorLost& request);
  std::optional<int> operator()(ReplicaRank& request);
  std::optional<int> operator()(ReplicaMemory& request);
  std::optional<int> operator()(ReplicasNamed& request);
  std::optional<int> operator()(ChunksBrought& request);
  std::optional<int> operator()(ReadChunks& request);
  std::optional<int> operator()(CopyUnique& request);
  std::optional<int> operator()(CopySnapshot& request);
  std::optional<int> operator()(ForgetSnapshotCopy& request);
  std::optional<int> operator()(Profile& request);
  std::optional<int> operator()(Share& request);
  std::optional<int> operator()(Trace& request);
  std::optional<int> operator()(EndTrace& request);
  std::optional<int> wanted(const Result<>& given, const char* what);
  std::optional<int> operator()(Stop& request);
  std::optional<int> unpause(std::optional<Rebind> rebind);

  void map_ahead(Hosted memory);
  void load_further();
  bool has_work_ahead() const;
  void work_ahead();
  void begin_ahead();
  [[noreturn]] void end_ahead(const Error& why);
  bool watch_client();
  bool waits_to_enter() const;
  void enter();
  void enter_job();
  Result<> open(uint64_t ordinals);
  void opened_another(uint32_t ordinal);
  uint64_t devices_of_job(uint64_t more = 0) const;
  Services services() { return {*device_, contexts_, daemon_, log_, faults_, injector_, *job_, meetings_, membership_, replica_sources_, standby_memory_, profiling_, sharing_}; }
  void make_executor();
  void begin();
  void serve(std::vector<Hosted> given);
  bool open_late();
  bool executes();
  bool is_executing();
  void announce(ipc::UniqueFd socket);
  Result<> start(std::vector<Hosted> given);
  [[noreturn]] void lose(const Error& why);
  [[noreturn]] void give_back(const std::string& why);

  // server_moves.cc: the target of a move does these one after the other, on the executor's thread.
  using Step = std::variant<MemoryAdd, MemoryDrop, Round, Take>;
  void begin_move();
  void move();
  Result<> make_step(Step& step);
  std::optional<int> add_step(Step step);

  const Options options_;
  const std::unique_ptr<device::Device> device_;
  Daemon daemon_;
  Log log_{daemon_};
  Contexts contexts_;
  Faults faults_;
  Injector injector_;
  Meetings meetings_{daemon_, options_.address};
  Membership membership_{daemon_};
  ReplicaSources replica_sources_;
  StandbyMemory standby_memory_{daemon_};
  Profiling profiling_;
  Sharing sharing_;
  ModulePreload preload_;
  PreparedCommunicators prepared_;
  Physical physical_;
  Ahead ahead_;

  int socket_ = -1;  // the daemon's; owned by daemon_
  ipc::UniqueFd client_;  // pidfd
  std::optional<Assign> assignment_;
  std::optional<Job> job_;
  Entry entry_;
  std::vector<Hosted> given_;
  std::vector<ipc::UniqueFd> room_;  // for the next suspension
  std::optional<FirstRecord> first_record_;  // of a job that began before the devices were open
  std::mutex opening_mutex_;
  std::condition_variable opening_changed_;
  bool executing_ = false;        // guarded by opening_mutex_; with first_record_: executor_ is everybody's
  bool left_late_ = false;        // guarded by opening_mutex_; with first_record_: there will be no executor
  uint32_t failed_openings_ = 0;  // guarded by opening_mutex_
  std::unique_ptr<Executor> executor_;
  std::thread thread_;
  std::atomic<bool> serving_{false};  // the job's state is complete: a new daemon can be informed of it
  std::atomic<bool> reports_openings_{false};  // the daemon knows that there are contexts
  bool begun_ = false;                // the job is this server's
  std::mutex steps_mutex_;
  std::condition_variable steps_changed_;
  std::deque<Step> steps_;  // guarded by steps_mutex_
  bool leaves_ = false;     // guarded by steps_mutex_
  bool pausing_ = false;  // the program may end in order to be restored elsewhere
};

// The job is over: every waiting thread of the program wakes up and gets `error`.
void mark_lost(const Job& job, int error);

}  // namespace xmig::server
