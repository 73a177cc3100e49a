#include "server/cuda/handlers/collectives.h"

#include <pthread.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/hex.h"
#include "server/clock.h"

namespace xmig::server {
namespace {

using journal::CollectiveKind;
using journal::CollectiveOperation;
using journal::CommunicatorReply;
using journal::DataType;
using journal::Reduction;

constexpr uint64_t kFailuresEvery = 100'000'000;  // ns, at communicators that do not say by themselves that they have failed
// ns in which a program may end a communicator that has failed. It learns of that as with NCCL, if it asks (ncclCommGetAsyncError).
constexpr uint64_t kToEnd = 5'000'000'000;
constexpr uint64_t kPollEvery = 1'000'000;  // ns, whether collectives are done
constexpr int32_t kNoColor = -1;

// What ranks know of a group and nobody else does: the group of a part of it, or the name of a meeting.
device::GroupId derived(const device::GroupId& group, const std::string& how) {
  std::string text(reinterpret_cast<const char*>(group.data()), group.size());
  text += how;
  device::GroupId id{};
  for (size_t part = 0; part < 2; ++part) {
    const XXH128_hash_t hash = XXH3_128bits_withSeed(text.data(), text.size(), part);
    std::memcpy(id.data() + part * sizeof(hash), &hash, sizeof(hash));
  }
  return id;
}

// Not the group itself, which is the ranks' secret.
std::string meeting_of(const device::GroupId& group, const std::string& what) {
  return to_hex(derived(group, "meeting " + what));
}

std::vector<std::string> strings_of(std::span<const std::byte> payload) {
  std::vector<std::string> strings;
  const std::string text(reinterpret_cast<const char*>(payload.data()), payload.size());
  for (size_t at = 0, end; (end = text.find('\0', at)) != std::string::npos; at = end + 1) strings.push_back(text.substr(at, end - at));
  return strings;
}

}  // namespace

// A communicator that is being made, and who waits for it.
struct Collectives::Making {
  uint64_t communicator = 0;
  Answer answer;
  std::span<std::byte> reply_space;
  uint64_t sequence = 0;
  std::vector<std::byte> stored;
  device::Place place;
  uint32_t ordinal = 0;
  std::chrono::milliseconds join_time{};
  // Of a split.
  bool split = false;
  device::Place parent;
  uint64_t number = 0;
  int32_t color = 0, key = 0;

