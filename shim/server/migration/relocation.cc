// The shadow goes to another place while the program runs: off the device, for a suspension (docs/decisions/0009) or a move
// between devices that cannot reach each other; or to this device, after a move or a resumption (docs/decisions/0008).
//
// Room for it is made, then content is brought there, out of the shadow and never out of live memory. The next cut finds it
// there, and has to copy no more than what has changed since the last one.
//
// Lock order: relocation_mutex_, staging_mutex_, hosted_mutex_.
#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <thread>

#include "server/clock.h"
#include "server/executor/executor.h"
#include "server/migration/pace.h"

namespace xmig::server {

using journal::kGranule;

namespace {

// For what is being copied a cut may have to wait, and work of the program. One that is about to be suspended waits soon
// anyway, and large batches are faster.
constexpr uint64_t kBatchTime = 80'000'000, kSettlingBatchTime = 10'000'000;  // ns
constexpr size_t kLargestBatch = 2048, kSettlingBatch = 256;                  // granules
constexpr int kPasses = 4;              // over what has changed since the one before
constexpr uint64_t kLong = 500'000'000;               // ns
constexpr uint64_t kPatienceForCut = 1'000'000'000;  // ns
constexpr uint64_t kPatienceToSettle = 2'000'000'000;  // ns: then a cut that is due copies the rest itself
constexpr uint64_t kSpared = 256ull << 20;        // host memory that others are to have

// Of the machine: pages that can be had without swapping. Nothing if it does not say.
std::optional<uint64_t> available_memory() {
  std::ifstream file("/proc/meminfo");
  std::string name, unit;
  for (uint64_t kib = 0; file >> name >> kib >> unit;) {
    if (name == "MemAvailable:") return kib << 10;
  }
  return std::nullopt;
}

}  // namespace

// Brings what is in slots elsewhere to slots of one place, on threads of its own.
class Executor::Relocation {
 public:
  Relocation(Executor& executor, Purpose purpose, Place to, uint64_t bytes_hint, std::vector<ipc::UniqueFd> room)
      : executor_(executor), purpose_(purpose), to_(to), bytes_hint_(bytes_hint), room_(std::move(room)) {
    if (purpose == Purpose::kSettling) pace_ = Pace(kSettlingBatchTime, kSettlingBatch);
    if (to == Place::kHost) pace_ = Pace(kBatchTime, kLargestBatch, kLargestBatch);
    thread_ = std::thread([this] { run(); });
  }
  ~Relocation() {
    stopping_ = true;
    thread_.join();
  }
  Relocation(const Relocation&) = delete;

  Purpose purpose() const { return purpose_; }

 private:
  bool leaves(const ChunkState& chunk) const {
    return chunk.slot != 0 && (executor_.shadow_.place(chunk.slot) != to_ || executor_.shadow_.is_foreign(chunk.slot));
  }

  void run() {
    const uint64_t start = now_ns();
    std::string why;
    executor_.bounce_.spent();
    std::thread preparing;
    if (to_ != Place::kDevice) preparing = std::thread([this] { make_buffers(); });
    if (purpose_ != Purpose::kSettling) wait_for_cut();  // which there would copy all of it
    const uint64_t cut = now_ns();
    const bool has_room = make_room(why);
    const uint64_t room = now_ns();
    if (preparing.joinable()) preparing.join();
    if (!has_room || !bring(why)) {
      if (!stopping_) fail(why);
      return;
    }
    if (stopping_) return;
    const char* const where = purpose_ == Purpose::kSettling ? "to" : "off";
    if (const uint64_t end = now_ns(); end - start > kLong || purpose_ == Purpose::kSettling) {
      executor_.log_(Level::kInfo, "bringing " + std::to_string(done_ >> 20) + " MiB of the shadow " + where +
                                       " the device took " + in_ms(end - room) + ", after " + in_ms(cut - start) +
                                       " for a cut and " + in_ms(room - cut) + " for room; " +
                                       Bounce::text(executor_.bounce_.spent()));
    }
    if (purpose_ == Purpose::kSuspension) return executor_.daemon_.prepared(static_cast<double>(now_ns() - start) / 1e6);
    executor_.wanted_place_ = to_;
    executor_.must_settle_ = true;
    executor_.request(kCut);
  }

