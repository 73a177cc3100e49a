#include "server/channel/daemon.h"

#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "ipc/seqpacket.h"
#include "server/channel/job.h"
#include "server/clock.h"

namespace xmig::server {
namespace {

using Json = nlohmann::json;

// A daemon that does not read for this long counts as gone: the executor must not wait for it any longer.
constexpr timeval kSendPatience{2, 0};

// Bytes of memory that nobody uses any more, and that the backlog may hold all the same until the next daemon comes.
constexpr uint64_t kMostHeldForNothing = 256 << 20;

std::string_view kind_name(HostedKind kind) {
  switch (kind) {
    case HostedKind::kDevice: return "device";
    case HostedKind::kShadow: return "shadow";
    case HostedKind::kImage: return "image";
  }
  return "device";
}

// Text of foreign origin may be anything but UTF-8; replaced rather than refused.
std::string dump(const Json& object) { return object.dump(-1, ' ', false, Json::error_handler_t::replace); }

// `change`: the number of this change of the job's memory; 0: it is none.
std::string describe(const Hosted& memory, uint64_t change) {
  Json message = {{"type", "memory"},
                  {"op", "add"},
                  {"id", memory.id},
                  {"kind", kind_name(memory.kind)},
                  {"ordinal", memory.ordinal},
                  {"address", memory.address},
                  {"bytes", memory.bytes},
                  {"name", memory.name},
                  {"change", change}};
  if (memory.foreign) message["foreign"] = true;
  if (memory.sealed) message["sealed"] = true;
  return dump(message);
}

}  // namespace

std::unique_lock<std::recursive_mutex> Daemon::attach(ipc::UniqueFd socket) {
  ::setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &kSendPatience, sizeof(kSendPatience));
  std::unique_lock lock(mutex_);
  socket_ = std::move(socket);
  broken_ = false;
  unheard_.clear();  // whoever it is takes over the backlog, and is sent everything
  held_for_nothing_ = 0;
  return lock;
}

void Daemon::detach() {
  const std::lock_guard lock(mutex_);
  socket_.reset();
}

bool Daemon::attached() const {
  const std::lock_guard lock(mutex_);
  return static_cast<bool>(socket_);
}

void Daemon::send(const std::string& message, std::span<const int> fds) {
  const std::lock_guard lock(mutex_);
  if (!socket_ || broken_) return;
  const auto bytes = std::as_bytes(std::span(message));
  if (ipc::send_message(socket_.get(), bytes, fds) == 0) return;
  // Gone, or stopped: shutting down makes the control thread's poll() return, which then looks for another daemon.
  broken_ = true;
  ::shutdown(socket_.get(), SHUT_RDWR);
}

void Daemon::hello(const std::string& device, double warm_ms, uint64_t device_bytes) {
  send(dump({{"type", "hello"},
             {"pid", ::getpid()},
             {"device", device},
             {"warm_ms", warm_ms},
             {"device_bytes", device_bytes}}));
}

void Daemon::unavailable(int error, std::string_view text) {
  send(dump({{"type", "unavailable"}, {"error", error}, {"text", text}}));
}

void Daemon::ready(uint32_t generation, bool opened) {
  send(dump({{"type", "ready"}, {"generation", generation}, {"opened", opened}, {"t", now_ns()}}));
}

void Daemon::opened(uint64_t device_bytes) { send(dump({{"type", "opened"}, {"device_bytes", device_bytes}})); }

void Daemon::joining(bool joining) {
  const std::lock_guard lock(mutex_);
  joining_ = joining;
  send(dump({{"type", "joining"}, {"joining", joining}}));
}

void Daemon::meet(const std::string& meeting, uint32_t rank, uint32_t ranks, const std::string& offer, const std::string& answer) {
  send(dump({{"type", "meet"}, {"meeting", meeting}, {"rank", rank}, {"ranks", ranks}, {"offer", offer}, {"answer", answer}}));
}

void Daemon::count_changes(std::atomic<uint64_t>& changes) {
  const std::lock_guard lock(mutex_);
  changes_ = &changes;
}

void Daemon::preloaded(const PreloadReport& report) {
  send(dump({{"type", "preloaded"},
             {"modules", report.modules},
             {"kernels", report.kernels},
             {"device_bytes", report.device_bytes}}));
}

