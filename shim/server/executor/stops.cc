// Where the executor stops between two records: until the device is idle, to take a snapshot; or until somebody lets it go on.
#include <unistd.h>

#include "journal/futex.h"
#include "server/clock.h"
#include "server/executor/executor.h"

namespace xmig::server {

namespace {

constexpr uint64_t kBesidesCopy = 5'000'000;  // ns: as long as the last snapshot is copied, no other is due

}  // namespace

// Device work that only ends when the program does something: a snapshot that waited for it could wait for ever, because the
// program may in turn wait for records that come after the snapshot.
bool Executor::external_waits() {
  if (handlers_.outside.on_functions()) return true;
  if (handlers_.outside.collectives) return true;
  if (handlers_.outside.values && !device_idle()) return true;
  handlers_.outside.values = false;
  const journal::JournalHeader& header = job_.header();
  // A position that was posted twice and not taken yet must not be trimmed either.
  return header.callbacks_posted.load(std::memory_order_acquire) !=
         header.callbacks_taken.load(std::memory_order_acquire);
}

// Decides between two batches whether to take a snapshot, and if so stops execution until the device is idle. The executor goes on
// answering meanwhile.
void Executor::consider_snapshot(bool idle) {
  if (group_.stage() != GroupSnapshot::Stage::kHeld) departure_.act();
  const uint64_t now = now_ns();
  schedule_.passed(now, !idle, progress_.unfinished(), memory_.live.bytes());
  if (!schedule_.stopping()) {
    if (handlers_.collectives.grouped() || group_.under_way()) [[unlikely]] {
      if (take_part(idle, now)) return;
    }
    const std::optional<Schedule::Stop> stop = wants_stop(idle, now);
    if (!stop) return;
    schedule_.begin(*stop);
    if (placement_.bound()) placement_.leave();
  }
  if (device_idle()) return act_upon(schedule_.end());
  if (now < schedule_.stop().deadline) return;
  if (schedule_.stop().for_another()) {
    constexpr const char* kWhy = "the device does not come to an end with what it has";
    const bool suspending = schedule_.end().request == Interrupts::kSuspend;
    return suspending ? departure_.fail_suspend(kWhy) : daemon_.handover_failed(kWhy);
  }
  schedule_.give_up(now, progress_.signature());
}

void Executor::act_upon(const Schedule::Stop& stop) {
  switch (stop.request) {
    case Interrupts::kPause: return wait_paused();
    case Interrupts::kHandover: return departure_.hand_over(stop.since);
    case Interrupts::kSuspend: return departure_.suspend(stop.since);
    default:
      static_cast<void>(take_snapshot(stop.reason, stop.since));  // if it was not possible, the log says why
      interrupts_.snapshot_decided();
  }
}

std::optional<Schedule::Stop> Executor::wants_stop(bool idle, uint64_t now) {
  std::optional<Schedule::Stop> stop = proposed_stop(idle, now);
  if (!stop) return stop;
  // Queried last, for it may ask the device.
  const bool outside = external_waits();
  if (outside && (!stop->for_another() || now < stop->deadline)) return std::nullopt;
  interrupts_.take(stop->request);
  if (stop->deadline != stop->since) stop->progress = progress_.signature();
  if (stop->for_another()) schedule_.given_away();
  return stop;
}

std::optional<Schedule::Stop> Executor::proposed_stop(bool idle, uint64_t now) {
  if (snapshot_copy_.under_way()) [[unlikely]] schedule_.postpone(now + kBesidesCopy);
  if (relocation_.settle_at() != 0 && now >= relocation_.settle_at() && relocation_.begin_settling()) {
    schedule_.postpone(now_ns() + Relocation::kPatienceToSettle);
  }
  const uint64_t gained = current_.position - snapshots_.position();
  const uint32_t requested = interrupts_.pending();
  if (gained == 0 && nothing_to_snapshot(requested)) return std::nullopt;
  const journal::JournalHeader& header = job_.header();
  return schedule_.wanted({
      .now = now,
      .idle = idle,
      .requests = requested,
      .gained = gained,
      .filled = current_.position - snapshots_.trimmed(),
      .ring_bytes = job_.journal().ring_bytes(),
      .room_is_waited_for = header.trimmed_waiters.load(std::memory_order_relaxed) != 0,
      .caught_up = header.tail.load(std::memory_order_relaxed) == current_.position,
      .watching = waits_.watching(),
      .replaying = replay_.running(),
      .live_bytes = memory_.live.bytes(),
  });
}

// Nothing was executed since the last snapshot. Is there nothing to stop for either? Then who requested a snapshot is informed.
bool Executor::nothing_to_snapshot(uint32_t requested) {
  const std::atomic<bool>& must_settle = staging_.wishes.must_settle;
  schedule_.set_snapshot_now(false);
  if (requested & (Interrupts::kPause | Interrupts::kHandover | Interrupts::kSuspend)) return false;
  if (requested & Interrupts::kSnapshot && must_settle) return false;
  if (!(requested & (Interrupts::kSnapshot | Interrupts::kAnswer))) return true;
  const uint32_t answered = interrupts_.take(Interrupts::kSnapshot | Interrupts::kAnswer);
  if (must_settle) {
    interrupts_.add(answered);  // since the look at `requested` there is something to preserve after all
  } else if (answered & Interrupts::kAnswer) {
    daemon_.snapshot_stands(snapshots_.number());
  }
  interrupts_.snapshot_decided();
  return true;
}

bool Executor::device_idle() {
  for (uint32_t ordinal = 0; ordinal < contexts_.count(); ++ordinal) {
    if (!contexts_.is_open(ordinal)) continue;
    contexts_.use(ordinal);
    if (!handlers_.streams.busy(ordinal).empty()) return false;
  }
  return true;
}

void Executor::drain() {
  waits_.hand_over();  // replies do not wait for the rest
  for (uint32_t ordinal = 0; ordinal < contexts_.count(); ++ordinal) {
    if (!contexts_.is_open(ordinal)) continue;
    contexts_.use(ordinal);
    faults_.check(driver_.cuCtxSynchronize());
  }
  waits_.finish_all();
  working_.clear();
  progress_.idle(current_.sequence);
  handlers_.intake.drained();
}

void Executor::come_to_rest() {
  drain();
  publish_executed();
}

Result<> Executor::take_snapshot(const char* reason, uint64_t stopped) {
  if (placement_.bound()) placement_.leave();
  if (handlers_.collectives.entangled() && !forsakes_the_group_) {
    return Error{"the process is in a communicator: its ranks take snapshots together"};
  }
  if (external_waits()) return Error{"work of the device waits for the program"};
  come_to_rest();
  const uint64_t start = now_ns();
  // What is not in device memory is lost with this server: it has to be there before that is the state.
  handlers_.variables.keep();
  const Snapshots::Moment moment{current_.position, current_.sequence, errors_.all(), handlers_};
  job_.header().round_prepared.store(0);
  if (forsakes_the_group_) forsake_the_group();
  snapshots_.begin(moment);
  Result<Snapshots::Taken> taken = snapshots_.take(moment, relocation_.settling());
  if (!taken) {
    no_snapshot(taken.why());
    return taken.error();
  }
  snapshot_taken(std::move(*taken), reason, start, stopped, 0);
  return {};
}

void Executor::no_snapshot(const std::string& why) {
  schedule_.snapshot_failed(now_ns());
  if (why == snapshot_trouble_) return;
  log_(Level::kWarning, "no snapshot is possible, the last one stays: " + why +
                            ". The job goes on; a recovery would replay more, and a full journal would stop it");
  snapshot_trouble_ = why;
}

// `began`: when the device had come to rest. `stopped`: as of take_snapshot().
void Executor::snapshot_taken(Snapshots::Taken taken, const char* reason, uint64_t began, uint64_t stopped, uint64_t round) {
  snapshot_trouble_.clear();
  timing_.did(profiling::Kind::kSnapshot, "snapshot", began, taken.end);
  relocation_.settle_at(0);
  const uint64_t waited = stopped != 0 ? began - stopped : 0;
  schedule_.snapshot_taken(began, taken.end, taken.once_ns, waited);
  SnapshotReport& report = taken.report;
  report.reason = reason;
  report.round = round;
  report.ms = static_cast<double>(taken.end - began) / 1e6;
  report.waited_ms = static_cast<double>(waited) / 1e6;
  interrupts_.take(Interrupts::kAnswer);
  daemon_.snapshot(report);
  relocation_.end_settling();
}

void Executor::pause(bool at_snapshot) {
  {
    const std::lock_guard lock(pause_mutex_);
    pause_wanted_ = true;
    pause_at_snapshot_ = at_snapshot;
  }
  interrupts_.request(Interrupts::kPause);
}

bool Executor::pause_with_the_group(uint64_t round) {
  if (round == 0 || group_.held() != round) return false;
  const std::lock_guard lock(pause_mutex_);
  pause_wanted_ = true;
  return true;
}

void Executor::wait_paused() {
  waits_.finish_all();
  progress_.idle(current_.sequence);
  publish_executed();
  bool at_snapshot = false;
  {
    const std::lock_guard lock(pause_mutex_);
    at_snapshot = pause_wanted_ && pause_at_snapshot_;
  }
  const bool stands = snapshots_.number() != 0 && snapshots_.position() == current_.position && !snapshots_.lacks_lost();
  stay_paused(at_snapshot && (stands || take_snapshot("checkpoint")) ? snapshots_.number() : 0);
}

// If that is wanted still. `snapshot`: of where it stands; 0: there is none.
void Executor::stay_paused(uint64_t snapshot) {
  bool wanted = false;
  {
    const std::lock_guard lock(pause_mutex_);
    wanted = paused_ = std::exchange(pause_wanted_, false);
  }
  if (wanted) stay([this, snapshot] { daemon_.paused(current_.position, snapshot); });
  daemon_.continued(current_.position);
}

void Executor::park(const std::function<void()>& tell) {
  {
    const std::lock_guard lock(pause_mutex_);
    paused_ = true;
  }
  stay(tell);
}

void Executor::hold() {
  // The copy of a snapshot has nothing of what page-locked memory has brought since.
  const uint64_t snapshot = memory_.copy_log.is_needed() ? 0 : snapshots_.number();
  park([this, snapshot] { daemon_.paused(current_.position, snapshot); });
}

// As long as `paused_` is set.
void Executor::stay(const std::function<void()>& tell) {
  {
    const std::lock_guard lock(pause_mutex_);
    parked_ = tell;
  }
  tell();  // not under the lock, which announce() takes while it keeps others from speaking
  std::unique_lock lock(pause_mutex_);
  pause_changed_.wait(lock, [&] { return !paused_; });
  parked_ = nullptr;
  schedule_.rested(now_ns());
}

Result<> Executor::unpause(std::optional<Rebind> rebind) {
  const std::lock_guard lock(pause_mutex_);
  if (!paused_ && std::exchange(pause_wanted_, false)) return {};  // it was not yet
  if (!paused_) return Error{"the server is not paused"};
  if (rebind) {
    journal::JournalHeader& old = job_.header();
    const uint64_t tail = old.tail.load();
    contexts_.use(contexts_.home());
    unregister_shared();
    placement_.close();
    if (Result<> bound = job_.rebind(std::move(*rebind)); !bound) return bound;
    register_shared();
    if (job_.header().magic != journal::kMagic || job_.header().tail.load() < tail) {
      return Error{"the restored journal is not this job's"};
    }
    schedule_.follow(job_.header().stall);
    job_.header().client_pid = static_cast<uint32_t>(job_.client_pid());
    daemon_.count_changes(job_.header().memory_changes);
  }
  paused_ = false;
  pause_changed_.notify_all();
  return {};
}

void Executor::go_on() {
  journal::JournalHeader& header = job_.header();
  header.server_pid.store(static_cast<uint32_t>(::getpid()));
  generation_ = header.generation.fetch_add(1) + 1;
  header.state.store(static_cast<uint32_t>(journal::ServerState::kRunning));
  journal::futex_wake(header.state);
  schedule_.start_again(now_ns());
}

}  // namespace xmig::server