  void fail(const std::string& why) {
    executor_.drop_staged();
    executor_.shadow_returns_ = true;
    executor_.must_settle_ = true;
    // After a move there is no other way: the cut looks for room once more, and says where it found none.
    if (purpose_ != Purpose::kSettling) executor_.log_(Level::kWarning, "the shadow stays where it is: " + why);
    if (purpose_ == Purpose::kSuspension) executor_.daemon_.suspend_failed(why);
    if (purpose_ == Purpose::kMoveThroughHost) executor_.daemon_.handover_failed(why);
    executor_.request(kCut);  // the empty slabs go with it, and somebody may wait for one
  }

  // What no cut has yet would have to be copied while the program stands. If none is possible for so long, it has to go
  // without.
  void wait_for_cut() {
    const std::atomic<uint64_t>& decided = executor_.cuts_decided_;
    const uint64_t before = decided.load(), until = now_ns() + kPatienceForCut;
    executor_.request(kCut);
    while (!stopping_ && decided.load() == before && now_ns() < until) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  // Beside the copying it would take several times as long.
  void make_buffers() {
    for (uint32_t ordinal = 0; ordinal < executor_.contexts_.count() && !stopping_; ++ordinal) {
      executor_.bounce_.make_ready(ordinal);
    }
  }

  // Slabs for everything that will have to go there. Files take their room now; memory does when it is written.
  bool make_room(std::string& why) {
    std::array<uint64_t, journal::kMaxDevices> wanted{};
    {
      const std::scoped_lock lock(executor_.staging_mutex_, executor_.hosted_mutex_);
      for (const ChunkState& chunk : executor_.chunks_) {
        if (leaves(chunk)) wanted[ordinal_of_device_address(chunk.address)] += kGranule;
      }
    }
    uint64_t sum = 0;
    for (const uint64_t bytes : wanted) sum += bytes;
    if (bytes_hint_ > sum) {
      wanted[0] += (bytes_hint_ - sum) / kGranule * kGranule;
      sum = bytes_hint_;
    }
    total_ = sum;
    const auto available = to_ == Place::kHost ? available_memory() : std::nullopt;
    const uint64_t given = room_.size() * kPlainBytes;
    if (available && sum + kSpared > *available + given) {
      why = "host memory has no room: the shadow takes " + std::to_string(sum >> 20) + " MiB, and " +
            std::to_string((*available + given) >> 20) + " MiB are available";
      return false;
    }
    for (uint32_t ordinal = 0; ordinal < executor_.contexts_.count(); ++ordinal) {
      for (uint64_t left = wanted[ordinal]; left != 0 && !stopping_;) {
        const uint64_t bytes = std::min(left, to_ == Place::kDevice ? Shadow::kLargestSlab : kPlainBytes);
        if (!make_slab(ordinal, bytes, why)) return false;
        left -= bytes;
      }
    }
    return true;
  }

  bool make_slab(uint32_t ordinal, uint64_t bytes, std::string& why) {
    std::optional<uint64_t> address;
    {
      const std::lock_guard lock(executor_.hosted_mutex_);
      address = executor_.shadow_.set_aside(ordinal, to_, bytes);
    }
    if (!address) {
      why = "the shadow has no addresses left";
      return false;
    }
    executor_.contexts_.use(ordinal);
    Hosted memory;
    const CUresult result = make_memory(ordinal, *address, bytes, memory, why);
    const std::lock_guard lock(executor_.hosted_mutex_);
    if (result == CUDA_SUCCESS) {
      executor_.daemon_.memory_add(memory);
      executor_.shadow_.add_held(std::move(memory));
      return true;
    }
    executor_.shadow_.give_up(*address);
    return false;
  }

  CUresult make_memory(uint32_t ordinal, uint64_t address, uint64_t bytes, Hosted& memory, std::string& why) {
    constexpr HostedKind kKind = HostedKind::kShadow;
    Physical& physical = executor_.physical_;
    if (to_ == Place::kDevice) return physical.create(kKind, ordinal, address, bytes, memory, &why);
    if (to_ == Place::kFile) return physical.create_file(kKind, ordinal, address, bytes, memory, &why);
    ipc::UniqueFd given;
    if (!room_.empty()) {
      given = std::move(room_.back());
      room_.pop_back();
    }
    return physical.create_memfd(kKind, ordinal, address, bytes, memory, &why, std::move(given));
  }

  // Pass after pass over what the cuts have changed meanwhile, as long as that makes it less.
  bool bring(std::string& why) {
    uint64_t told = now_ns(), before = ~0ull;
    for (int pass = 0; pass < kPasses; ++pass) {
      uint64_t copied = 0;
      for (uint64_t from = 0;;) {
        const std::optional<uint64_t> reached = bring_batch(from, copied, why);
        if (!reached) return false;
        if (*reached == 0 || stopping_) break;
        from = *reached;
        if (purpose_ != Purpose::kSuspension || now_ns() - told < kProgressEvery) continue;
        told = now_ns();
        executor_.daemon_.suspend_progress(std::min(done_, total_), total_);
      }
      if (stopping_ || copied == 0 || copied > before / 5 * 4) break;
      before = copied;
    }
    if (purpose_ == Purpose::kSuspension && !stopping_) executor_.daemon_.suspend_progress(total_, total_);
    return reserve(why);
  }

  // A cut may fill what is still empty, and then there is nobody to tell that there are no pages.
  bool reserve(std::string& why) {
    std::vector<Shadow::Room> rooms;
    {
      const std::lock_guard lock(executor_.hosted_mutex_);
      rooms = executor_.shadow_.held_rooms();
    }
    for (const Shadow::Room& room : rooms) {
      if (stopping_) break;
      if (::fallocate(room.at.fd, 0, static_cast<off_t>(room.at.offset), static_cast<off_t>(room.bytes)) == 0) continue;
      why = std::string("host memory has no room for the rest of the shadow: ") + std::strerror(errno);
      return false;
    }
    return true;
  }

  // Some chunks from this address on: the address behind them, 0 at the end.
  std::optional<uint64_t> bring_batch(uint64_t from, uint64_t& copied, std::string& why) {
    while (executor_.cut_wants_staging_ && !stopping_) std::this_thread::sleep_for(std::chrono::microseconds(50));
    const std::lock_guard lock(executor_.staging_mutex_);
    const std::vector<ChunkState>& chunks = executor_.chunks_;
    auto chunk = std::lower_bound(chunks.begin(), chunks.end(), from,
                                  [](const ChunkState& one, uint64_t address) { return one.address < address; });
    Moves moves;
    std::vector<std::pair<uint64_t, Staged>> arrived;
    for (; chunk != chunks.end() && arrived.size() < pace_.size(); ++chunk) {
      const std::lock_guard hosted(executor_.hosted_mutex_);
      if (!leaves(*chunk)) continue;
      const auto known = executor_.staged_.find(chunk->address);
      if (known != executor_.staged_.end() && known->second.hash == chunk->hash) continue;
      std::optional<uint64_t> slot;
      if (known != executor_.staged_.end()) slot = known->second.slot;
      if (!slot) slot = executor_.shadow_.allocate(ordinal_of_device_address(chunk->address), to_, 1, true);
      if (!slot) {
        why = "there is no room for the rest of the shadow";
        return std::nullopt;
      }
      // Nobody may take the old hash for what is half overwritten.
      executor_.staged_[chunk->address] = {0, *slot};
      executor_.add_move(moves, *slot, chunk->slot);
      arrived.push_back({chunk->address, {chunk->hash, *slot}});
    }
    const uint64_t start = now_ns();
    if (!executor_.copy(moves, why, Executor::While::kRunning)) return std::nullopt;
    pace_.took(arrived.size(), now_ns() - start);
    if (to_ == Place::kDevice && !look_at(arrived)) {
      why = "the device could not hash its memory";
      return std::nullopt;
    }
    for (const auto& [address, staged] : arrived) executor_.staged_[address] = staged;
    copied += arrived.size() * kGranule;
    done_ += arrived.size() * kGranule;
    return chunk == chunks.end() ? 0 : chunk->address;
  }

  // What has arrived counts, not what was sent.
  bool look_at(std::vector<std::pair<uint64_t, Staged>>& arrived) {
    std::vector<uint64_t> slots, hashes;
    for (const auto& [address, staged] : arrived) slots.push_back(staged.slot);
    if (!executor_.hash_chunks(slots, hashes, Executor::While::kRunning)) return false;
    for (size_t i = 0; i < arrived.size(); ++i) arrived[i].second.hash = hashes[i];
    return true;
  }

  Executor& executor_;
  const Purpose purpose_;
  const Place to_;
  const uint64_t bytes_hint_;
  std::vector<ipc::UniqueFd> room_;  // slabs that were given for it
  Pace pace_{kBatchTime, kLargestBatch};
  uint64_t total_ = 0, done_ = 0;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

void Executor::start_relocation(Purpose purpose, Place to, uint64_t bytes_hint, std::vector<ipc::UniqueFd> room) {
  const std::lock_guard lock(relocation_mutex_);
  relocation_.reset();
  drop_staged();
  relocation_ = std::make_shared<Relocation>(*this, purpose, to, bytes_hint, std::move(room));
}

// Nothing is staged any more after this; what has been is kept for a cut, or given up.
void Executor::end_relocation(bool drop) {
  const std::lock_guard lock(relocation_mutex_);
  relocation_.reset();
  if (!drop) return;
  drop_staged();
  shadow_returns_ = true;
}

void Executor::drop_staged() {
  const std::scoped_lock both(staging_mutex_, hosted_mutex_);
  for (const auto& [address, staged] : staged_) shadow_.free(staged.slot);
  staged_.clear();
  shadow_.unhold();  // empty slabs go with the next cut
}

// --- the executor

// After a move or a resumption. Another relocation wants a cut anyway.
void Executor::start_settling() {
  settle_at_ = 0;
  const std::lock_guard lock(relocation_mutex_);
  if (relocation_) return request(kCut);
  settling_ = true;
  policy_.postpone(now_ns() + kPatienceToSettle);
  relocation_ = std::make_shared<Relocation>(*this, Purpose::kSettling, Place::kDevice, 0, std::vector<ipc::UniqueFd>());
}

// A cut has put the shadow where it belongs, or the program needs the room.
void Executor::end_settling() {
  if (!std::exchange(settling_, false)) return;
  const std::lock_guard lock(relocation_mutex_);
  if (!relocation_ || relocation_->purpose() != Purpose::kSettling) return;
  relocation_.reset();
  drop_staged();
}

// A cut changes the slots that are copied from, and takes what is staged.
std::unique_lock<std::mutex> Executor::keep_staging_still() {
  cut_wants_staging_ = true;
  std::unique_lock lock(staging_mutex_);
  cut_wants_staging_ = false;
  return lock;
}

// The place that was prepared for this granule, and whether it needs copying still.
std::optional<uint64_t> Executor::staged(uint64_t address, uint64_t hash, bool& changed) const {
  const auto found = staged_.find(address);
  if (found == staged_.end() || shadow_.place(found->second.slot) != cut_place()) return std::nullopt;
  changed = found->second.hash != hash;
  return found->second.slot;
}

// Committed: the slot is the cut's own.
void Executor::consume_staged(const ChunkState& chunk) {
  const auto found = staged_.find(chunk.address);
  if (found != staged_.end() && found->second.slot == chunk.slot) staged_.erase(found);
}

}  // namespace xmig::server
