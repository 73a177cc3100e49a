#include "server/cuda/objects/prepared_communicators.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "ops.h"
#include "server/clock.h"
#include "server/cuda/objects/communicator_place.h"
#include "server/records/record.h"

namespace xmig::server {
namespace {

constexpr std::chrono::seconds kToEnd{2};            // for what a library is doing when the server ends
constexpr std::chrono::seconds kMostToJoin{20};      // the others are wanted at the same moment
constexpr uint64_t kMostForFirst = 20'000'000'000;  // ns, until the first operation is done

}  // namespace

// A library may wait for a rank that is gone, with nothing to end that: nothing of this process is of use to anybody then.
PreparedCommunicators::~PreparedCommunicators() {
  meetings_.close();
  {
    std::unique_lock lock(mutex_);
    closed_ = true;
    changed_.notify_all();
    if (!changed_.wait_for(lock, kToEnd, [&] { return !running_; })) ::_exit(0);
  }
  if (thread_.joinable()) thread_.join();
}

void PreparedCommunicators::prepare(uint64_t attempt, const std::string& name, const SnapshotContent& content) {
  Attempt wanted{attempt, name, {}, {}};
  for (const std::span<const std::byte> stored : content.objects) {
    Record record;
    if (!record.load_stored(stored)) break;
    Args_xmCommInit args;
    if (record.header().op != static_cast<uint16_t>(Op::xmCommInit) || !record.arguments(args)) continue;
    if (record.header().ordinal >= contexts_.count() || args.ranks == 0 || args.ranks > journal::kMaxRanks || args.rank >= args.ranks) continue;
    device::Place place = place_of(args, record.payload());
    if (meeting_of(place.group, kJoin) != name) continue;
    place.context = contexts_.real(record.header().ordinal);
    place.ordinal = record.header().ordinal;
    place.address = meetings_.address();
    wanted.meeting = meeting_of(place.group, "attempt " + std::to_string(attempt));
    const auto patience = std::min(std::chrono::milliseconds(args.join_time), std::chrono::milliseconds(kMostToJoin));
    wanted.ranks.push_back({std::move(place), record.header().ordinal, patience});
  }
  if (wanted.ranks.empty()) return daemon_.communicator_prepared(attempt, 0, "the last snapshot has no such communicator");
  const std::lock_guard lock(mutex_);
  wanted_.push_back(std::move(wanted));
  changed_.notify_all();
  if (running_) return;
  running_ = true;
  thread_ = std::thread([this] { run(); });
}

void PreparedCommunicators::forget(uint64_t attempt) {
  std::map<uint64_t, Attempt>::node_type dropped;
  std::unique_lock lock(mutex_);
  std::erase_if(wanted_, [&](const Attempt& one) { return one.number == attempt; });
  dropped = ready_.extract(attempt);
  if (making_ == attempt) {
    forgotten_ = true;
    meetings_.look_again();
  }
  lock.unlock();
  if (dropped) {
    for (const Rank& rank : dropped.mapped().ranks) rank.real->abort();
  }
}

void PreparedCommunicators::use(std::span<const uint64_t> attempts) {
  const std::lock_guard lock(mutex_);
  for (const uint64_t number : attempts) {
    auto found = ready_.extract(number);
    if (!found) {
      log_(Level::kError, "a communicator that the other ranks use now (attempt " + std::to_string(number) +
                              ") is not there: the server ends, and all ranks are recovered");
      ::_exit(1);
    }
    usable_[found.mapped().name] = std::move(found.mapped());
  }
}

void PreparedCommunicators::forget_all() {
  std::map<uint64_t, Attempt> rest;
  {
    const std::lock_guard lock(mutex_);
    rest.swap(ready_);
    wanted_.clear();
    forgotten_ = true;
    meetings_.look_again();
  }
  for (const auto& [number, one] : rest) {
    for (const Rank& rank : one.ranks) rank.real->abort();
  }
}

void PreparedCommunicators::drop_unused() {
  std::map<std::string, Attempt> unused;
  {
    const std::lock_guard lock(mutex_);
    unused.swap(usable_);
  }
  for (const auto& [name, one] : unused) {
    for (const Rank& rank : one.ranks) {
      if (rank.real) rank.real->abort();
    }
  }
}

std::unique_ptr<device::Communicator> PreparedCommunicators::take(const std::string& name, uint32_t rank, std::function<void()> failed) {
  const std::lock_guard lock(mutex_);
  const auto found = usable_.find(name);
  if (found == usable_.end()) return nullptr;
  for (Rank& one : found->second.ranks) {
    if (one.place.rank != rank || !one.real) continue;
    const std::lock_guard hearing(one.failure->mutex);
    one.failure->hears = std::move(failed);
    if (one.failure->happened) one.failure->hears();
    return std::move(one.real);
  }
  return nullptr;
}

void PreparedCommunicators::run() {
  ::pthread_setname_np(::pthread_self(), "communicators");
  std::unique_lock lock(mutex_);
  while (!closed_) {
    if (wanted_.empty()) {
      changed_.wait(lock);
      continue;
    }
    Attempt attempt = std::move(wanted_.front());
    wanted_.pop_front();
    making_ = attempt.number;
    forgotten_ = false;
    lock.unlock();
    const uint64_t before = free_bytes(attempt);
    const Result<> made = make(attempt);
    const uint64_t after = free_bytes(attempt);
    lock.lock();
    making_ = 0;
    const bool kept = made && !forgotten_ && !closed_;
    const uint64_t number = attempt.number;
    if (kept) ready_[number] = std::move(attempt);
    lock.unlock();
    if (!kept) {
      for (const Rank& rank : attempt.ranks) {
        if (rank.real) rank.real->abort();
      }
    }
    daemon_.communicator_prepared(number, kept && before > after ? before - after : 0, kept ? "" : made ? "it is not wanted any more" : made.why());
    lock.lock();
  }
  running_ = false;
  changed_.notify_all();
}

Result<> PreparedCommunicators::make(Attempt& attempt) {
  std::vector<Result<>> results(attempt.ranks.size());
  std::vector<std::thread> others;
  const auto join_one = [&](size_t which) { results[which] = join(attempt, attempt.ranks[which]); };
  for (size_t which = 1; which < attempt.ranks.size(); ++which) others.emplace_back(join_one, which);
  join_one(0);
  for (std::thread& other : others) other.join();
  for (const Result<>& result : results) {
    if (!result) return result;
  }
  return warm(attempt);
}

Result<> PreparedCommunicators::join(Attempt& attempt, Rank& rank) {
  contexts_.use(rank.ordinal);
  const device::Place& place = rank.place;
  const auto meet = [&](const std::string& offer) {
    return meetings_.attend(attempt.meeting, place.rank, place.ranks, offer, rank.join_time, [this] { return forgotten_.load(); });
  };
  Result<std::unique_ptr<device::Communicator>> joined = device_.collectives().join(place, meet, [failure = rank.failure] {
    const std::lock_guard lock(failure->mutex);
    failure->happened = true;
    if (failure->hears) failure->hears();
  });
  if (!joined) return joined.error();
  rank.real = std::move(*joined);
  return {};
}

Result<> PreparedCommunicators::warm(Attempt& attempt) {
  std::vector<device::Part> parts;
  for (Rank& rank : attempt.ranks) {
    parts.push_back({rank.real.get(), [this, ordinal = rank.ordinal] { contexts_.use(ordinal); }, nullptr, {}});
  }
  const uint64_t deadline = now_ns() + kMostForFirst;
  return device_.collectives().warm(parts, [&] { return now_ns() > deadline || given_up(attempt.number); });
}

bool PreparedCommunicators::given_up(uint64_t attempt) {
  const std::lock_guard lock(mutex_);
  return closed_ || (making_ == attempt && forgotten_);
}

// Of the devices of its ranks. Others take and give at the same time: what it says of a communicator is a good guess.
uint64_t PreparedCommunicators::free_bytes(const Attempt& attempt) {
  uint64_t all = 0;
  std::set<uint32_t> ordinals;
  for (const Rank& rank : attempt.ranks) ordinals.insert(rank.ordinal);
  for (const uint32_t ordinal : ordinals) {
    contexts_.use(ordinal);
    size_t free = 0, total = 0;
    if (device_.driver().cuMemGetInfo_v2(&free, &total) == CUDA_SUCCESS) all += free;
  }
  return all;
}

}  // namespace xmig::server