void Daemon::communicator_prepared(uint64_t attempt, uint64_t device_bytes, std::string_view why) {
  send(dump({{"type", "communicator_prepared"}, {"attempt", attempt}, {"device_bytes", device_bytes}, {"why", why}}));
}

void Daemon::memory_short(uint64_t number, uint32_t ordinal, uint64_t bytes) {
  send(dump({{"type", "memory_short"}, {"number", number}, {"ordinal", ordinal}, {"bytes", bytes}}));
}

void Daemon::keep_backlog(ipc::UniqueFd socket) {
  const std::lock_guard lock(mutex_);
  backlog_ = std::move(socket);
}

// First where it cannot be lost, then counted: of what is not counted, nothing depends yet. What is counted and in neither
// place would make the next daemon give the process up.
void Daemon::changed(const std::string& message, std::span<const int> fds) {
  if (!changes_) return;
  if (backlog_) ipc::send_message(backlog_.get(), std::as_bytes(std::span(message)), fds);
  changes_->fetch_add(1);
}

void Daemon::memory_add(const Hosted& memory) {
  const std::lock_guard lock(mutex_);  // an announcement says how many changes there were before it
  const std::string message = describe(memory, changes_ ? changes_->load() + 1 : 0);
  const int fd = memory.fd.get();
  changed(message, std::span(&fd, 1));
  if (backlog_ && !socket_) unheard_[memory.id] = memory.bytes;
  send(message, std::span(&fd, 1));
}

void Daemon::memory_again(const Hosted& memory) {
  const int fd = memory.fd.get();
  send(describe(memory, 0), std::span(&fd, 1));
}

void Daemon::memory_drop(uint64_t id) {
  const std::lock_guard lock(mutex_);
  const uint64_t change = changes_ ? changes_->load() + 1 : 0;
  const std::string message = dump({{"type", "memory"}, {"op", "drop"}, {"id", id}, {"change", change}});
  changed(message, {});
  // Where no daemon empties the backlog, it goes on holding what is given up.
  if (const auto found = unheard_.find(id); found != unheard_.end()) {
    held_for_nothing_ += found->second;
    unheard_.erase(found);
    if (held_for_nothing_ > kMostHeldForNothing) backlog_.reset();
  }
  send(message);
}

void Daemon::communicator(const std::string& name, uint32_t rank, uint32_t ranks, std::string_view state) {
  send(dump({{"type", "communicator"}, {"name", name}, {"rank", rank}, {"ranks", ranks}, {"state", state}}));
}

void Daemon::communicator_failed(const std::string& name, uint32_t rank, std::string_view why, bool severed) {
  send(dump({{"type", "communicator_failed"}, {"name", name}, {"rank", rank}, {"why", why}, {"severed", severed}}));
}

void Daemon::group_wanted(std::string_view reason) { send(dump({{"type", "group_wanted"}, {"reason", reason}})); }

void Daemon::group_stopped(uint64_t round, const std::map<std::string, uint64_t>& counts, std::optional<uint64_t> behind, uint64_t work) {
  Json message{{"type", "group_stopped"}, {"round", round}, {"counts", counts}, {"behind", nullptr}, {"work", work}};
  if (behind) message["behind"] = *behind;
  send(dump(message));
}

void Daemon::group_held(uint64_t round) { send(dump({{"type", "group_held"}, {"round", round}})); }

void Daemon::group_busy(uint64_t round, std::string_view why) {
  send(dump({{"type", "group_busy"}, {"round", round}, {"why", why}}));
}

void Daemon::group_stuck(double seconds) { send(dump({{"type", "group_stuck"}, {"seconds", seconds}})); }

void Daemon::replicas_wanted(uint64_t bytes) { send(dump({{"type", "replicas_wanted"}, {"bytes", bytes}})); }

void Daemon::chunks_wanted(uint32_t rank, std::span<const ChunkHash> chunks) {
  send(dump({{"type", "chunks_wanted"}, {"rank", rank}, {"chunks", chunks}}));
}

void Daemon::chunks_read(uint64_t number, size_t examined, std::span<const uint64_t> found, std::string_view why) {
  send(dump({{"type", "chunks_read"}, {"number", number}, {"examined", examined}, {"found", found}, {"why", why}}));
}

