// Suspension: a job whose state is its shadow, in host memory or in files, and nobody else's (docs/decisions/0009).
//
// Most of the way is made while the program runs: room for the shadow is made, then content is brought there, out of the
// shadow on the device and never out of live memory. The last cut copies what has changed since, straight to where it stays.
//
// Lock order: staging_mutex_ before hosted_mutex_.
#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <thread>

#include "server/clock.h"
#include "server/executor.h"

namespace xmig::server {

using journal::kGranule;

namespace {

constexpr size_t kBatch = 2048;  // granules that a cut may have to wait for
constexpr int kPasses = 4;     // over what has changed since the one before
constexpr uint64_t kProgressEvery = 200'000'000;     // ns
constexpr uint64_t kLong = 500'000'000;               // ns
constexpr uint64_t kPatienceForCut = 1'000'000'000;  // ns
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

// Brings what is in the device's slots to slots elsewhere, on threads of its own.
class Executor::Evacuation {
 public:
  Evacuation(Executor& executor, Place to, uint64_t bytes_hint, std::vector<ipc::UniqueFd> room, bool to_suspend)
      : executor_(executor), to_(to), bytes_hint_(bytes_hint), to_suspend_(to_suspend), room_(std::move(room)) {
    thread_ = std::thread([this] { run(); });
  }
  ~Evacuation() {
    stopping_ = true;
    thread_.join();
  }
  Evacuation(const Evacuation&) = delete;

 private:
  bool leaves(const ChunkState& chunk) const { return chunk.slot != 0 && executor_.shadow_.place(chunk.slot) != to_; }

  void run() {
    const uint64_t start = now_ns();
    std::string why;
    wait_for_cut();
    const uint64_t cut = now_ns();
    const bool has_room = make_room(why);
    const uint64_t room = now_ns();
    executor_.bounce_.spent();
    if (!has_room || !bring(why)) {
      if (stopping_) return;
      executor_.log_(Level::kWarning, "the shadow stays where it is: " + why);
      executor_.drop_staged();
      executor_.must_settle_ = true;
      if (to_suspend_) {
        executor_.daemon_.suspend_failed(why);
      } else {
        executor_.daemon_.handover_failed(why);
      }
      return executor_.request(kCut);  // the empty slabs go with it, and somebody may wait for one
    }
    if (stopping_) return;
    if (const uint64_t end = now_ns(); end - start > kLong) {
      executor_.log_(Level::kInfo, "bringing " + std::to_string(done_ >> 20) + " MiB of the shadow off the device took " +
                                       in_ms(end - room) + ", after " + in_ms(cut - start) + " for a cut and " +
                                       in_ms(room - cut) + " for room; " + Bounce::text(executor_.bounce_.spent()));
    }
    if (to_suspend_) {
      executor_.daemon_.prepared(static_cast<double>(now_ns() - start) / 1e6);
    } else {
      executor_.wanted_place_ = to_;
      executor_.must_settle_ = true;
      executor_.request(kCut);
    }
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
        const uint64_t bytes = std::min(left, kPlainBytes);
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
      address = executor_.shadow_.set_aside(ordinal, bytes);
    }
    if (!address) {
      why = "the shadow has no addresses left";
      return false;
    }
    executor_.contexts_.use(ordinal);
    ipc::UniqueFd given;
    if (!room_.empty()) {
      given = std::move(room_.back());
      room_.pop_back();
    }
    Hosted memory;
    const CUresult result =
        to_ == Place::kFile
            ? executor_.physical_.create_file(HostedKind::kShadow, ordinal, *address, bytes, memory, &why)
            : executor_.physical_.create_memfd(HostedKind::kShadow, ordinal, *address, bytes, memory, &why,
                                               std::move(given));
    const std::lock_guard lock(executor_.hosted_mutex_);
    if (result == CUDA_SUCCESS) {
      executor_.daemon_.memory_add(memory);
      executor_.shadow_.add_held(std::move(memory));
      return true;
    }
    executor_.shadow_.give_up(*address);
    return false;
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
        if (!to_suspend_ || now_ns() - told < kProgressEvery) continue;
        told = now_ns();
        executor_.daemon_.suspend_progress(std::min(done_, total_), total_);
      }
      if (stopping_ || copied == 0 || copied > before / 5 * 4) break;
      before = copied;
    }
    if (to_suspend_ && !stopping_) executor_.daemon_.suspend_progress(total_, total_);
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
    for (; chunk != chunks.end() && arrived.size() < kBatch; ++chunk) {
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
    if (!executor_.copy(moves, false, why)) return std::nullopt;
    for (const auto& [address, staged] : arrived) executor_.staged_[address] = staged;
    copied += arrived.size() * kGranule;
    done_ += arrived.size() * kGranule;
    return chunk == chunks.end() ? 0 : chunk->address;
  }

