#include "server/control/server.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "ipc/seqpacket.h"
#include "journal/futex.h"
#include "server/clock.h"
#include "server/recovery/replicas.h"

namespace xmig::server {
namespace {

constexpr int kReconnectMs = 200;
constexpr int kLostExit = 1;

bool is_mps_client() { return ::getenv("CUDA_MPS_PIPE_DIRECTORY") != nullptr; }

uint32_t peer_pid(int socket) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  const bool known = ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0;
  return known && credentials.pid > 0 ? static_cast<uint32_t>(credentials.pid) : 0;
}

}  // namespace

void mark_lost(const Job& job, int error) {
  journal::JournalHeader& header = job.header();
  header.context_error.store(static_cast<uint32_t>(error));
  header.state.store(static_cast<uint32_t>(journal::ServerState::kLost));
  header.trimmed_futex.fetch_add(1);
  header.callback_doorbell.fetch_add(1);
  journal::futex_wake(header.state);
  journal::futex_wake(header.trimmed_futex);
  journal::futex_wake(header.callback_doorbell);
  const uint64_t tail = header.tail.load();
  for (const journal::ThreadSlot& slot : header.threads) {
    const uint64_t waiting = slot.waiting.load();
    if (waiting >= tail || tail - waiting > job.journal().ring_bytes() || waiting % 8 != 0) continue;
    journal::futex_wake(reinterpret_cast<const journal::RecordHeader*>(job.journal().at(waiting))->state);
  }
}

Server::Server(Options options, std::unique_ptr<device::Device> device)
    : options_(std::move(options)),
      device_(std::move(device)),
      contexts_(*device_, static_cast<uint32_t>(options_.ordinals.size())),
      faults_(*device_, daemon_),
      injector_(*device_, daemon_, faults_),
      preload_(*device_, contexts_, log_),
      prepared_(*device_, contexts_, meetings_, daemon_, log_),
      physical_(*device_, daemon_, log_),
      ahead_(*device_, contexts_, physical_) {
  contexts_.hear([this](uint32_t ordinal) { opened_another(ordinal); });
}

Server::~Server() { leave(); }

// The executor's thread comes to its end.
void Server::leave() {
  if (!thread_.joinable()) return;
  entry_.give_up();
  {
    const std::lock_guard lock(steps_mutex_);
    leaves_ = true;
    steps_changed_.notify_one();
  }
  {
    std::unique_lock lock(opening_mutex_);
    if (first_record_) {
      first_record_->give_up();
      opening_changed_.wait(lock, [this] { return executing_ || left_late_; });
    }
    if (executor_) executor_->stop();
  }
  thread_.join();
}

int Server::run(uint64_t started) {
  int status = live(started);
  if (status == 0 && is_mps_client() && !settle()) status = kLostExit;
  daemon_.hang_up();
  return status;
}

// A client of MPS: nothing is promised of the others when one ends whose kernels run. False: perhaps some still do, and the daemon
// sees it by the exit code. What never ends is ended by the daemon.
bool Server::settle() {
  leave();
  return rests();
}

bool Server::rests() {
  for (uint32_t ordinal = 0; ordinal < contexts_.count(); ++ordinal) {
    if (!contexts_.is_open(ordinal)) continue;
    contexts_.use(ordinal);
    if (device_->driver().cuCtxSynchronize() != CUDA_SUCCESS) return false;
  }
  return true;
}

// It has not got the process, and says why not. What it has copied is over when it exits.
void Server::end_idle() {
  const bool harmless = is_mps_client() && rests();
  daemon_.hang_up();
  ::_exit(harmless ? 0 : kLostExit);
}

int Server::live(uint64_t started) {
  socket_ = options_.control_fd;
  { const auto attached = daemon_.attach(ipc::UniqueFd(options_.control_fd)); }
  if (const Status started = device_->start(); !started) {
    daemon_.unavailable(device_->number_of(started), "the device's driver does not start: " + device_->text(started));
    return kLostExit;
  }
  if (const Result<> opened = open(options_.open); !opened) {
    daemon_.unavailable(opened.error().number, opened.why());
    return kLostExit;
  }
  daemon_.hello(options_.device(), static_cast<double>(now_ns() - started) / 1e6, device_->own_bytes());
  while (true) {
    const std::optional<int> status = socket_ >= 0 ? listen() : reconnect();
    if (status) return *status;
  }
}

