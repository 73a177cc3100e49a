#include "server/executor/executor.h"

#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>

#include "journal/futex.h"
#include "server/clock.h"
#include "server/peers.h"

namespace xmig::server {
namespace {

constexpr uint32_t kBatch = 64;                // records between two looks at everything else
// ns that the executor looks at the tail before it sleeps: long while that pays, short when the last look was in vain.
constexpr uint64_t kShortestSpin = 2'000;
constexpr int kTailLooks = 32;
// After work; the executor has nothing else to do then.
uint64_t longest_spin() { return journal::processors_to_spare() ? 100'000 : 50'000; }
// While the device works on what somebody waits for.
uint64_t longest_watch() { return journal::processors_to_spare() ? 50'000'000 : 50'000; }
constexpr uint64_t kLongestSleep = 60'000'000'000;
constexpr uint64_t kStopPatience = 100'000;    // while the device finishes what it has
constexpr uint64_t kBarrierPatience = 50'000'000;  // where the device may wait for what comes after the barrier
constexpr uint64_t kPatience = 1'000'000;      // while something is to be looked at again
constexpr uint64_t kQuietAfterMove = 500'000'000;  // two servers have ended by then, and the next standby is warm
constexpr uint64_t kLookEvery = 10'000'000;    // at a device that works, while nobody waits for it
constexpr uint32_t kBatchesToLook = 1024;      // and while there is much to do
constexpr uint64_t kFirstRestLook = 20'000;    // after a record; then after twice as long each time
// After that long without a record the program rests, and a sleep that may be as long as the other is settled for
// (placement.h): a program that is not at rest never meets the executor on its processor.
constexpr uint64_t kRest = 2'000'000, kWorthSettling = 5'000'000;
// Beside the program's thread, which the executor keeps from running. What is waited for is executed there, once: whoever
// goes on within a nap, or waits longer, is left.
constexpr uint64_t kLongestWaitBeside = 50'000;
constexpr uint64_t kNap = 100'000;

template <typename Args>
uint64_t stream_of(const Args& args) {
  if constexpr (requires { args.stream; }) {
    return args.stream;
  } else {
    return args.hStream;
  }
}

bool destroys(Op op) {
  return op == Op::cuStreamDestroy_v2 || op == Op::cuEventDestroy_v2 || op == Op::cuModuleUnload ||
         op == Op::xmGraphDestroy || op == Op::xmUnpin;
}

bool is_kernel(Op op) { return op == Op::xmLaunch || op == Op::xmFirstLaunch || op == Op::xmGraphLaunch; }

// It names a stream and puts nothing into it. A mark behind it would be work that the program has not put there.
bool only_looks(Op op) { return op == Op::cuStreamQuery || op == Op::cuStreamSynchronize; }

// What a program calls again and again. It makes no thread, in the driver neither, that would be bound with the executor's.
bool makes_no_thread(Op op) {
  return op == Op::xmLaunch || op == Op::cuStreamSynchronize || op == Op::cuCtxSynchronize ||
         op == Op::cuEventSynchronize || op == Op::cuEventRecordWithFlags || op == Op::cuStreamQuery;
}

Op op_of(const Record& record) { return static_cast<Op>(record.header().op); }

}  // namespace

bool Executor::keeps_books(Op op) {
  switch (op) {
    case Op::xmOpen:
    case Op::xmContextReset:
    case Op::xmPeer:
    case Op::xmAlloc:
    case Op::xmFree:
    case Op::xmDiscard:
    case Op::xmReuse:
    case Op::xmNameNumbers:
    case Op::xmForgetNumbers:
    case Op::xmShrink:
    case Op::xmUnpin:
    case Op::xmImage:
    case Op::xmImageFile:
    case Op::xmLinkEnd:
    case Op::cuStreamCreateWithPriority:
    case Op::cuStreamDestroy_v2:
    case Op::cuEventCreate:
    case Op::cuEventDestroy_v2:
    case Op::xmGraphDestroy:
    case Op::xmCommEnd:
    case Op::cuModuleUnload: return true;
    default: return false;
  }
}

Executor::Executor(const Services& services, device::Device& device, ModulePreload& preload, PreparedCommunicators& prepared,
                   Physical& physical, const Limits& limits)
    : services_(services),
      device_(device),
      driver_(device.driver()),
      contexts_(services.contexts),
      daemon_(services.daemon),
      log_(services.log),
      faults_(services.faults),
      injector_(services.injector),
      job_(services.job),
      preload_(preload),
      prepared_(prepared),
      memory_(physical),
      granules_(device_, contexts_, faults_, memory_.shadow),
      waits_(driver_, replies_, faults_, [this](uint32_t ordinal) { contexts_.use(ordinal); }),
      progress_(driver_, device_.mark_every()),
      hang_timeout_(limits.hang_timeout),
      interrupts_(job_, [this] { placement_.release(); }),
      staging_(memory_),
      snapshots_(services_, memory_, granules_, staging_),
      schedule_(static_cast<uint64_t>(limits.stall_bound * 1e9), limits.snapshot_cost, device_.recovery_ns()),
      group_([this] { interrupts_.request(Interrupts::kLook); }),
      host_copies_(services_, memory_, granules_, staging_, snapshots_),
      snapshot_copy_(services_, memory_, granules_, staging_, snapshots_),
      chunk_reader_(services_, memory_, granules_, staging_, snapshots_),
      relocation_(services_, memory_, granules_, staging_, snapshots_, interrupts_),
      departure_(services_, memory_, *this, snapshots_, staging_, relocation_, interrupts_),
      adoption_(services_, memory_),
      incoming_(services_, memory_, granules_, adoption_, preload_),
      recovery_(services_, memory_, granules_, snapshots_, adoption_, incoming_, *this),
      handlers_({services_, device_, memory_, granules_, objects_, replies_, waits_, progress_, working_, current_, errors_,
                 schedule_, *this},
                preload_, prepared_, snapshots_, relocation_),
      timing_(services_.profiling, driver_, contexts_, objects_, memory_.live),
      turns_(services_.sharing) {
  faults_.hear(this);
  for (uint32_t ordinal = 0; ordinal < contexts_.count(); ++ordinal) {
    size_t bytes = 0;
    if (driver_.cuDeviceTotalMem_v2(&bytes, static_cast<CUdevice>(ordinal)) == CUDA_SUCCESS) {
      memory_.copy_log.set_device(ordinal, bytes);
    }
  }
  if (limits.copies_on_host) memory_.copy_log.keep_on_host();
  contexts_.use(contexts_.home());
  register_shared();
}

// The device is left as it was found. No function of the program may be outstanding.
Executor::~Executor() {
  placement_.close();
  watchdog_.reset();
  host_copies_.stop();
  snapshot_copy_.stop();
  chunk_reader_.stop();
  relocation_.end(false);
  incoming_.give_up();
  handlers_.collectives.abort_all();
  drain();
  timing_.close();
  handlers_.destroy_all();
  faults_.hear(nullptr);
  unregister_shared();
}

void Executor::run_to_tail() {
  while (!current_.broken && execute_batch()) {
    waits_.poll();
    consider_snapshot(false);
  }
}

Result<> Executor::prepare_journal(const Services& services, const device::Device& device) {
  journal::JournalHeader& header = services.job.header();
  if (header.tail.load() != 0) return Error{"the journal of a fresh job is not empty"};
  const uint32_t devices = services.contexts.count();
  header.magic = journal::kMagic;
  header.version = journal::kLayoutVersion;
  header.device_count = devices;
  header.ring_bytes = services.job.journal().ring_bytes();
  header.client_pid = static_cast<uint32_t>(services.job.client_pid());
  int version = 0;
  device.driver().cuDriverGetVersion(&version);
  header.driver_version = static_cast<uint32_t>(version);
  for (uint32_t ordinal = 0; ordinal < devices; ++ordinal) {
    header.devices[ordinal] = device.describe(static_cast<int>(ordinal));
  }
  header.memory_quota = services.sharing.quota().bytes();
  describe_peers(services);
  for (journal::ThreadSlot& slot : header.threads) {
    slot.waiting.store(journal::kNotWaiting, std::memory_order_relaxed);
  }
  header.state.store(static_cast<uint32_t>(journal::ServerState::kRunning));
  return {};
}

Result<> Executor::start_fresh() {
  if (const Status reserved = memory_.physical.reserve(contexts_.count()); !reserved) {
    return Error{"the device's address ranges cannot be reserved (" + device_.text(reserved) + ")"};
  }
  journal::JournalHeader& header = job_.header();
  generation_ = header.generation.load();
  schedule_.start(header.stall, now_ns());
  return {};
}

Result<> Executor::take(uint64_t snapshot) {
  const uint64_t last = job_.header().snapshot.load() >> 1;
  if (last != snapshot) {
    return Error{"the journal's last snapshot is " + std::to_string(last) + " and not " + std::to_string(snapshot), "bad_snapshot"};
  }
  return recovery_.arrive({}, {});
}

Result<> Executor::resume_suspended(std::vector<Hosted> given, const Assign& assignment, Entry& entry) {
  const auto enter = [&]() -> Result<> {
    if (!entry.wait()) return Error{"the ranks that were resumed with it are not"};
    handlers_.collectives.forget(assignment.gone);
    return {};
  };
  Result<> resumed = recovery_.arrive(std::move(given), assignment.ahead ? enter : std::function<Result<>()>());
  if (!resumed) job_.header().state.store(static_cast<uint32_t>(journal::ServerState::kSuspended));
  return resumed;
}

Result<> Executor::run() {
  ::pthread_setname_np(::pthread_self(), "executor");
  if (hang_timeout_ > 0) {
    const auto patience = std::chrono::nanoseconds(static_cast<int64_t>(hang_timeout_ * 1e9));
    watchdog_.emplace(patience, [this] { return look(); }, [this] { hung(); }, [this](bool is) { stuck(is); });
  }
  ::prctl(PR_SET_TIMERSLACK, 1'000);  // ns; the usual 50 us would be half of a short sleep
  uint64_t idle_since = 0;
  const uint64_t longest = longest_spin(), watch = longest_watch();
  uint64_t spin = longest;
  uint32_t looks = 0;
  check_finished_replay();  // who takes a job over tells so before it executes anything
  check_quota();
  while (!current_.broken) {
    if (interrupts_.pending() & Interrupts::kStop) return {};
    interrupts_.take(Interrupts::kLook);  // before anything is looked at
    timing_.turn();
    bool worked = !stands() && execute_batch();
    if (current_.broken) break;
    worked |= waits_.poll();
    worked |= handlers_.collectives.poll();
    if (current_.broken) break;
    look_at_neighbours(worked);
    if (placement_.bound() && gives_way()) [[unlikely]] {
      nap();
      idle_since = 0;
      spin = kShortestSpin;  // it has waited there already
      continue;
    }
    worked |= check_finished_replay();
    check_quota();
    if (current_.broken) break;
    snapshots_.trim();
    snapshots_.trim_shadow();
    consider_snapshot(!worked);
    if (worked) {
      if (++batches_ % kBatchesToLook == 0) look_at_device(now_ns());
      if (idle_since != 0) spin = std::min(2 * spin, longest);
      idle_since = rest_look_at_ = 0;
      resting_ = false;  // the record may have come without a ring, just as the rest was over
      continue;
    }
    const uint64_t now = now_ns();
    if (idle_since == 0) idle_since = now;
    look_for_rest(now);
    if (now - looked_at_ >= kLookEvery) look_at_device(now);
    const bool soon = stands() || waits_.at_barrier(current_.position);  // until the device is done, which nobody announces
    if (!turns_.holds() && now - idle_since < (soon || waits_.watching() ? watch : spin) && journal::spinning_helps()) {
      const bool records_only = !soon && !waits_.watching();
      if (++looks % (records_only ? 4 : 32) == 0) ::sched_yield();  // as in journal::spin_until
      records_only ? watch_tail() : journal::cpu_relax();
      continue;
    }
    if (!soon) spin = std::max(spin / 4, kShortestSpin);
    sleep();
    idle_since = 0;
  }
  return Error{*current_.broken};
}

// Nothing but the tail, for a microsecond or two. Where the program's thread runs on the same core as this one, a whole turn
// of the loop each time would slow it down.
void Executor::watch_tail() {
  const journal::JournalHeader& header = job_.header();
  for (int i = 0; i < kTailLooks && header.tail.load(std::memory_order_relaxed) == current_.position; ++i) journal::cpu_relax();
}

// It runs. How often it has been rung for.
uint32_t Executor::hear(journal::JournalHeader& header) {
  const uint32_t rung = header.doorbell.load(std::memory_order_seq_cst);
  heard_at_ = now_ns();
  if (rung != heard_) header.heard_at.store(heard_at_, std::memory_order_relaxed);
  heard_ = rung;
  header.heard.store(rung, std::memory_order_seq_cst);
  return rung;
}

// Beside the program's thread, which cannot run meanwhile. Is this thread to sleep at once, whatever else it would look at
// between two batches? Who waits for the device gives way as well.
bool Executor::gives_way() {
  const bool waits = waits_.watching() || waits_.at_barrier(current_.position);
  if (stands() || schedule_.snapshot_now() || interrupts_.pending() != 0 ||
      (waits && now_ns() - heard_at_ > kLongestWaitBeside)) {
    placement_.leave();
  }
  return placement_.bound() && !waits;
}

// As sleep(), for the moment in which the program's next record would come. Nothing else is looked at before.
void Executor::nap() {
  journal::JournalHeader& header = job_.header();
  header.gave_way_at.store(now_ns(), std::memory_order_relaxed);
  header.server_sleeping.store(placement_.where(), std::memory_order_seq_cst);
  const uint32_t rung = header.doorbell.load(std::memory_order_seq_cst);
  const bool nothing = header.tail.load(std::memory_order_seq_cst) == current_.position;
  if (nothing && interrupts_.pending(std::memory_order_seq_cst) == 0) {
    journal::futex_wait(header.doorbell, rung, std::chrono::nanoseconds(kNap));
  }
  header.server_sleeping.store(journal::kAwake, std::memory_order_seq_cst);
  placement_.woke(hear(header) != rung || !nothing);
  if (placement_.bound()) placement_.leave();
}

void Executor::announce(ipc::UniqueFd socket, const std::string& device) {
  const std::lock_guard lock(memory_.mutex);
  const auto only_this_thread = daemon_.attach(std::move(socket));
  daemon_.announce(job_, device, generation_, true);
  const auto add = [&](const Hosted& memory) { daemon_.memory_again(memory); };
  memory_.hosting.for_each(add);
  memory_.shadow.for_each(add);
  memory_.images.for_each(add);
  daemon_.announced();
  services_.membership.tell_all();
  if (const uint64_t round = group_.held(); round != 0) daemon_.group_held(round);
  if (stuck_) stuck(true);
  const std::lock_guard still(pause_mutex_);
  if (parked_) parked_();
}

// A device that reads and writes host memory on its own has to know of it.
void Executor::register_shared() {
  const journal::JournalMapping& journal = job_.journal();
  driver_.cuMemHostRegister_v2(journal.data(), journal.size(), CU_MEMHOSTREGISTER_PORTABLE);
  driver_.cuMemHostRegister_v2(job_.staging().data(), job_.staging().size(), CU_MEMHOSTREGISTER_PORTABLE);
  for (const auto& [address, pin] : objects_.pins) {
    driver_.cuMemHostRegister_v2(reinterpret_cast<void*>(address), pin.bytes, kPinFlags);
  }
}

void Executor::unregister_shared() {
  driver_.cuMemHostUnregister(job_.journal().data());
  driver_.cuMemHostUnregister(job_.staging().data());
  for (const auto& [address, pin] : objects_.pins) driver_.cuMemHostUnregister(reinterpret_cast<void*>(address));
}

bool Executor::execute_batch() {
  const journal::JournalHeader& header = job_.header();
  const uint64_t tail = header.tail.load(std::memory_order_acquire);
  if (tail == current_.position) return false;
  after_the_program(&job_);
  if (tail < current_.position || tail - current_.position > job_.journal().ring_bytes()) {
    current_.garbage("the tail is behind the server, or further ahead than the ring is long");
    return true;
  }
  for (uint32_t i = 0; i < kBatch && current_.position != tail; ++i) {
    if (waits_.at_barrier(current_.position) && !pass_barrier()) return i != 0;
    if (!load_next(tail)) return true;
    if (group_.under_way() && stop_in_front_of(op_of(current_.record), now_ns())) [[unlikely]] break;
    if (turns_.is_best_effort() && is_kernel(op_of(current_.record)) && !is_its_turn()) [[unlikely]] {
      publish_executed();
      return i != 0;
    }
    if (waits_.unarmed()) waits_.arm();
    execute_one();
    caller_ = current_.record.header().thread;
    if (schedule_.snapshot_now()) break;
    if (group_.under_way() && stop_with_the_group(now_ns(), true)) [[unlikely]] break;
  }
  publish_executed();
  return true;
}

bool Executor::pass_barrier() {
  waits_.poll();
  if (waits_.at_barrier(current_.position) && handlers_.outside.values) {
    const uint64_t now = now_ns();
    if (barrier_since_ == 0) barrier_since_ = now;
    if (now - barrier_since_ >= kBarrierPatience) waits_.lift_barriers();
  }
  if (waits_.at_barrier(current_.position)) return false;
  barrier_since_ = 0;
  return true;
}

// Other ranks may wait for whatever a process in communicators does, and a program for a replay.
bool Executor::is_its_turn() {
  if (replay_.running() || handlers_.collectives.grouped() || interrupts_.pending() != 0) {
    turns_.passes();
    return true;
  }
  uint64_t kernel = 0;
  if (Args_xmLaunch launch; op_of(current_.record) != Op::xmGraphLaunch) {
    if (current_.record.arguments(launch)) kernel = launch.function;
  } else if (Args_xmGraphLaunch graph; current_.record.arguments(graph)) {
    kernel = graph.exec;
  }
  return turns_.admits(current_.record.header().ordinal, current_.record.sequence(), kernel, progress_.done(), now_ns());
}

void Executor::look_at_neighbours(bool worked) {
  if (turns_.look()) progress_.mark_every(turns_.is_best_effort() ? 1 : device_.mark_every());
  if (turns_.shares()) [[unlikely]] turns_.show(worked || progress_.unfinished() || turns_.holds(), now_ns());
}

bool Executor::load_next(uint64_t tail) {
  const char* why = nullptr;
  std::byte* const at = job_.journal().at(current_.position);
  if (current_.record.load(at, tail - current_.position, current_.sequence + 1, contexts_.count(), why)) {
    current_.record.lies_at(current_.position);
    return true;
  }
  current_.garbage(why);
  return false;
}

void Executor::execute_one() {
  if (injector_.due(current_.record.sequence())) [[unlikely]] return execute_injected();
  execute();
}

// What is put into the stream before the record, or beside its work, faults later, like a program's own.
void Executor::execute_injected() {
  if (placement_.bound()) placement_.leave();
  const uint64_t sequence = current_.record.sequence();
  const auto [last, last_ordinal] = handlers_.streams.last();
  contexts_.use(last_ordinal);
  working_.add(last, last_ordinal);
  injector_.at_record(sequence, {last, last_ordinal}, [this](uint64_t address) { return memory_.live.contains(address, 1); });
  use_context();
  std::optional<Injector::Beside> beside;
  if (const auto [point, stream] = work().value_or(std::pair(device::InjectPoint::kRecord, CUstream{}));
      point != device::InjectPoint::kRecord) {
    beside = injector_.beside(point, sequence, {stream, handlers_.streams.ordinal()});
  }
  execute();
  if (beside) injector_.inject(*beside);
}

// Is the record a kernel or a copy, and in which stream?
std::optional<std::pair<device::InjectPoint, CUstream>> Executor::work() {
  using device::InjectPoint;
  CUstream stream = nullptr;
  const auto in = [&]<typename Args>(InjectPoint point, Args args) -> std::optional<std::pair<InjectPoint, CUstream>> {
    if (!current_.record.arguments(args) || !handlers_.streams.translate(stream_of(args), &stream)) return std::nullopt;
    return std::pair(point, stream);
  };
  switch (op_of(current_.record)) {
    case Op::xmLaunch:
    case Op::xmFirstLaunch: return in(InjectPoint::kKernel, Args_xmLaunch{});
    case Op::xmGraphLaunch: return in(InjectPoint::kKernel, Args_xmGraphLaunch{});
    case Op::xmCopyFromHost: return in(InjectPoint::kCopy, Args_xmCopyFromHost{});
    case Op::xmCopyFromPinned: return in(InjectPoint::kCopy, Args_xmCopyFromPinned{});
    case Op::xmCopyToHost: return in(InjectPoint::kCopy, Args_xmCopyToHost{});
    case Op::xmCopyToPinned: return in(InjectPoint::kCopy, Args_xmCopyToPinned{});
    case Op::xmCopy2D: return in(InjectPoint::kCopy, Args_xmCopy2D{});
    case Op::cuMemcpyDtoDAsync_v2: return in(InjectPoint::kCopy, Args_cuMemcpyDtoDAsync_v2{});
    default: return std::nullopt;
  }
}

void Executor::execute() {
  const uint64_t sequence = current_.record.sequence();
  if (replay_.running() && current_.position < replay_.until()) injector_.at_replay(replay_.count(), sequence);
  if (replay_.delivers_at(sequence)) [[unlikely]] {
    fail_program(current_.record.header().ordinal, sequence, static_cast<CUresult>(replay_.deliver().error));
  }
  const bool careful = replay_.careful_at(sequence);
  if (careful) [[unlikely]] alone_ = settle();
  executing_.store(sequence, std::memory_order_relaxed);
  handlers_.streams.begin();
  if (placement_.bound() && (timing_.traces() || !makes_no_thread(op_of(current_.record)))) [[unlikely]] placement_.leave();
  use_context();
  device_.set_sequence(sequence);
  const uint64_t began = replay_.running() ? now_ns() : 0;
  if (timing_.on()) timing_.before(current_.record, handlers_.streams, replay_.running() && current_.position < replay_.until());
  dispatch();
  if (timing_.on()) {
    timing_.after();
    if (const Op op = op_of(current_.record); op == Op::xmAlloc || op == Op::xmFree) {
      timing_.allocated();
    } else if (op == Op::cuModuleUnload || op == Op::xmContextReset) {
      timing_.forget_kernels();
    }
  }
  if (replay_.running()) [[unlikely]] replay_.took(current_.record.header().op, now_ns() - began);
  if (const auto& used = handlers_.streams.finish(); used && !only_looks(op_of(current_.record))) {
    contexts_.use(used->ordinal);
    if (is_kernel(op_of(current_.record))) granules_.follow(used->stream, used->ordinal);
    faults_.check(progress_.enqueued(used->stream, used->ordinal, sequence));
  }
  if (careful) [[unlikely]] {
    settle();
    alone_ = false;
  }
}

// The record's, which is about to be opened where the program has just made it.
void Executor::use_context() {
  contexts_.use(op_of(current_.record) == Op::xmOpen ? contexts_.home() : current_.record.header().ordinal);
}

// Wait until the device has done all that it has: whatever faults then is the record's before. False if it does not end,
// because the device itself may wait for what the program does later.
bool Executor::settle() {
  const uint64_t since = now_ns();
  while (!device_idle()) {
    const uint64_t waited = now_ns() - since;
    const bool outside = handlers_.outside.any();
    if (outside && waited >= kBarrierPatience) return false;
    if (waited < kPatience) {
      journal::cpu_relax();
    } else {
      std::this_thread::sleep_for(std::chrono::nanoseconds(kStopPatience));
    }
  }
  progress_.idle(current_.sequence);
  return true;
}

// A fault of work that nobody waits for is not announced: it has to be requested.
void Executor::look_at_device(uint64_t now) {
  looked_at_ = now;
  if (!progress_.unfinished()) return;
  if (device_idle()) {
    progress_.idle(current_.sequence);
  } else {
    handlers_.streams.mark_work();
  }
}

// Time in which program and device both rest is nothing that a recovery would have to do again: so it has to be known when
// the device has come to rest, soon after it has.
void Executor::look_for_rest(uint64_t now) {
  if (!progress_.unfinished() || waits_.watching()) return;
  if (rest_look_at_ == 0) {
    rest_after_ = kFirstRestLook;
  } else if (now < rest_look_at_) {
    return;
  } else {
    if (device_idle()) progress_.idle(current_.sequence);
    rest_after_ = std::min(2 * rest_after_, kLookEvery);
  }
  rest_look_at_ = now + rest_after_;
}

// For the watchdog. What waits for the program, or for a value that somebody writes, may wait as long as it likes; and so may other
// ranks wait for this one, unless its program waits for its device: it may be about to do what they wait for.
Watchdog::Look Executor::look() const {
  using On = Watchdog::On;
  const OutsideWaits& outside = handlers_.outside;
  const uint64_t signature = progress_.signature();
  const bool pending = outside.beginning || (progress_.unfinished() && progress_.done() != Progress::kAll);
  if (!pending || outside.on_program()) return {On::kNothing, signature};
  if (!outside.collectives) return {On::kDevice, signature};
  const uint64_t waited_for = this->waited_for();
  if (outside.ends_itself || waited_for == journal::kNotWaiting) return {On::kNothing, signature};
  return {On::kRanks, signature + waited_for};
}

// What the program waits for longest, by position: a record, or room behind the last one.
uint64_t Executor::waited_for() const {
  const journal::JournalHeader& header = job_.header();
  uint64_t oldest = header.trimmed_waiters.load() != 0 ? header.tail.load() : journal::kNotWaiting;
  for (const journal::ThreadSlot& thread : header.threads) oldest = std::min(oldest, thread.waiting.load(std::memory_order_relaxed));
  return oldest;
}

void Executor::stuck(bool is) {
  stuck_ = is;
  daemon_.group_stuck(is ? hang_timeout_ : 0);
}

void Executor::hung() {
  char seconds[32];
  std::snprintf(seconds, sizeof(seconds), "%g", hang_timeout_);
  faults_.raise({CUDA_ERROR_LAUNCH_TIMEOUT, 0,
                  std::string("the device's work has made no progress for ") + seconds + " s: a kernel hangs"});
}

Culprit Executor::culprit() const {
  const uint64_t executing = executing_.load(std::memory_order_relaxed);
  if (alone_) return {executing, 0, 0};
  return {0, std::min(progress_.done(), executing == 0 ? 0 : executing - 1), executing};
}

void Executor::dispatch() {
  const journal::RecordHeader& header = current_.record.header();
  const uint32_t size = header.size;
  const uint32_t error = errors_.of(header.ordinal);
  const bool failing = error != 0 && !keeps_books(op_of(current_.record));
  const CUresult result = failing ? static_cast<CUresult>(error) : kHandlers[header.op](handlers_, current_.record);
  if (result != CUDA_SUCCESS) [[unlikely]] {
    if (!failing) faults_.check(result);
    if (current_.broken) return;
  }
  current_.position += size;
  current_.sequence = header.sequence;
  count_work(op_of(current_.record));
  if (current_.record.synchronous()) {
    if (current_.record.deferred()) return;
    Answer answer = Answer::to(current_.record);
    answer.result = result;
    answer.bytes = current_.record.reply_bytes();
    answer.hash = current_.record.reply_hash();
    replies_.give(answer);
    // That work is not done yet is an answer, and programs look again and again.
    const bool failed = result != CUDA_SUCCESS && result != CUDA_ERROR_NOT_READY;
    if (failed && !failing && !current_.record.replied()) [[unlikely]] {
      log_(Level::kInfo, std::string(current_.record.info().name) + " (record " + std::to_string(header.sequence) +
                             ") is answered with CUDA error " + std::to_string(result));
    }
  } else if (result != CUDA_SUCCESS && !failing) [[unlikely]] {
    const std::string what = std::string(current_.record.info().name) + " (record " + std::to_string(header.sequence) +
                             ") failed with CUDA error " + std::to_string(result);
    log_(Level::kWarning, what);
    // The call has returned long ago: like any error of asynchronous work, it comes back from every later call.
    if (!destroys(op_of(current_.record))) fail_program(header.ordinal, header.sequence, result);
  }
}

void Executor::fail_program(uint32_t ordinal, uint64_t sequence, CUresult error) {
  errors_.set(ordinal, {static_cast<uint32_t>(error), 0, sequence});
  // First the snapshot: a later replay must not start before the fault, which it would meet again after the program has
  // perhaps reset the context already.
  if (!take_snapshot("program error")) interrupts_.add(Interrupts::kSnapshot);
  journal::JournalHeader& header = job_.header();
  header.context_error_ordinal.store(ordinal);
  header.context_error_sequence.store(sequence);
  header.context_error.store(static_cast<uint32_t>(error), std::memory_order_release);
  daemon_.program_error(sequence, error);
}

void Executor::publish_executed() {
  if (current_.position <= published_) return;  // a replay is not there yet
  published_ = current_.position;
  job_.header().executed.store(current_.position, std::memory_order_release);
}

void Executor::sleep() {
  timing_.rest();
  if (waits_.watching()) placement_.free();  // they are handed to threads
  waits_.hand_over();
  journal::JournalHeader& header = job_.header();
  uint64_t limit = kLongestSleep;
  const uint64_t now = now_ns();
  if (current_.position != snapshots_.position() && !replay_.running()) {
    const uint64_t due_at = schedule_.due_at(now, memory_.live.bytes());
    limit = due_at > now ? std::min(limit, due_at - now) : 1'000'000;
  }
  const uint64_t settle_at = relocation_.settle_at();
  if (settle_at != 0) limit = settle_at > now ? std::min(limit, settle_at - now) : 1'000'000;
  const uint64_t trim_at = snapshots_.trim_shadow_at();
  if (trim_at != 0) limit = trim_at > now ? std::min(limit, trim_at - now) : 1'000'000;
  const uint32_t requests = interrupts_.pending(std::memory_order_seq_cst);
  const bool patient = header.trimmed_waiters.load() == 0 && !replay_.running() && !waits_.watching() && requests == 0;
  if (progress_.unfinished()) limit = std::min(limit, rest_look_at_ > now ? std::min(rest_look_at_ - now, kLookEvery) : kFirstRestLook);
  if (!patient) limit = kPatience;
  if (timing_.waits()) limit = std::min(limit, kPatience);
  const bool held_up = stands() || waits_.at_barrier(current_.position) || turns_.holds();
  if (held_up) limit = kStopPatience;
  if (group_.under_way() && !stands()) limit = std::min(limit, kPatience);
  const uint32_t callers = header.threads[caller_].processor.load(std::memory_order_relaxed);
  const bool unfinished = progress_.unfinished();
  const bool worth_it = patient && !held_up && settle_at == 0 && limit >= kWorthSettling && !unfinished;
  if (worth_it && resting_) {
    placement_.settle(header, callers);
  } else {
    placement_.free();
    if (worth_it) limit = kRest;
    // It will look at the device again and again, while the program computes.
    if (unfinished && limit > 2 * kFirstRestLook && placement_.at(callers)) placement_.leave();
    header.server_sleeping.store(journal::kAsleep, std::memory_order_seq_cst);
  }
  const uint32_t rung = header.doorbell.load(std::memory_order_seq_cst);
  const bool nothing = held_up || header.tail.load(std::memory_order_seq_cst) == current_.position;
  if (nothing && interrupts_.pending(std::memory_order_seq_cst) == requests) {
    journal::futex_wait(header.doorbell, rung, std::chrono::nanoseconds(limit));
  }
  header.server_sleeping.store(journal::kAwake, std::memory_order_seq_cst);
  const bool called = hear(header) != rung;
  placement_.woke(called);
  if (called && worth_it && resting_ && !placement_.bound()) placement_.took(header.rung_at.load(std::memory_order_relaxed), heard_at_);
  resting_ = worth_it && nothing && !called;
  if (!unfinished) looked_at_ = heard_at_;  // it had nothing to do, and nobody waits until the device is queried about what it had
  schedule_.slept(heard_at_);
}

// What the last server had counted of the quota may lie behind what it had published. An honest program's journal has all of it: it
// could have written larger records for that, or none.
void Executor::check_quota() {
  if (!quota_is_open_) [[likely]] return;
  const bool repeated = handlers_.memory.quota_repeated(current_.sequence);
  if (!repeated && current_.position < quota_until_) return;
  quota_is_open_ = false;
  if (repeated && handlers_.memory.keep_to_quota(current_.sequence)) return;
  current_.garbage("the program has more memory than its job's quota has room for");
}

bool Executor::check_finished_replay() {
  if (!replay_.running() || current_.position < replay_.until() || !replies_.all_met()) return false;
  replay_.end();
  timing_.did(profiling::Kind::kReplay, "replay", replay_began_, now_ns());
  ReplayReport report = replies_.report();
  report.records = replay_.records();
  daemon_.replayed(report);
  if (const std::string text = replay_.times(now_ns()); !text.empty()) log_(Level::kInfo, text);
  if (report.differing != 0) {
    log_(Level::kWarning, "the replay was not bit-exact: " + std::to_string(report.differing) + " of " +
                              std::to_string(report.compared) + " results differ, first that of record " +
                              std::to_string(report.first_difference.value_or(0)));
  }
  job_.header().state.store(static_cast<uint32_t>(journal::ServerState::kRunning));
  journal::futex_wake(job_.header().state);
  daemon_.phase("resumed");
  preload_.clear();
  prepared_.drop_unused();
  schedule_.replayed(now_ns());
  const bool came_without_memory = incoming_.end();
  {
    const std::lock_guard lock(memory_.mutex);
    if (!came_without_memory && !memory_.shadow.has_foreign()) return true;
  }
  settle_after_arrival();
  return true;
}

// Its shadow goes to this device: not while the program waits, nor while the driver is busy with the servers that it
// had, which end, and with the next standby.
void Executor::settle_after_arrival() {
  staging_.wishes.returns = true;
  staging_.wishes.must_settle = true;
  const uint64_t at = now_ns() + kQuietAfterMove;
  relocation_.settle_at(at);
  schedule_.postpone(at);
}

// From any thread, for a message about a fault: the ring may change meanwhile, nothing is trusted.
std::string Executor::operation(uint64_t sequence) const {
  const journal::JournalHeader& header = job_.header();
  const uint64_t tail = header.tail.load();
  const uint64_t ring = job_.journal().ring_bytes();
  uint64_t at = header.trimmed.load();
  while (at < tail && tail - at <= ring) {
    journal::RecordHeader record;
    std::memcpy(static_cast<void*>(&record), job_.journal().at(at), sizeof(record));
    if (record.size < sizeof(record) || record.size > tail - at) break;
    if (record.sequence == sequence) {
      return record.op < static_cast<uint16_t>(Op::kCount) ? kOpInfo[record.op].name : "";
    }
    at += record.size;
  }
  return "";
}

}  // namespace xmig::server
