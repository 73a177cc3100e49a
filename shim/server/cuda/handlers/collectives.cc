#include "server/cuda/handlers/collectives.h"

#include <pthread.h>
#include <xxhash.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <utility>

#include "server/clock.h"
#include "server/cuda/objects/communicator_place.h"

namespace xmig::server {
namespace {

using journal::CollectiveKind;
using journal::CollectiveOperation;
using journal::CommunicatorReply;
using journal::DataType;
using journal::Reduction;

constexpr uint64_t kFailuresEvery = 100'000'000;  // ns, at communicators that do not say by themselves that they have failed
constexpr uint64_t kReportEvery = 1'000'000'000;  // ns, that one has failed, until the daemon answers
// ns in which a program may end a communicator that is lost. It learns of that as with NCCL, if it asks (ncclCommGetAsyncError).
constexpr uint64_t kToEnd = 5'000'000'000;
constexpr uint64_t kPollEvery = 1'000'000;  // ns, whether collectives are done
constexpr int32_t kNoColor = -1;

std::string split_of(uint64_t number) { return "split " + std::to_string(number); }
std::string split_of(uint64_t number, int32_t color) { return split_of(number) + " colour " + std::to_string(color); }

}  // namespace

// A communicator that is being made, and who waits for it.
struct Collectives::Making {
  uint64_t communicator = 0;
  bool again = false;  // what a snapshot kept, or a replay: the program has it already
  bool kept = false;   // of these: no call waits for it
  bool refused = false;  // of these: the program was answered that it could not be made
  CommunicatorReply answered{};  // that answer
  uint64_t reported_at = 0;  // that it could not be made
  Answer answer;
  std::span<std::byte> reply_space;
  One one;
  device::Place place;
  // Of a split.
  bool split = false;
  device::Place parent;
  uint64_t number = 0;
  int32_t color = 0, key = 0;