// One round: a message of the daemon, or the end of the program.
std::optional<int> Server::listen() {
  pollfd watched[] = {{socket_, POLLIN, 0}, {pausing_ ? -1 : client_.get(), POLLIN, 0}};
  const int ready = ::poll(watched, 2, has_work_ahead() ? 0 : -1);
  if (ready < 0) return errno == EINTR ? std::nullopt : std::optional(kLostExit);
  if (ready == 0) {
    work_ahead();
    return std::nullopt;
  }
  if (watched[1].revents != 0) {
    daemon_.bye("the program has exited");
    return 0;
  }
  if (watched[0].revents == 0) return std::nullopt;
  std::array<std::byte, kMaxMessageBytes> buffer;
  ipc::Received received = ipc::receive_message(socket_, buffer, kMaxRequestFds);
  std::string why = "the daemon has closed the connection";
  if (received.error == EINTR || received.error == EAGAIN) return std::nullopt;
  if (received.error == 0 && received.bytes != 0) {
    Result<Request> request = parse_request(std::span(buffer).first(received.bytes), std::move(received.fds));
    if (request) return handle(std::move(*request));
    why = request.why();
    log_(Level::kError, "a message of the daemon makes no sense, the connection ends: " + why);
  }
  daemon_.detach();
  socket_ = -1;
  profiling_.end_trace();  // who requested it is gone
  replica_sources_.close();
  standby_memory_.gone();
  if (job_) {
    for (std::atomic<uint64_t>& bytes : job_->header().standby_bytes) bytes.store(0);
  }
  static_cast<void>(step(GroupSnapshot::Alone{}));
  // A standby is of no use without its daemon, nor is a job whose memory did not come complete, or that was not entered.
  return begun_ && !waits_to_enter() ? std::nullopt : std::optional(0);
}

std::optional<int> Server::reconnect() {
  pollfd watched{pausing_ ? -1 : client_.get(), POLLIN, 0};
  if (::poll(&watched, 1, kReconnectMs) > 0) return 0;
  if (!serving_ || options_.runtime_dir.empty()) return std::nullopt;
  ipc::UniqueFd socket = ipc::connect_to(options_.runtime_dir + "/control.sock");
  if (!socket) return std::nullopt;
  socket_ = socket.get();
  prepared_.forget_all();  // this daemon knows nothing of them
  job_->header().daemon_pid.store(peer_pid(socket_));
  announce(std::move(socket));
  return std::nullopt;
}

void Server::announce(ipc::UniqueFd socket) {
  const std::lock_guard lock(opening_mutex_);  // either it is announced as open, or that is reported after this
  if (!first_record_ || executing_) return executor_->announce(std::move(socket), options_.device());
  const auto only_this_thread = daemon_.attach(std::move(socket));
  daemon_.announce(*job_, options_.device(), job_->header().generation.load(), false);
  daemon_.announced();
}

// Those of the bits. The error has the number that a program would get natively.
Result<> Server::open(uint64_t ordinals) {
  try {
    const Status opened = contexts_.open_all(ordinals);
    if (opened) return {};
    return Error{"no context on device " + options_.device() + ": " + device_->text(opened), "failed", device_->number_of(opened)};
  } catch (const device::Unavailable& error) {
    return Error{error.what(), "failed", error.error()};
  }
}

// By whichever thread that was. A server that gets the job later opens it, too, and so does a standby now.
void Server::opened_another(uint32_t ordinal) {
  log_(Level::kInfo, "a context was opened on device " + std::to_string(ordinal) + " of the program's");
  if (!job_) return;
  job_->header().devices_open.fetch_or(contexts_.opened());
  if (reports_openings_) daemon_.opened(device_->own_bytes());
}

// The devices that the job uses, a bit each. Something is executed in any case: somewhere.
uint64_t Server::devices_of_job(uint64_t more) const {
  const uint64_t there = (uint64_t{1} << contexts_.count()) - 1;
  const uint64_t used = (job_->header().devices_open.load() | more) & there;
  return used != 0 ? used : 1;
}

std::optional<int> Server::handle(Request request) {
  return std::visit([this](auto& one) { return (*this)(one); }, request);
}