void Daemon::copies_made(uint64_t snapshot, uint64_t bytes, uint64_t missing_bytes, uint64_t brought_bytes) {
  send(dump({{"type", "copies_made"},
             {"snapshot", snapshot},
             {"bytes", bytes},
             {"missing_bytes", missing_bytes},
             {"brought_bytes", brought_bytes}}));
}

void Daemon::snapshot(const SnapshotReport& report) {
  send(dump({{"type", "snapshot"},
             {"round", report.round},
             {"number", report.number},
             {"position", report.position},
             {"sequence", report.sequence},
             {"ms", report.ms},
             {"waited_ms", report.waited_ms},
             {"hash_ms", report.hash_ms},
             {"copy_ms", report.copy_ms},
             {"hashed_bytes", report.hashed_bytes},
             {"chunks", report.chunks},
             {"copied_bytes", report.copied_bytes},
             {"live_bytes", report.live_bytes},
             {"journal_bytes", report.journal_bytes},
             {"objects", report.objects},
             {"off_device", report.off_device},
             {"reason", report.reason}}));
}

void Daemon::snapshot_stands(uint64_t number) { send(dump({{"type", "snapshot_stands"}, {"number", number}})); }

void Daemon::fault(const Culprit& culprit, std::string_view op, int error, std::string_view text) {
  send(dump({{"type", "fault"},
             {"sequence", culprit.sequence},
             {"op", op},
             {"error", error},
             {"text", text},
             {"t", now_ns()},
             {"after", culprit.after},
             {"until", culprit.until}}));
}

void Daemon::phase(std::string_view name) { send(dump({{"type", "phase"}, {"name", name}, {"t", now_ns()}})); }

void Daemon::replayed(const ReplayReport& report) {
  Json first;
  if (report.first_difference) first = *report.first_difference;
  send(dump({{"type", "phase"},
             {"name", "replayed"},
             {"t", now_ns()},
             {"records", report.records},
             {"compared", report.compared},
             {"differing", report.differing},
             {"first_difference", first}}));
}

void Daemon::program_error(uint64_t sequence, int error) {
  send(dump({{"type", "program_error"}, {"sequence", sequence}, {"error", error}}));
}

void Daemon::injected(uint64_t id) { send(dump({{"type", "injected"}, {"id", id}})); }

void Daemon::garbage(uint64_t position, std::string_view text) {
  send(dump({{"type", "garbage"}, {"position", position}, {"text", text}}));
}

void Daemon::announce(const Job& job, const std::string& device, uint32_t generation, bool opened) {
  const std::lock_guard lock(mutex_);
  send(dump({{"type", "announce"},
             {"job", job.name()},
             {"pid", ::getpid()},
             {"device", device},
             {"client_pid", job.client_pid()},
             {"generation", generation},
             {"opened", opened},
             {"joining", joining_},
             {"quota_slots", job.quota_slots()},
             {"changes", changes_ ? changes_->load() : 0},
             {"takes_output", true},
             {"takes_backlog", true},
             {"takes_profiling", true},
             {"takes_sharing", true},
             {"has_backlog", static_cast<bool>(backlog_)}}),
       job.fds().all());
}

void Daemon::announced() { send(dump({{"type", "announced"}})); }

void Daemon::paused(uint64_t position, uint64_t snapshot) {
  send(dump({{"type", "paused"}, {"position", position}, {"snapshot", snapshot}, {"t", now_ns()}}));
}

void Daemon::continued(uint64_t position) {
  send(dump({{"type", "continued"}, {"position", position}, {"t", now_ns()}}));
}

void Daemon::bye(std::string_view reason) { send(dump({{"type", "bye"}, {"reason", reason}})); }

// A socket that is closed with unread messages in it resets the connection, and the daemon hears of that before it reads
// what was reported last. So nothing more may come, and what has come is taken.
void Daemon::hang_up() {
  const std::lock_guard lock(mutex_);
  if (!socket_) return;
  ::shutdown(socket_.get(), SHUT_RD);
  std::byte cut_off[1];
  while (true) {
    const ipc::Received unread = ipc::receive_message(socket_.get(), cut_off);
    if (unread.error != 0 ? unread.error != EMSGSIZE : unread.bytes == 0) return;
  }
}