  std::unique_ptr<device::Communicator> ahead;  // it was made before it was needed
  // Written by its thread, before `done`.
  Result<std::unique_ptr<device::Communicator>> made = Error{"nothing was made"};
  std::atomic<bool> done{false};
  std::thread thread;
};

Collectives::Collectives(const Session& session, PreparedCommunicators& prepared, Streams& streams, Addresses& addresses,
                         OutsideWaits& outside)
    : device_(session.device),
      driver_(session.device.driver()),
      contexts_(session.services.contexts),
      job_(session.services.job),
      log_(session.services.log),
      meetings_(session.services.meetings),
      daemon_(session.services.daemon),
      membership_(session.services.membership),
      objects_(session.objects),
      replies_(session.replies),
      current_(session.current),
      execution_(session.execution),
      streams_(streams),
      addresses_(addresses),
      outside_(outside),
      prepared_(prepared) {}

Collectives::~Collectives() { destroy_all(); }

void Collectives::abort_all() {
  meetings_.close();
  for (auto& [handle, one] : communicators_) {
    if (one.real) one.real->abort();
  }
  for (const auto& one : leaving_) one->abort();
}

void Collectives::destroy_all() {
  abort_all();
  for (Making& making : making_) {
    if (making.thread.joinable()) making.thread.join();
  }
  making_.clear();
  communicators_.clear();
  leaving_.clear();
}

bool Collectives::may_be_made(uint64_t communicator) {
  const bool free = journal::handle_is(communicator, journal::Kind::kCommunicator) &&
                    journal::handle_index(communicator) < journal::kMaxCommunicators && !communicators_.contains(communicator) &&
                    std::none_of(making_.begin(), making_.end(), [&](const Making& one) { return one.communicator == communicator; });
  if (!free) current_.garbage("a new communicator has a number that is taken, or none");
  return free;
}

Collectives::One Collectives::one_of(const Record& record) {
  One one;
  one.sequence = record.sequence();
  one.header.resize(sizeof(journal::RecordHeader));
  std::memcpy(one.header.data(), static_cast<const void*>(&record.header()), sizeof(journal::RecordHeader));
  one.ordinal = record.header().ordinal;
  return one;
}

Collectives::Making* Collectives::begin(Record& record, uint64_t communicator) {
  if (!may_be_made(communicator)) return nullptr;
  Making& making = making_.emplace_back();
  making.communicator = communicator;
  making.again = record.replied();
  making.answered = reply_of(record);
  making.refused = making.again && making.answered.result != 0;
  making.answer = Answer::to(record);
  making.reply_space = record.reply_space();
  making.one = one_of(record);
  record.defer();
  outside_.ends_itself.store(true);
  outside_.collectives.store(true);
  return &making;
}

void Collectives::run(Making& making) {
  report_joining();
  making.thread = std::thread([this, &making] {
    ::pthread_setname_np(::pthread_self(), "communicator");
    contexts_.use(making.one.ordinal);
    making.made = join(making);
    making.done.store(true, std::memory_order_release);
    execution_.wake();
  });
}

// A standby that opens contexts meanwhile would hold the driver up.
void Collectives::report_joining() {
  if (joining_ == !making_.empty()) return;
  joining_ = !joining_;
  daemon_.joining(joining_);
}

void Collectives::take_ahead(Making& making) {
  const device::Place& place = making.place;
  making.ahead = prepared_.take(meeting_of(place.group, kJoin), place.rank, [this] { failure(); });
  if (making.ahead) log_(Level::kInfo, "a communicator of " + std::to_string(place.ranks) + " ranks was made ahead");
}

// A recovery has it again, and the ranks of it meet when all is known that this one had.
void Collectives::postpone(uint64_t communicator, One one, device::Place place) {
  one.place = std::move(place);
  one.name = meeting_of(one.place.group, kJoin);
  one.incomplete |= gone_.contains(one.name);
  one.postponed = true;
  if (one.incomplete) {
    membership_.left_in(one.name, one.place.rank, one.place.ranks);
  } else {
    membership_.joined(one.name, one.place.rank, one.place.ranks);
  }
  One& added = communicators_[communicator] = std::move(one);
  keep(communicator, added);
}

void Collectives::join_again() {
  for (auto at = communicators_.begin(); at != communicators_.end();) {
    if (!at->second.postponed) {
      ++at;
      continue;
    }
    Making& making = making_.emplace_back();
    making.communicator = at->first;
    making.kept = making.again = true;
    making.one = std::move(at->second);
    making.one.postponed = false;
    making.place = making.one.place;
    making.place.context = contexts_.real(making.one.ordinal);
    making.place.ordinal = making.one.ordinal;
    at = communicators_.erase(at);
    take_ahead(making);
    outside_.ends_itself.store(true);
    outside_.collectives.store(true);
    run(making);
  }
}

CUresult Collectives::on_xmCommInit(Record& record) {
  Args_xmCommInit args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (args.ranks == 0 || args.ranks > journal::kMaxRanks || args.rank >= args.ranks) return CUDA_ERROR_INVALID_VALUE;
  const std::chrono::milliseconds join_time(args.join_time);
  if (current_.mode != Mode::kRun) {
    if (!may_be_made(args.communicator)) return CUDA_ERROR_INVALID_VALUE;
    if (current_.mode == Mode::kObjects && !was_made(record)) return CUDA_SUCCESS;
    One one = one_of(record);
    one.join_time = join_time;
    if (current_.mode == Mode::kRestore) {
      one.splits = args.splits;
      one.incomplete = args.incomplete != 0;
    }
    postpone(args.communicator, std::move(one), place_of(args, record.payload()));
    return CUDA_SUCCESS;
  }
  Making* const making = begin(record, args.communicator);
  if (!making) return CUDA_ERROR_INVALID_VALUE;
  device::Place& place = making->place;
  place = place_of(args, record.payload());
  place.context = contexts_.real(making->one.ordinal);
  place.ordinal = making->one.ordinal;
  making->one.join_time = join_time;
  take_ahead(*making);
  run(*making);
  return CUDA_SUCCESS;
}

// What the program was answered.
CommunicatorReply Collectives::reply_of(const Record& record) {
  CommunicatorReply reply{};
  std::memcpy(&reply, record.reply_space().data(), std::min(sizeof(reply), record.reply_space().size()));
  return reply;
}

// The other ranks do not look for it again: some are further.
std::optional<CommunicatorReply> Collectives::was_made(const Record& record) {
  const CommunicatorReply reply = reply_of(record);
  if (reply.result != 0 || reply.ranks == 0 || reply.rank >= reply.ranks) return std::nullopt;
  return reply;
}

CUresult Collectives::on_xmCommSplit(Record& record) {
  Args_xmCommSplit args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  settle(args.parent);
  const auto parent = communicators_.find(args.parent);
  if (parent == communicators_.end() || args.color < kNoColor) return CUDA_ERROR_INVALID_VALUE;
  Making* making = nullptr;
  if (current_.mode == Mode::kObjects) {
    if (!may_be_made(args.communicator)) return CUDA_ERROR_INVALID_VALUE;
  } else {
    making = begin(record, args.communicator);
    if (!making) return CUDA_ERROR_INVALID_VALUE;
  }
  const uint64_t number = ++parent->second.splits;
  parent->second.split = true;
  keep(parent->first, parent->second);
  if (!making) {
    const std::optional<CommunicatorReply> reply = was_made(record);
    if (!reply) return CUDA_SUCCESS;
    device::Place place = parent->second.place;
    place.group = derived(place.group, split_of(number, args.color));
    place.rank = reply->rank;
    place.ranks = reply->ranks;
    One one = one_of(record);
    one.join_time = parent->second.join_time;
    postpone(args.communicator, std::move(one), std::move(place));
    return CUDA_SUCCESS;
  }
  making->split = true;
  making->parent = parent->second.place;
  making->number = number;
  making->color = args.color;
  making->key = args.key;
  making->one.join_time = parent->second.join_time;
  making->place = making->parent;
  run(*making);
  return CUDA_SUCCESS;
}

// Who else has this colour, and which rank is this one's among them?
Result<> Collectives::choose_members(Making& making) {
  const device::Place& parent = making.parent;
  const std::string which = split_of(making.number);
  const Result<std::vector<std::string>> colors =
      meetings_.attend(meeting_of(parent.group, which), parent.rank, parent.ranks,
                       std::to_string(making.color) + " " + std::to_string(making.key), making.one.join_time);
  if (!colors) return colors.error();
  struct Member {
    int32_t key;
    uint32_t rank;
    auto operator<=>(const Member&) const = default;
  };
  std::vector<Member> members;
  for (uint32_t rank = 0; rank < colors->size(); ++rank) {
    int32_t color = 0, key = 0;
    if (std::sscanf((*colors)[rank].c_str(), "%d %d", &color, &key) != 2) return Error{"rank " + std::to_string(rank) + " names no colour"};
    if (color == making.color) members.push_back({key, rank});
  }
  std::sort(members.begin(), members.end());
  device::Place& place = making.place;
  if (making.color == kNoColor) {
    place.ranks = place.rank = 0;
    return {};
  }
  place.group = derived(parent.group, split_of(making.number, making.color));
  place.ranks = static_cast<uint32_t>(members.size());
  for (uint32_t i = 0; i < members.size(); ++i) {
    if (members[i].rank == parent.rank) place.rank = i;
  }
  return {};
}

Result<std::unique_ptr<device::Communicator>> Collectives::join(Making& making) {
  if (making.split) {
    if (const Result<> chosen = choose_members(making); !chosen) return chosen.error();
    if (making.place.ranks == 0) return std::unique_ptr<device::Communicator>();
  }
  making.place.address = meetings_.address();
  const device::Place& place = making.place;
  making.one.name = meeting_of(place.group, kJoin);
  if (making.one.incomplete || gone_.contains(making.one.name)) {
    making.one.incomplete = true;
    return Error{"other ranks are gone for good"};
  }
  membership_.joined(making.one.name, place.rank, place.ranks);
  const auto meet = [&](const std::string& offer) {
    return meetings_.attend(making.one.name, place.rank, place.ranks, offer, making.one.join_time);
  };
  if (making.ahead) return std::move(making.ahead);
  return device_.collectives().join(place, meet, [this] { failure(); });
}

void Collectives::answer(Making& making) {
  CommunicatorReply reply{};
  One& one = making.one;
  if (making.refused) {
    if (!one.name.empty()) membership_.past(one.name);
    reply = making.answered;
  } else if (making.made ? *making.made != nullptr : making.again) {
    reply.rank = making.place.rank;
    reply.ranks = making.place.ranks;
    one.place = making.place;
    if (making.made) {
      one.real = std::move(*making.made);
      if (const std::string how = one.real->how_joined(); !how.empty()) {
        log_(Level::kInfo, "a communicator of " + std::to_string(making.place.ranks) + " ranks: " + how);
      }
    } else {
      if (one.name.empty()) one.name = meeting_of(making.parent.group, kJoin);
      one.failure = Error{"it cannot be made again: " + making.made.why(), making.made.error().code};
    }
    One& added = communicators_[making.communicator] = std::move(one);
    keep(making.communicator, added);
    job_.header().communicators[journal::handle_index(making.communicator)].store(journal::kCollectiveSuccess);
  } else if (!making.made) {
    reply.result = journal::kCollectiveSystemError;
    std::snprintf(reply.text, sizeof(reply.text), "%s", making.made.why().c_str());
    log_(Level::kWarning, "rank " + std::to_string(making.place.rank) + " of a communicator cannot be made: " + making.made.why());
    membership_.past(one.name);
  }
  if (making.kept) return;
  const size_t bytes = std::min(sizeof(reply), making.reply_space.size());
  if (!making.answer.replied) std::memcpy(making.reply_space.data(), &reply, bytes);
  making.answer.bytes = static_cast<uint32_t>(bytes);
  making.answer.hash = XXH3_64bits(&reply, bytes);
  replies_.give(making.answer);
}

// For a snapshot: as a record that joins it, whatever made it.
void Collectives::keep(uint64_t handle, One& one) {
  Args_xmCommInit args{};
  args.communicator = handle;
  std::memcpy(args.group, one.place.group.data(), sizeof(args.group));
  args.rank = one.place.rank;
  args.ranks = one.place.ranks;
  args.join_time = static_cast<uint32_t>(one.join_time.count());
  args.operation_time = static_cast<uint32_t>(one.place.patience.count());
  args.splits = one.splits;
  args.incomplete = one.incomplete;
  std::string strings = one.place.library + '\0';
  for (const std::string& setting : one.place.settings) strings += setting + '\0';
  journal::RecordHeader header{};
  std::memcpy(static_cast<void*>(&header), one.header.data(), sizeof(header));
  header.op = static_cast<uint16_t>(Op::xmCommInit);
  std::vector<std::byte> stored(sizeof(header) + sizeof(args) + strings.size());
  std::memcpy(stored.data(), static_cast<const void*>(&header), sizeof(header));
  std::memcpy(stored.data() + sizeof(header), &args, sizeof(args));
  std::memcpy(stored.data() + sizeof(header) + sizeof(args), strings.data(), strings.size());
  one.creation = {};
  one.creation = objects_.records.keep(one.sequence, std::move(stored));
}

// In a replay, what follows the record that makes it does not wait for the answer.
void Collectives::settle(uint64_t communicator) {
  const auto found = std::find_if(making_.begin(), making_.end(), [&](const Making& one) { return one.communicator == communicator; });
  if (found == making_.end()) return;
  if (found->thread.joinable()) found->thread.join();
  if (!found->made && !found->again) return;  // poll() waits for the verdict
  answer(*found);
  making_.erase(found);
  report_joining();
}

// To begin an operation in it.
Collectives::One* Collectives::usable(uint64_t communicator) {
  settle(communicator);
  const auto found = communicators_.find(communicator);
  return found == communicators_.end() ? nullptr : &found->second;
}

// It could not be made again: a recovery of all ranks has been begun once more, and ends this server; or it is lost, and with it the
// process. Nothing is executed meanwhile, for it would compute without the other ranks.
void Collectives::await_verdict(One& one) {
  while (one.lost_at == 0 && !execution_.stopping()) {
    look_at(0, one, now_ns());
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  current_.over("a communicator of the process (rank " + std::to_string(one.place.rank) + " of " + std::to_string(one.place.ranks) +
                ") is lost, and its collectives cannot be done again: " + one.why());
}

bool Collectives::entangled() const {
  return !making_.empty() || !ended_.empty() || std::any_of(communicators_.begin(), communicators_.end(), [](const auto& one) {
    return one.second.collectives != 0 || !one.second.sends.empty() || one.second.split;
  });
}

GroupCounts Collectives::counts() const {
  GroupCounts counts;
  for (const auto& [handle, one] : communicators_) add_counts(one, counts);
  for (const auto& [name, before] : ended_) counts.insert(before.begin(), before.end());
  return counts;
}

void Collectives::add_counts(const One& one, GroupCounts& counts) const {
  counts[one.name] = one.collectives;
  for (const auto& [between, sends] : one.sends) {
    counts[one.name + ":" + std::to_string(between.first) + ">" + std::to_string(between.second)] = sends;
  }
}

bool Collectives::reached(const GroupCounts& targets) const {
  if (targets.empty()) return true;
  const GroupCounts counts = this->counts();
  return std::all_of(targets.begin(), targets.end(), [&](const auto& target) {
    const auto found = counts.find(target.first);
    if (found != counts.end()) return found->second >= target.second;
    // Of a pair of ranks: nothing was sent yet. Of a communicator: it is not made yet.
    return target.second == 0 && target.first.find(':') != std::string::npos;
  });
}

void Collectives::count(const CollectiveOperation& operation) {
  One& one = communicators_.at(operation.communicator);
  switch (static_cast<CollectiveKind>(operation.kind)) {
    case CollectiveKind::kSend: ++one.sends[{one.place.rank, operation.peer}]; return;
    case CollectiveKind::kReceive: ++one.sends[{operation.peer, one.place.rank}]; return;
    default: ++one.collectives;
  }
}

void Collectives::incomplete(const std::vector<std::string>& names, uint64_t round) {
  for (auto& [handle, one] : communicators_) {
    const bool lacks = std::find(names.begin(), names.end(), one.name) != names.end();
    job_.header().communicators_lacking[journal::handle_index(handle)].store(lacks ? round : 0);
    if (lacks) lack(handle, one);
  }
}

void Collectives::incomplete_as_in(uint64_t round) {
  for (auto& [handle, one] : communicators_) {
    if (job_.header().communicators_lacking[journal::handle_index(handle)].load() == round) lack(handle, one);
  }
}

void Collectives::lack(uint64_t handle, One& one) {
  if (one.incomplete) return;
  one.incomplete = true;
  keep(handle, one);
  incomplete_.push_back(handle);
}

void Collectives::complete_again() {
  for (const uint64_t handle : std::exchange(incomplete_, {})) {
    One& one = communicators_.at(handle);
    one.incomplete = false;
    keep(handle, one);
  }
}

void Collectives::snapshot_taken() {
  incomplete_.clear();
  for (auto& [handle, one] : communicators_) {
    one.collectives = 0;
    one.sends.clear();
    one.split = false;
  }
  for (const auto& [name, counts] : std::exchange(ended_, {})) membership_.past(name);
}

// All is done in them, and every rank does this at the same position.
void Collectives::renew(std::span<const uint64_t> attempts) {
  prepared_.use(attempts);
  for (auto& [handle, one] : communicators_) {
    auto real = prepared_.take(one.name, one.place.rank, [this] { failure(); });
    if (!real) continue;
    if (one.real) one.real->abort();
    one.real = std::move(real);
    one.failed_at = one.reported_at = 0;
  }
}

void Collectives::failure() {
  failed_.store(true);
  execution_.wake();
}

void Collectives::lost(const std::string& name) {
  {
    const std::lock_guard lock(lost_mutex_);
    lost_.insert(name);
  }
  failed_.store(true);
  execution_.wake();
}

bool Collectives::poll() {
  if (making_.empty() && communicators_.empty() && leaving_.empty()) [[likely]] return false;
  // To ask the device after each record would cost as much as a launch.
  const uint64_t now = now_ns();
  if (making_.empty() && !failed_.load() && now - polled_at_ < kPollEvery) return false;
  polled_at_ = now;
  bool worked = false;
  for (auto one = making_.begin(); one != making_.end();) {
    if (!one->done.load(std::memory_order_acquire)) {
      ++one;
      continue;
    }
    if (one->thread.joinable()) one->thread.join();
    if (!has_verdict(*one, now)) {
      ++one;
      continue;
    }
    answer(*one);
    one = making_.erase(one);
    worked = true;
  }
  report_joining();
  worked |= std::erase_if(leaving_, [](const auto& one) { return !one->unfinished(); }) != 0;
  outside_.collectives.store(unfinished());
  worked |= look_for_failures();
  outside_.ends_itself.store(!making_.empty() || std::any_of(communicators_.begin(), communicators_.end(), [](const auto& one) {
    return one.second.failed_at != 0;
  }));
  return worked;
}

// The program is answered that one cannot be made only if the daemon says that nobody recovers the rank that is missing. Otherwise a
// recovery of all ranks ends this server, and its record is executed again.
bool Collectives::has_verdict(Making& making, uint64_t now) {
  if (making.made || making.again) return true;
  const std::string& name = making.one.name.empty() ? meeting_of(making.parent.group, kJoin) : making.one.name;
  {
    const std::lock_guard lock(lost_mutex_);
    if (lost_.erase(name) != 0) return true;
  }
  if (making.reported_at == 0 || now - making.reported_at >= kReportEvery) {
    if (making.reported_at == 0) log_(Level::kInfo, "a communicator is not made: " + making.made.why());
    making.reported_at = now;
    // Where not even a first one can be made, the network was probably never there: the program is to hear that at once.
    const bool severed = making.made.error().code == device::kSevered && !communicators_.empty();
    daemon_.communicator_failed(name, making.place.rank, making.made.why(), severed);
  }
  return false;
}

bool Collectives::unfinished() {
  return !making_.empty() || !leaving_.empty() ||
         std::any_of(communicators_.begin(), communicators_.end(),
                     [](const auto& one) { return one.second.real && one.second.real->unfinished(); });
}

// Nothing that came after it in its stream has run, and nothing of it is let out.
bool Collectives::look_for_failures() {
  const uint64_t now = now_ns();
  if (!failed_.exchange(false) && now - looked_at_ < kFailuresEvery) return false;
  looked_at_ = now;
  for (auto& [handle, one] : communicators_) {
    // One that has never been used again harms nobody.
    if (!one.real && one.incomplete) continue;
    look_at(handle, one, now);
    if (one.lost_at == 0 || now - one.lost_at < kToEnd) continue;
    current_.over("a collective of rank " + std::to_string(one.place.rank) + " failed: " + one.why());
    return true;
  }
  return false;
}

void Collectives::look_at(uint64_t handle, One& one, uint64_t now) {
  const std::optional<Error> failed = one.failed();
  if (!failed || one.lost_at != 0) return;
  const std::string what = "a collective of rank " + std::to_string(one.place.rank) + " failed: " + failed->text;
  if (one.failed_at == 0) {
    one.failed_at = now;
    log_(Level::kInfo, what);
  }
  bool lost = false;
  {
    const std::lock_guard lock(lost_mutex_);
    lost = lost_.contains(one.name);
  }
  if (lost) {
    one.lost_at = now;
    if (handle != 0) job_.header().communicators[journal::handle_index(handle)].store(journal::kCollectiveRemoteError);
    log_(Level::kError, what);
  } else if (one.reported_at == 0 || now - one.reported_at >= kReportEvery) {
    one.reported_at = now;
    daemon_.communicator_failed(one.name, one.place.rank, failed->text, failed->code == device::kSevered);
  }
}

CUresult Collectives::on_xmCommEnd(Record& record) {
  Args_xmCommEnd args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  settle(args.communicator);
  const auto found = communicators_.find(args.communicator);
  if (found == communicators_.end()) return CUDA_SUCCESS;
  One& one = found->second;
  if (args.abort != 0 && one.real) one.real->abort();
  if (membership_.ended(one.name)) add_counts(one, ended_[one.name]);
  if (one.real) leaving_.push_back(std::move(one.real));
  communicators_.erase(found);
  return CUDA_SUCCESS;
}

CUresult Collectives::check(const CollectiveOperation& operation, const One& one) {
  journal::Extent extent{};
  const bool sound = operation.kind < static_cast<uint32_t>(CollectiveKind::kCount) &&
                     operation.type < static_cast<uint32_t>(DataType::kCount) &&
                     operation.reduction < static_cast<uint32_t>(Reduction::kCount) && operation.peer < one.place.ranks &&
                     operation.count != 0 && journal::extent_of(operation, one.place.rank, one.place.ranks, extent);
  if (!sound) return CUDA_ERROR_INVALID_VALUE;
  const uint64_t element = journal::size_of(static_cast<DataType>(operation.type));
  if (extent.sent && !addresses_.reachable(operation.send, extent.sent * element)) return CUDA_ERROR_INVALID_VALUE;
  if (extent.received && !addresses_.reachable(operation.receive, extent.received * element)) return CUDA_ERROR_INVALID_VALUE;
  const bool by_device = operation.reduction == static_cast<uint32_t>(Reduction::kScaledSumByDevice);
  return by_device && !addresses_.reachable(operation.scalar, element) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult Collectives::on_xmCommGroup(Record& record) {
  Args_xmCommGroup args;
  const std::span<const std::byte> payload = record.payload();
  if (!record.arguments(args) || args.operations == 0 || payload.size() != args.operations * sizeof(CollectiveOperation)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  // The program could change what lies in the ring.
  std::vector<CollectiveOperation> operations(args.operations);
  std::memcpy(operations.data(), payload.data(), payload.size());
  return begin_group(operations);
}

// Of each communicator all operations go into the stream of its first, which waits for the streams of the others, as they do for it.
CUresult Collectives::begin_group(std::span<CollectiveOperation> operations) {
  struct Streamed {
    uint32_t ordinal;
    CUstream main;
    std::vector<CUstream> others;
  };
  std::vector<device::Part> parts;
  std::vector<Streamed> streamed;
  std::map<uint64_t, size_t> which;
  for (const CollectiveOperation& operation : operations) {
    One* const one = usable(operation.communicator);
    CUstream stream = nullptr;
    if (!one || !streams_.translate(operation.stream, one->ordinal, &stream)) return CUDA_ERROR_INVALID_HANDLE;
    if (streams_.ordinal() != one->ordinal) return CUDA_ERROR_INVALID_HANDLE;
    if (const CUresult result = check(operation, *one); result != CUDA_SUCCESS) return result;
    if (!one->real) {
      await_verdict(*one);
      return CUDA_ERROR_NOT_SUPPORTED;
    }
    const auto [at, first] = which.try_emplace(operation.communicator, parts.size());
    if (first) {
      parts.push_back({one->real.get(), [this, ordinal = streams_.ordinal()] { contexts_.use(ordinal); }, stream, {}});
      streamed.push_back({streams_.ordinal(), stream, {}});
    }
    Streamed& of_it = streamed[at->second];
    if (stream != of_it.main && std::find(of_it.others.begin(), of_it.others.end(), stream) == of_it.others.end()) {
      of_it.others.push_back(stream);
    }
    parts[at->second].operations.push_back(operation);
  }
  const auto wait = [&](CUstream waiting, CUstream for_this) {
    CUevent mark = nullptr;
    CUresult result = driver_.cuEventCreate(&mark, CU_EVENT_DISABLE_TIMING);
    if (result == CUDA_SUCCESS) result = driver_.cuEventRecordWithFlags(mark, for_this, 0);
    if (result == CUDA_SUCCESS) result = driver_.cuStreamWaitEvent(waiting, mark, 0);
    if (mark) driver_.cuEventDestroy_v2(mark);
    return result;
  };
  const auto order = [&](bool before) {
    for (const Streamed& one : streamed) {
      contexts_.use(one.ordinal);
      for (const CUstream other : one.others) {
        const CUresult result = before ? wait(one.main, other) : wait(other, one.main);
        if (result != CUDA_SUCCESS) return result;
      }
    }
    return CUDA_SUCCESS;
  };
  if (const CUresult result = order(true); result != CUDA_SUCCESS) return result;
  for (const CollectiveOperation& operation : operations) count(operation);
  outside_.collectives.store(true);
  outside_.beginning.store(true);
  const device::Status begun = device_.collectives().run(parts);
  outside_.beginning.store(false);
  if (!begun) return device::result_of(begun);
  return order(false);
}

}  // namespace xmig::server