std::optional<int> Server::operator()(Assign& request) {
  if (assignment_) {
    log_(Level::kError, "the daemon assigns a second job");
    return kLostExit;
  }
  assignment_ = std::move(request);
  Result<Job> job = Job::map(assignment_->job, assignment_->client_pid, std::move(assignment_->fds), assignment_->quota_slots);
  if (!job) {
    log_(Level::kError, "job " + assignment_->job + " cannot be taken: " + job.why());
    return kLostExit;
  }
  job_ = std::move(*job);
  if (job_->fds().quota) {
    if (assignment_->quota_slots.size() != contexts_.count()) {
      log_(Level::kError, "job " + assignment_->job + " cannot be taken: its quota has another number of devices");
      return kLostExit;
    }
    const Result<> shared = sharing_.quota().use(job_->fds().quota.get(), assignment_->quota_slots, assignment_->memory_quota);
    if (!shared) {
      log_(Level::kError, "job " + assignment_->job + " cannot be taken: " + shared.why());
      return kLostExit;
    }
  }
  if (assignment_->mode == AssignMode::kLost) {
    log_(Level::kError, "job " + assignment_->job + " is lost: " + assignment_->text);
    mark_lost(*job_, assignment_->error != 0 ? assignment_->error : device_->unknown());
    return 0;
  }
  if (!watch_client()) {
    daemon_.bye("the program has exited");
    return 0;
  }
  // Only who begins with an empty journal, or perhaps with one, may wait for its first record.
  const bool may_wait = assignment_->mode == AssignMode::kFresh || (assignment_->mode == AssignMode::kRecover && !assignment_->ahead);
  if (contexts_.opened() != 0 || !may_wait) {
    if (const Result<> opened = open(devices_of_job()); !opened) {
      log_(Level::kError, opened.why());
      return kLostExit;
    }
  }
  if (assignment_->mode != AssignMode::kRecover) physical_.keep_ahead({});
  for (const device::Injection& injection : assignment_->injections) injector_.arm(injection);
  if (assignment_->mode == AssignMode::kRecover) {
    prepared_.use(assignment_->communicators);
    prepared_.forget_all();
  }
  if (assignment_->mode == AssignMode::kMove) {
    begin_move();
    return std::nullopt;
  }
  if (!assignment_->ahead) enter();
  if (assignment_->mode == AssignMode::kResume) {
    make_executor();
    executor_->incoming().prepare_resumption(!ahead_.used());
  }
  if (assignment_->mode == AssignMode::kFresh) begin();
  return std::nullopt;
}

bool Server::waits_to_enter() const { return assignment_ && assignment_->ahead && !entry_.is_open(); }

void Server::enter() {
  job_->header().daemon_pid.store(peer_pid(socket_));
  enter_job();
  entry_.open();
}

// From now on the journal says that the job is this server's.
void Server::enter_job() {
  journal::JournalHeader& header = job_->header();
  header.server_pid.store(static_cast<uint32_t>(::getpid()));
  header.generation.fetch_add(1);
  header.devices_open.fetch_or(contexts_.opened());
  header.memory_changes.fetch_add(1);
  daemon_.count_changes(header.memory_changes);
}

bool Server::watch_client() {
  client_.reset(static_cast<int>(::syscall(SYS_pidfd_open, job_->client_pid(), 0)));
  if (!client_) log_(Level::kError, std::string("the program cannot be watched: ") + std::strerror(errno));
  return static_cast<bool>(client_);
}

void Server::make_executor() {
  device_->wake();
  contexts_.use(contexts_.home());
  const Limits limits{assignment_->snapshot_cost, assignment_->hang_timeout, assignment_->stall_bound, assignment_->copies_on_host};
  executor_ = std::make_unique<Executor>(services(), *device_, preload_, prepared_, physical_, limits);
}

void Server::begin() {
  begun_ = true;
  if (contexts_.opened() == 0) {
    first_record_.emplace(*job_);
  } else if (!executor_) {
    make_executor();
  }
  thread_ = std::thread([this, given = std::move(given_)]() mutable {
    try {
      serve(std::move(given));
    } catch (const device::Unavailable& error) {  // a device that the program begins to use
      log_(Level::kError, error.what());
      daemon_.hang_up();
      ::_exit(kLostExit);
    }
  });
}