  Executor& executor_;
  const Place to_;
  const uint64_t bytes_hint_;
  const bool to_suspend_;
  std::vector<ipc::UniqueFd> room_;  // slabs that were given for it
  uint64_t total_ = 0, done_ = 0;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

// --- from the thread that listens to the daemon

void Executor::start_evacuation(Place to, uint64_t bytes_hint, std::vector<ipc::UniqueFd> room, bool to_suspend) {
  end_evacuation(true);
  const std::lock_guard lock(evacuation_mutex_);
  evacuation_ = std::make_shared<Evacuation>(*this, to, bytes_hint, std::move(room), to_suspend);
}

// Nothing is staged any more after this; what has been is kept for a cut, or given up.
void Executor::end_evacuation(bool drop) {
  const std::lock_guard lock(evacuation_mutex_);
  evacuation_.reset();
  if (drop) drop_staged();
}

void Executor::drop_staged() {
  const std::scoped_lock both(staging_mutex_, hosted_mutex_);
  for (const auto& [address, staged] : staged_) shadow_.free(staged.slot);
  staged_.clear();
  shadow_.unhold();  // empty slabs go with the next cut
  shadow_returns_ = true;
}

void Executor::keep_on_host(bool host) {
  if (host) {
    if (wanted_place_ == Place::kHost) return ask_for_cut();
    return start_evacuation(Place::kHost, 0, {}, false);
  }
  end_evacuation(true);
  wanted_place_ = Place::kDevice;
  shadow_returns_ = true;
  must_settle_ = true;
  ask_for_cut();
}

void Executor::prepare_suspend(PrepareSuspend prepare) {
  const Place to = prepare.to == SuspendTo::kFile ? Place::kFile : Place::kHost;
  end_evacuation(true);
  if (to == Place::kFile) {
    const std::lock_guard lock(hosted_mutex_);
    physical_.keep_files_in(std::move(prepare.directory));
  }
  suspend_to_ = to;
  start_evacuation(to, prepare.bytes_hint, std::move(prepare.room), true);
}

void Executor::abort_suspend() {
  end_evacuation(true);
  suspend_to_ = Place::kHost;
  must_settle_ = true;  // so that the room goes, too
  ask_for_cut();
}

// --- the executor

// A cut changes the slots that are copied from, and takes what is staged.
std::unique_lock<std::mutex> Executor::keep_staging_still() {
  cut_wants_staging_ = true;
  std::unique_lock lock(staging_mutex_);
  cut_wants_staging_ = false;
  return lock;
}

Place Executor::cut_place() const { return evict_shadow_ ? Place::kHost : place_; }

// The place that was prepared for this granule, and whether it needs copying still.
std::optional<uint64_t> Executor::staged(uint64_t address, uint64_t hash, bool& changed) const {
  const auto found = staged_.find(address);
  if (found == staged_.end() || shadow_.place(found->second.slot) != cut_place()) return std::nullopt;
  changed = found->second.hash != hash;
  return found->second.slot;
}

// A slot on the device instead of this one, if there is room.
std::optional<uint64_t> Executor::returned(const ChunkState& old, uint32_t ordinal, uint64_t& wanted) {
  if (!may_return(old.slot)) return std::nullopt;
  const auto slot = shadow_.allocate(ordinal, Place::kDevice, wanted, true);
  if (slot) {
    --wanted;
  } else {
    shadow_returns_ = false;  // no room: not asked for once for every granule
  }
  return slot;
}

// Committed: the slot is the cut's own.
void Executor::consume_staged(const ChunkState& chunk) {
  const auto found = staged_.find(chunk.address);
  if (found != staged_.end() && found->second.slot == chunk.slot) staged_.erase(found);
}

// Between two records, with an idle device.
void Executor::suspend(uint64_t stopped) {
  drain();
  if (redoing_) return fail_suspend("the job is being recovered");
  end_evacuation(false);
  wanted_place_ = suspend_to_.load();
  if (!take_cut("suspend")) {
    return fail_suspend(cut_trouble_.empty() ? "work of the device waits for the program" : cut_trouble_);
  }
  end_evacuation(true);
  uint64_t bytes = 0;
  for (const ChunkState& chunk : chunks_) {
    if (chunk.slot == 0) continue;
    bytes += kGranule;
    if (shadow_.place(chunk.slot) != suspend_to_.load()) return fail_suspend("a part of the shadow could not leave the device");
  }
  journal::JournalHeader& header = job_.header();
  header.state.store(static_cast<uint32_t>(journal::ServerState::kSuspended));
  header.server_pid.store(0);
  const double ms = static_cast<double>(now_ns() - stopped) / 1e6;
  park([=, this] { daemon_.suspended(cut_number_, position_, bytes, ms); });
  go_on();
  back_to_device();
  daemon_.continued(position_);
}

void Executor::back_to_device() {
  wanted_place_ = Place::kDevice;
  suspend_to_ = Place::kHost;
  shadow_returns_ = true;
  must_settle_ = true;
  requests_.fetch_or(kCut);
}

void Executor::fail_suspend(const std::string& why) {
  end_evacuation(true);
  back_to_device();
  daemon_.suspend_failed(why);
}

}  // namespace xmig::server