  // Written by its thread, before `done`.
  Result<std::unique_ptr<device::Communicator>> made = Error{"nothing was made"};
  std::atomic<bool> done{false};
  std::thread thread;
};

Collectives::Collectives(const Session& session, Streams& streams, Addresses& addresses, OutsideWaits& outside)
    : device_(session.device),
      driver_(session.device.driver()),
      contexts_(session.services.contexts),
      job_(session.services.job),
      log_(session.services.log),
      meetings_(session.services.meetings),
      objects_(session.objects),
      replies_(session.replies),
      current_(session.current),
      execution_(session.execution),
      streams_(streams),
      addresses_(addresses),
      outside_(outside) {}

Collectives::~Collectives() { destroy_all(); }

void Collectives::abort_all() {
  meetings_.close();
  for (auto& [handle, one] : communicators_) one.real->abort();
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

// A recovery, a move, a resumption: what follows would need the other ranks.
CUresult Collectives::refuse(Record& record) {
  const std::string why = "the process was in a communicator (" + std::string(record.info().name) +
                          "): the other ranks would not repeat their part of its collectives, so that it cannot be recovered alone";
  log_(Level::kError, why);  // the program may end before the daemon has written down why it was lost
  current_.over(why);
  return CUDA_ERROR_NOT_SUPPORTED;
}

Collectives::Making* Collectives::begin(Record& record, uint64_t communicator) {
  const bool free = journal::handle_is(communicator, journal::Kind::kCommunicator) &&
                    journal::handle_index(communicator) < journal::kMaxCommunicators && !communicators_.contains(communicator) &&
                    std::none_of(making_.begin(), making_.end(), [&](const Making& one) { return one.communicator == communicator; });
  if (!free) {
    current_.garbage("a new communicator has a number that is taken, or none");
    return nullptr;
  }
  Making& making = making_.emplace_back();
  making.communicator = communicator;
  making.answer = Answer::to(record);
  making.reply_space = record.reply_space();
  making.sequence = record.sequence();
  making.stored = record.stored();
  making.ordinal = record.header().ordinal;
  record.defer();
  outside_.collectives.store(true);
  return &making;
}

void Collectives::run(Making& making) {
  making.thread = std::thread([this, &making] {
    ::pthread_setname_np(::pthread_self(), "communicator");
    contexts_.use(making.ordinal);
    making.made = join(making);
    making.done.store(true, std::memory_order_release);
    execution_.wake();
  });
}

CUresult Collectives::on_xmCommInit(Record& record) {
  Args_xmCommInit args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (current_.mode != Mode::kRun || record.replied()) return refuse(record);
  if (args.ranks == 0 || args.ranks > journal::kMaxRanks || args.rank >= args.ranks) return CUDA_ERROR_INVALID_VALUE;
  Making* const making = begin(record, args.communicator);
  if (!making) return CUDA_ERROR_INVALID_VALUE;
  std::vector<std::string> strings = strings_of(record.payload());
  device::Place& place = making->place;
  static_assert(sizeof(args.group) == sizeof(place.group));
  std::memcpy(place.group.data(), args.group, sizeof(args.group));
  place.rank = args.rank;
  place.ranks = args.ranks;
  place.context = contexts_.real(making->ordinal);
  if (!strings.empty()) {
    place.library = std::move(strings[0]);
    place.settings.assign(std::make_move_iterator(strings.begin() + 1), std::make_move_iterator(strings.end()));
  }
  place.patience = std::chrono::milliseconds(args.operation_time);
  making->join_time = std::chrono::milliseconds(args.join_time);
  run(*making);
  return CUDA_SUCCESS;
}

CUresult Collectives::on_xmCommSplit(Record& record) {
  Args_xmCommSplit args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (current_.mode != Mode::kRun || record.replied()) return refuse(record);
  const auto parent = communicators_.find(args.parent);
  if (parent == communicators_.end() || args.color < kNoColor) return CUDA_ERROR_INVALID_VALUE;
  Making* const making = begin(record, args.communicator);
  if (!making) return CUDA_ERROR_INVALID_VALUE;
  making->split = true;
  making->parent = parent->second.place;
  making->number = ++parent->second.splits;
  making->color = args.color;
  making->key = args.key;
  making->join_time = parent->second.join_time;
  making->place = making->parent;
  run(*making);
  return CUDA_SUCCESS;
}

// Who else has this colour, and which rank is this one's among them?
Result<> Collectives::choose_members(Making& making) {
  const device::Place& parent = making.parent;
  const std::string which = "split " + std::to_string(making.number);
  const Result<std::vector<std::string>> colors =
      meetings_.attend(meeting_of(parent.group, which), parent.rank, parent.ranks,
                       std::to_string(making.color) + " " + std::to_string(making.key), making.join_time);
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
  place.group = derived(parent.group, which + " colour " + std::to_string(making.color));
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
  const device::Place& place = making.place;
  const auto meet = [&](const std::string& offer) {
    return meetings_.attend(meeting_of(place.group, "join"), place.rank, place.ranks, offer, making.join_time);
  };
  return device_.collectives().join(place, meet, [this] {
    failed_.store(true);
    execution_.wake();
  });
}

void Collectives::answer(Making& making) {
  CommunicatorReply reply{};
  if (!making.made) {
    reply.result = journal::kCollectiveSystemError;
    std::snprintf(reply.text, sizeof(reply.text), "%s", making.made.why().c_str());
    log_(Level::kWarning, "rank " + std::to_string(making.place.rank) + " of a communicator cannot be made: " + making.made.why());
  } else if (*making.made) {
    reply.rank = making.place.rank;
    reply.ranks = making.place.ranks;
    One& one = communicators_[making.communicator];
    one.real = std::move(*making.made);
    one.place = making.place;
    one.ordinal = making.ordinal;
    one.join_time = making.join_time;
    one.creation = objects_.records.keep(making.sequence, std::move(making.stored));
    job_.header().communicators[journal::handle_index(making.communicator)].store(journal::kCollectiveSuccess);
  }
  const size_t bytes = std::min(sizeof(reply), making.reply_space.size());
  std::memcpy(making.reply_space.data(), &reply, bytes);
  making.answer.bytes = static_cast<uint32_t>(bytes);
  making.answer.hash = XXH3_64bits(&reply, bytes);
  replies_.give(making.answer);
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
    one->thread.join();
    answer(*one);
    one = making_.erase(one);
    worked = true;
  }
  worked |= std::erase_if(leaving_, [](const auto& one) { return !one->unfinished(); }) != 0;
  outside_.collectives.store(unfinished());
  return look_for_failures() || worked;
}

bool Collectives::unfinished() {
  return !making_.empty() || !leaving_.empty() ||
         std::any_of(communicators_.begin(), communicators_.end(), [](const auto& one) { return one.second.real->unfinished(); });
}

// Nothing that came after it in its stream has run, and nothing of it is let out.
bool Collectives::look_for_failures() {
  const uint64_t now = now_ns();
  if (!failed_.exchange(false) && now - looked_at_ < kFailuresEvery) return false;
  looked_at_ = now;
  for (auto& [handle, one] : communicators_) {
    const std::string why = one.real->failure();
    if (why.empty()) continue;
    const std::string what = "a collective of rank " + std::to_string(one.place.rank) + " failed: " + why;
    if (one.failed_at == 0) {
      one.failed_at = now;
      job_.header().communicators[journal::handle_index(handle)].store(journal::kCollectiveRemoteError);
      log_(Level::kError, what);
    }
    if (now - one.failed_at < kToEnd) continue;
    current_.over(what);
    return true;
  }
  return false;
}

CUresult Collectives::on_xmCommEnd(Record& record) {
  Args_xmCommEnd args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  const auto found = communicators_.find(args.communicator);
  if (found == communicators_.end()) return CUDA_SUCCESS;
  if (args.abort != 0) found->second.real->abort();
  leaving_.push_back(std::move(found->second.real));
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
    const auto found = communicators_.find(operation.communicator);
    CUstream stream = nullptr;
    if (found == communicators_.end() || !streams_.translate(operation.stream, found->second.ordinal, &stream)) {
      return CUDA_ERROR_INVALID_HANDLE;
    }
    if (streams_.ordinal() != found->second.ordinal) return CUDA_ERROR_INVALID_HANDLE;
    if (const CUresult result = check(operation, found->second); result != CUDA_SUCCESS) return result;
    const auto [at, first] = which.try_emplace(operation.communicator, parts.size());
    if (first) {
      parts.push_back({found->second.real.get(), [this, ordinal = streams_.ordinal()] { contexts_.use(ordinal); }, stream, {}});
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
  outside_.collectives.store(true);
  if (const device::Status begun = device_.collectives().run(parts); !begun) return device::result_of(begun);
  return order(false);
}

}  // namespace xmig::server