// The executor's thread.
void Server::serve(std::vector<Hosted> given) {
  if (assignment_->mode == AssignMode::kFresh) {
    if (const Result<> prepared = Executor::prepare_journal(services(), *device_); !prepared) lose(prepared.error());
  }
  if (first_record_ && !open_late()) {
    const std::lock_guard lock(opening_mutex_);
    left_late_ = true;
    opening_changed_.notify_all();
    return;
  }
  if (const Result<> started = start(std::move(given)); !started) {
    if (!entry_.is_open() || started.error().code == kInterrupted) give_back(started.why());
    lose(started.error());
  }
  serving_ = true;
  if (first_record_) {
    const std::lock_guard lock(opening_mutex_);
    executing_ = true;
    daemon_.opened(device_->own_bytes());
    opening_changed_.notify_all();
  }
  reports_openings_ = true;
  if (assignment_->hold) executor_->hold();
  if (const Result<> ended = executor_->run(); !ended) lose(ended.error());
}

// The executor's thread. The program is here, and takes nothing of its devices until it needs them. False: the server ends.
bool Server::open_late() {
  if (assignment_->mode == AssignMode::kFresh) {
    daemon_.ready(job_->header().generation.load(), false);
  } else {
    // As far as anything was executed, it has been recovered.
    for (const char* const reached : {"mapped", "restored"}) daemon_.phase(reached);
    daemon_.replayed({});
    daemon_.phase("resumed");
  }
  serving_ = true;
  while (first_record_->wait()) {
    const Result<> opened = open(devices_of_job(first_record_->devices()));
    if (opened) {
      make_executor();
      return true;
    }
    log_(Level::kError, opened.why());
    if (!first_record_->refuse(opened.error().number)) lose(opened.error());
    const std::lock_guard lock(opening_mutex_);
    ++failed_openings_;
    opening_changed_.notify_all();
  }
  return false;
}

// Is there an executor, without opening the devices for one?
bool Server::is_executing() {
  if (!first_record_) return serving_;
  const std::lock_guard lock(opening_mutex_);
  return executing_;
}

// For requests of the daemon that only an executor can do: the devices are opened for them. False: they cannot be, and the log says
// why.
bool Server::executes() {
  if (!first_record_) return static_cast<bool>(executor_);
  std::unique_lock lock(opening_mutex_);
  const uint32_t failed = failed_openings_;
  if (!executing_) first_record_->request();
  opening_changed_.wait(lock, [&] { return executing_ || failed_openings_ != failed; });
  if (executing_) contexts_.use(contexts_.home());
  return executing_;
}

Result<> Server::start(std::vector<Hosted> given) {
  switch (assignment_->mode) {
    case AssignMode::kFresh:
      if (Result<> started = executor_->start_fresh(); !started) return started;
      if (!first_record_) daemon_.ready(job_->header().generation.load(), true);
      return {};
    case AssignMode::kResume: {
      Result<> resumed = executor_->resume_suspended(std::move(given), *assignment_, entry_);
      if (resumed) return resumed;
      // Nothing has changed: the process is where it was.
      job_->header().server_pid.store(0);
      daemon_.resume_failed(resumed.error().code, resumed.why());
      end_idle();
    }
    default: return executor_->recover(std::move(given), *assignment_, entry_);
  }
}

void Server::lose(const Error& why) {
  mark_lost(*job_, why.number != 0 ? why.number : device_->unknown());
  daemon_.garbage(job_->header().executed.load(), why.text);
  daemon_.hang_up();
  ::_exit(kLostExit);
}

// The next server tries. What was not entered is as it was; that one may have to wait until the one before this one has given its device
// back. What was entered is as after any server that is lost.
void Server::give_back(const std::string& why) {
  log_(Level::kWarning, "the recovery is left to another server: " + why);
  daemon_.hang_up();
  ::_exit(kLostExit);
}

std::optional<int> Server::operator()(LoadAhead& request) {
  if (assignment_ || contexts_.opened() == 0) return std::nullopt;
  if (const std::optional<SnapshotContent> newest = newest_of(request.snapshots)) preload_.want(*newest);
  if (!preload_.pending()) daemon_.preloaded(preload_.report());
  return std::nullopt;
}

// A standby is informed of what its process uses.
std::optional<int> Server::operator()(OpenDevices& request) {
  if (assignment_) return std::nullopt;
  const Result<> opened = open(request.devices);
  if (opened) return std::nullopt;
  log_(Level::kWarning, opened.why());
  return kLostExit;
}

// A standby's, or that of a server which has the process.
std::optional<int> Server::operator()(PrepareCommunicator& request) {
  const std::optional<SnapshotContent> newest = newest_of(request.snapshots);
  if (!newest || contexts_.opened() == 0) {
    daemon_.communicator_prepared(request.attempt, 0, "there is no snapshot yet, or no open device");
  } else {
    prepared_.prepare(request.attempt, request.name, *newest);
  }
  return std::nullopt;
}