void Daemon::round(const RoundReport& report) {
  send(dump({{"type", "round"},
             {"number", report.number},
             {"snapshot", report.snapshot},
             {"total_bytes", report.total_bytes},
             {"copied_bytes", report.copied_bytes},
             {"settled_bytes", report.settled_bytes},
             {"differing_bytes", report.differing_bytes},
             {"ms", report.ms},
             {"loading_ms", report.loading_ms}}));
}

void Daemon::round_progress(uint64_t number, uint64_t copied_bytes) {
  send(dump({{"type", "round_progress"}, {"number", number}, {"copied_bytes", copied_bytes}}));
}

void Daemon::move_failed(std::string_view code, std::string_view text) {
  send(dump({{"type", "move_failed"}, {"code", code}, {"text", text}}));
}

void Daemon::handed_over(uint64_t snapshot, uint64_t position, uint64_t stopped, uint64_t drained, double snapshot_ms) {
  send(dump({{"type", "handed_over"},
             {"snapshot", snapshot},
             {"position", position},
             {"t", now_ns()},
             {"stopped_t", stopped},
             {"drained_t", drained},
             {"snapshot_ms", snapshot_ms}}));
}

void Daemon::handover_failed(std::string_view text) { send(dump({{"type", "handover_failed"}, {"text", text}})); }

void Daemon::suspend_progress(uint64_t done_bytes, uint64_t total_bytes) {
  send(dump({{"type", "suspend_progress"}, {"done_bytes", done_bytes}, {"total_bytes", total_bytes}}));
}

void Daemon::snapshot_slab(uint64_t number, uint32_t ordinal, uint64_t address, uint64_t bytes, bool rounded, int fd) {
  const bool known = fd < 0;
  send(dump({{"type", "snapshot_slab"}, {"number", number}, {"ordinal", ordinal}, {"address", address}, {"bytes", bytes}, {"known", known},
             {"rounded", rounded}}),
       std::span(&fd, known ? 0 : 1));
}

void Daemon::snapshot_copied(uint64_t number, uint64_t bytes, double ms, const RoundedByType& rounded, int fd) {
  constexpr std::array<const char*, journal::kNumberTypes> kNames = {"float16", "bfloat16", "float32", "float64"};
  Json types = Json::array();
  for (size_t type = 0; type < rounded.size(); ++type) {
    const RoundedNumbers& its = rounded[type];
    if (its.ranges == 0) continue;
    types.push_back({{"type", kNames[type]}, {"ranges", its.ranges}, {"bytes", its.bytes}, {"changed", its.changed},
                     {"largest_relative", its.largest_relative}, {"largest_absolute", its.largest_absolute}});
  }
  send(dump({{"type", "snapshot_copied"}, {"number", number}, {"bytes", bytes}, {"ms", ms}, {"rounded", types}}), std::span(&fd, 1));
}

void Daemon::snapshot_not_copied(uint64_t number, std::string_view why) {
  send(dump({{"type", "snapshot_not_copied"}, {"number", number}, {"text", why}}));
}

void Daemon::prepared(double ms) { send(dump({{"type", "prepared"}, {"ms", ms}})); }

void Daemon::suspended(uint64_t snapshot, uint64_t position, uint64_t bytes, double ms) {
  send(dump({{"type", "suspended"},
             {"snapshot", snapshot},
             {"position", position},
             {"bytes", bytes},
             {"t", now_ns()},
             {"ms", ms}}));
}

void Daemon::suspend_failed(std::string_view text) { send(dump({{"type", "suspend_failed"}, {"text", text}})); }

void Daemon::resume_failed(std::string_view code, std::string_view text) {
  send(dump({{"type", "resume_failed"}, {"code", code}, {"text", text}}));
}

void Log::operator()(Level level, std::string_view text) {
  constexpr const char* kNames[] = {"info", "warning", "error"};
  const char* const name = kNames[static_cast<int>(level)];
  if (daemon_.attached()) {
    daemon_.send(dump({{"type", "log"}, {"level", name}, {"text", text}}));
  } else {
    std::fprintf(stderr, "xmig-server: %s: %.*s\n", name, static_cast<int>(text.size()), text.data());
  }
}

}  // namespace xmig::server