std::optional<int> Server::operator()(ForgetCommunicator& request) {
  prepared_.forget(request.attempt);
  return std::nullopt;
}

std::optional<int> Server::operator()(MemoryGivenUp& request) {
  standby_memory_.given_up(request.number, request.bytes);
  return std::nullopt;
}

// Between two messages: who has a job does not wait.
bool Server::has_work_ahead() const { return !assignment_ && (ahead_.pending() || preload_.pending()); }

void Server::work_ahead() {
  if (!ahead_.pending()) return load_further();
  if (const Result<> copied = ahead_.step(); !copied) end_ahead(copied.error());
  if (!ahead_.pending()) daemon_.round(ahead_.end());
}

std::optional<int> Server::operator()(RoundAhead& request) {
  if (assignment_) {
    log_(Level::kError, "the daemon sends what is to come before a job, and there is one");
  } else {
    ahead_.open(std::move(request));
  }
  return std::nullopt;
}

void Server::begin_ahead() {
  const Result<SnapshotContent> content = ahead_.begin();
  if (!content) end_ahead(content.error());
  daemon_.opened(device_->own_bytes());
  preload_.want(*content);
  if (!ahead_.pending()) daemon_.round(ahead_.end());
}

// Another server gets the job, with all that it has.
void Server::end_ahead(const Error& why) {
  daemon_.move_failed(why.code, why.text);
  end_idle();
}

void Server::load_further() {
  preload_.step(ahead_.used() ? Preload::kMostOfTarget : Preload::kMostOfStandby);
  if (!preload_.pending()) daemon_.preloaded(preload_.report());
}

// A standby is informed of what its process has.
void Server::map_ahead(Hosted memory) {
  if (memory.kind == HostedKind::kImage) {
    preload_.add(memory);
  } else if (ahead_.is_open() && memory.kind == HostedKind::kShadow && memory.plain()) {
    ahead_.add(std::move(memory));
  } else if (contexts_.opened() != 0 && static_cast<uint32_t>(memory.ordinal) < contexts_.count()) {
    contexts_.use(static_cast<uint32_t>(memory.ordinal));
    physical_.map_ahead(std::move(memory), contexts_.count());
  }
}

std::optional<int> Server::operator()(MemoryAdd& request) {
  if (!assignment_) {
    map_ahead(std::move(request.memory));
    return std::nullopt;
  }
  if (assignment_ && assignment_->mode == AssignMode::kMove) return add_step(std::move(request));
  const bool waits_for_it =
      assignment_ && (assignment_->mode == AssignMode::kRecover || assignment_->mode == AssignMode::kResume);
  if (!waits_for_it || begun_) {
    log_(Level::kError, "the daemon hands over memory that nobody needs");
    return std::nullopt;
  }
  given_.push_back(std::move(request.memory));
  return std::nullopt;
}

std::optional<int> Server::operator()(Go&) {
  if (!assignment_ && ahead_.is_open()) begin_ahead();
  const bool waits_for_it =
      assignment_ && (assignment_->mode == AssignMode::kRecover || assignment_->mode == AssignMode::kResume);
  if (!waits_for_it || begun_) return std::nullopt;
  if (assignment_->mode == AssignMode::kResume) ahead_.hand_over(given_, assignment_->first_id, executor_->incoming());
  begin();
  return std::nullopt;
}

std::optional<int> Server::operator()(Enter& request) {
  if (waits_to_enter()) {
    if (assignment_->mode == AssignMode::kResume) assignment_->gone = std::move(request.gone);
    enter();
  }
  return std::nullopt;
}

std::optional<int> Server::operator()(Inject& request) {
  injector_.arm(request.injection);
  return std::nullopt;
}

std::optional<int> Server::operator()(TakeSnapshot& request) {
  if (!begun_ || !executes()) return std::nullopt;
  if (request.host && serving_) {
    executor_->departure().request(Departure::KeepOnHost{*request.host});
  } else {
    executor_->ask_for_snapshot();
  }
  return std::nullopt;
}

std::optional<int> Server::operator()(Pause& request) {
  if (!begun_ || !executes()) return std::nullopt;
  pausing_ = true;
  executor_->pause(request.at_snapshot);
  return std::nullopt;
}

std::optional<int> Server::operator()(Rebind& request) { return unpause(std::move(request)); }

std::optional<int> Server::operator()(Continue& request) {
  if (request.if_paused && !pausing_) return std::nullopt;
  return unpause(std::nullopt);
}

std::optional<int> Server::unpause(std::optional<Rebind> rebind) {
  const Result<> resumed = begun_ && executes() ? executor_->unpause(std::move(rebind)) : Error{"there is no job"};
  if (!resumed) {
    log_(Level::kError, "cannot continue: " + resumed.why());
    return std::nullopt;
  }
  pausing_ = false;
  if (watch_client()) return std::nullopt;
  daemon_.bye("the program has exited");
  return 0;
}

std::optional<int> Server::operator()(Output& request) {
  for (const int printed : {STDOUT_FILENO, STDERR_FILENO}) ::dup2(request.pipe.get(), printed);
  return std::nullopt;
}

std::optional<int> Server::operator()(Backlog& request) {
  daemon_.keep_backlog(std::move(request.socket));
  return std::nullopt;
}

std::optional<int> Server::operator()(Met& request) {
  meetings_.met(std::move(request));
  return std::nullopt;
}

std::optional<int> Server::operator()(GroupStop& request) { return step(std::move(request)); }
std::optional<int> Server::operator()(GroupHold& request) { return step(std::move(request)); }

std::optional<int> Server::operator()(GroupTake& request) {
  if (request.pauses && is_executing()) pausing_ = executor_->pause_with_the_group(request.round) || pausing_;
  return step(std::move(request));
}

std::optional<int> Server::operator()(GroupContinue& request) { return step(request); }

std::optional<int> Server::step(GroupSnapshot::Step step) {
  if (is_executing()) executor_->step(std::move(step));
  return std::nullopt;
}

std::optional<int> Server::operator()(CommunicatorLost& request) {
  if (is_executing()) executor_->communicator_lost(request.name);
  return std::nullopt;
}

std::optional<int> Server::operator()(ReplicaRank& request) {
  replica_sources_.add(std::move(request.snapshots));
  return std::nullopt;
}

std::optional<int> Server::operator()(ReplicaMemory& request) {
  replica_sources_.add(std::move(request.memory));
  return std::nullopt;
}

std::optional<int> Server::operator()(ReplicasNamed& request) {
  replica_sources_.complete(request.far);
  return std::nullopt;
}

std::optional<int> Server::operator()(ChunksBrought& request) {
  replica_sources_.brought(std::move(request));
  return std::nullopt;
}

std::optional<int> Server::operator()(ReadChunks& request) {
  if (is_executing()) {
    executor_->chunk_reader().read(std::move(request));
  } else {
    daemon_.chunks_read(request.number, 0, {}, "the job has not begun, or is being recovered");
  }
  return std::nullopt;
}

std::optional<int> Server::operator()(CopyUnique& request) {
  std::vector<ReplicaSource> others = replica_sources_.take();
  if (is_executing()) executor_->host_copies().make(std::move(others), std::move(request));
  return std::nullopt;
}

std::optional<int> Server::operator()(CopySnapshot& request) {
  request.room = std::exchange(room_, {});
  if (is_executing()) {
    executor_->snapshot_copy().make(request.number, request.since, request.keep_bits, std::move(request.room));
  } else {
    daemon_.snapshot_not_copied(request.number, "the job has not begun, or is being recovered");
  }
  return std::nullopt;
}

std::optional<int> Server::operator()(ForgetSnapshotCopy&) {
  if (is_executing()) executor_->snapshot_copy().stop();
  return std::nullopt;
}

// A standby, too, is given them: then it writes from its first record on.
std::optional<int> Server::operator()(Profile& request) {
  return wanted(profiling_.profile(std::move(request.page), request.every), "profile");
}

std::optional<int> Server::operator()(Trace& request) { return wanted(profiling_.trace(std::move(request.page)), "trace"); }

// Likewise.
std::optional<int> Server::operator()(Share& request) { return wanted(sharing_.share(std::move(request)), "sharing"); }

std::optional<int> Server::operator()(EndTrace&) {
  profiling_.end_trace();
  return wanted({}, "trace");
}

std::optional<int> Server::wanted(const Result<>& given, const char* what) {
  if (!given) log_(Level::kError, std::string("there is no ") + what + ": " + given.why());
  if (is_executing()) executor_->follow_profiling();
  return std::nullopt;
}

std::optional<int> Server::operator()(Stop& request) {
  log_(Level::kInfo, "stopped: " + request.reason);
  return 0;
}

}  // namespace xmig::server
