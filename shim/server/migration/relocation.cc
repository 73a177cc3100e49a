#include "server/migration/relocation.h"

#include <fcntl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "server/clock.h"
#include "server/migration/pace.h"

namespace xmig::server {

using journal::kGranule;

namespace {

// For what is being copied a snapshot may have to wait, and work of the program. One that is about to be suspended waits soon
// anyway, and large batches are faster.
constexpr uint64_t kBatchTime = 80'000'000, kSettlingBatchTime = 10'000'000;  // ns
constexpr size_t kLargestBatch = 2048, kSettlingBatch = 256;                  // granules
constexpr int kPasses = 4;              // over what has changed since the one before
constexpr uint64_t kLong = 500'000'000;               // ns
constexpr uint64_t kPatienceForSnapshot = 1'000'000'000;  // ns
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
class Relocation::Transfer {
 public:
  Transfer(Relocation& all, Purpose purpose, Place to, uint64_t bytes_hint, std::vector<ipc::UniqueFd> room)
      : services_(all.services_),
        memory_(all.memory_),
        granules_(all.granules_),
        staging_(all.staging_),
        snapshots_(all.snapshots_),
        interrupts_(all.interrupts_),
        purpose_(purpose),
        to_(to),
        bytes_hint_(bytes_hint),
        room_(std::move(room)) {
    if (purpose == Purpose::kSettling) pace_ = Pace(kSettlingBatchTime, kSettlingBatch);
    if (to == Place::kHost) pace_ = Pace(kBatchTime, kLargestBatch, kLargestBatch);
    thread_ = std::thread([this] { run(); });
  }
  ~Transfer() {
    stopping_ = true;
    thread_.join();
  }
  Transfer(const Transfer&) = delete;

  Purpose purpose() const { return purpose_; }

 private:
  using Arrived = std::vector<std::pair<uint64_t, Staging::Staged>>;

  bool leaves(const ChunkState& chunk) const {
    return chunk.slot != 0 && (memory_.shadow.place(chunk.slot) != to_ || memory_.shadow.is_foreign(chunk.slot));
  }

  void run() {
    const uint64_t start = now_ns();
    granules_.staging_copy().spent();
    std::thread preparing;
    if (to_ != Place::kDevice) preparing = std::thread([this] { make_buffers(); });
    if (purpose_ != Purpose::kSettling) wait_for_snapshot();  // which there would copy all of it
    const uint64_t snapshot = now_ns();
    Result<> result = make_room();
    const uint64_t room = now_ns();
    if (preparing.joinable()) preparing.join();
    if (result) result = bring();
    if (stopping_) return;
    if (!result) return fail(result.why());
    const char* const where = purpose_ == Purpose::kSettling ? "to" : "off";
    if (const uint64_t end = now_ns(); end - start > kLong || purpose_ == Purpose::kSettling) {
      services_.log(Level::kInfo, "bringing " + std::to_string(done_ >> 20) + " MiB of the shadow " + where +
                                       " the device took " + in_ms(end - room) + ", after " + in_ms(snapshot - start) +
                                       " for a snapshot and " + in_ms(room - snapshot) + " for room; " +
                                       StagingCopy::text(granules_.staging_copy().spent()));
    }
    if (purpose_ == Purpose::kSuspension) return services_.daemon.prepared(static_cast<double>(now_ns() - start) / 1e6);
    staging_.wishes.place = to_;
    staging_.wishes.must_settle = true;
    interrupts_.request(Interrupts::kSnapshot);
  }

  void fail(const std::string& why) {
    staging_.drop();
    staging_.wishes.returns = true;
    staging_.wishes.must_settle = true;
    // After a move there is no other way: the snapshot looks for room once more, and says where it found none.
    if (purpose_ != Purpose::kSettling) services_.log(Level::kWarning, "the shadow stays where it is: " + why);
    if (purpose_ == Purpose::kSuspension) services_.daemon.suspend_failed(why);
    if (purpose_ == Purpose::kMoveThroughHost) services_.daemon.handover_failed(why);
    interrupts_.request(Interrupts::kSnapshot);  // the empty slabs go with it, and somebody may wait for one
  }

  // What no snapshot has yet would have to be copied while the program stands. If none is possible for so long, it has to go
  // without.
  void wait_for_snapshot() {
    const uint64_t before = interrupts_.snapshots_decided(), until = now_ns() + kPatienceForSnapshot;
    interrupts_.request(Interrupts::kSnapshot);
    while (!stopping_ && interrupts_.snapshots_decided() == before && now_ns() < until) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  // Beside the copying it would take several times as long.
  void make_buffers() {
    for (uint32_t ordinal = 0; ordinal < services_.contexts.count() && !stopping_; ++ordinal) {
      if (services_.contexts.is_open(ordinal)) granules_.staging_copy().make_ready(ordinal);
    }
  }

  // Slabs for everything that will have to go there. Files take their room now; memory does when it is written.
  Result<> make_room() {
    std::array<uint64_t, journal::kMaxDevices> wanted{};
    {
      const auto batch = staging_.begin_batch(stopping_);
      const std::lock_guard lock(memory_.mutex);
      for (const ChunkState& chunk : snapshots_.chunks()) {
        if (leaves(chunk)) wanted[ordinal_of_device_address(chunk.address)] += kGranule;
      }
    }
    uint64_t sum = 0;
    for (const uint64_t bytes : wanted) sum += bytes;
    if (bytes_hint_ > sum) {
      wanted[services_.contexts.home()] += (bytes_hint_ - sum) / kGranule * kGranule;
      sum = bytes_hint_;
    }
    total_ = sum;
    const auto available = to_ == Place::kHost ? available_memory() : std::nullopt;
    const uint64_t given = room_.size() * kPlainBytes;
    if (available && sum + kSpared > *available + given) {
      return Error{"host memory has no room: the shadow takes " + std::to_string(sum >> 20) + " MiB, and " +
            std::to_string((*available + given) >> 20) + " MiB are available"};
    }
    for (uint32_t ordinal = 0; ordinal < services_.contexts.count(); ++ordinal) {
      for (uint64_t left = wanted[ordinal]; left != 0 && !stopping_;) {
        const uint64_t bytes = std::min(left, to_ == Place::kDevice ? Shadow::kLargestSlab : kPlainBytes);
        if (Result<> made = make_slab(ordinal, bytes); !made) return made;
        left -= bytes;
      }
    }
    return {};
  }

  Result<> make_slab(uint32_t ordinal, uint64_t bytes) {
    std::optional<uint64_t> address;
    {
      const std::lock_guard lock(memory_.mutex);
      address = memory_.shadow.set_aside(ordinal, to_, bytes);
    }
    if (!address) return Error{"the shadow has no addresses left"};
    services_.contexts.use(ordinal);
    Result<Hosted> memory = make_memory(ordinal, *address, bytes);
    const std::lock_guard lock(memory_.mutex);
    if (memory) {
      services_.daemon.memory_add(*memory);
      memory_.shadow.add_held(*std::move(memory));
      return {};
    }
    memory_.shadow.give_up(*address);
    return memory.error();
  }

  Result<Hosted> make_memory(uint32_t ordinal, uint64_t address, uint64_t bytes) {
    constexpr HostedKind kKind = HostedKind::kShadow;
    constexpr auto kWhen = Physical::When::kBeforehand;
    Physical& physical = memory_.physical;
    if (to_ == Place::kDevice) return physical.create(kKind, ordinal, address, bytes, kWhen);
    if (to_ == Place::kFile) return physical.create_file(kKind, ordinal, address, bytes, kWhen);
    ipc::UniqueFd given;
    if (!room_.empty()) {
      given = std::move(room_.back());
      room_.pop_back();
    }
    return physical.create_memfd(kKind, ordinal, address, bytes, kWhen, std::move(given));
  }

  // Pass after pass over what the snapshots have changed meanwhile, as long as that makes it less.
  Result<> bring() {
    uint64_t reported = now_ns(), before = ~0ull;
    for (int pass = 0; pass < kPasses; ++pass) {
      uint64_t copied = 0;
      for (uint64_t from = 0;;) {
        const Result<uint64_t> reached = bring_batch(from, copied);
        if (!reached) return reached.error();
        if (*reached == 0 || stopping_) break;
        from = *reached;
        if (purpose_ != Purpose::kSuspension || now_ns() - reported < kProgressEvery) continue;
        reported = now_ns();
        services_.daemon.suspend_progress(std::min(done_, total_), total_);
      }
      if (stopping_ || copied == 0 || copied > before / 5 * 4) break;
      before = copied;
    }
    if (purpose_ == Purpose::kSuspension && !stopping_) services_.daemon.suspend_progress(total_, total_);
    return reserve();
  }

  // A snapshot may fill what is still empty, and then there is nobody to tell that there are no pages.
  Result<> reserve() {
    std::vector<Shadow::Room> rooms;
    {
      const std::lock_guard lock(memory_.mutex);
      rooms = memory_.shadow.held_rooms();
    }
    for (const Shadow::Room& room : rooms) {
      if (stopping_) break;
      if (::fallocate(room.at.fd, 0, static_cast<off_t>(room.at.offset), static_cast<off_t>(room.bytes)) == 0) continue;
      return Error{std::string("host memory has no room for the rest of the shadow: ") + std::strerror(errno)};
    }
    return {};
  }

  // Some chunks from this address on: the address behind them, 0 at the end.
  Result<uint64_t> bring_batch(uint64_t from, uint64_t& copied) {
    const auto batch = staging_.begin_batch(stopping_);
    const std::vector<ChunkState>& chunks = snapshots_.chunks();
    auto chunk = std::lower_bound(chunks.begin(), chunks.end(), from,
                                  [](const ChunkState& one, uint64_t address) { return one.address < address; });
    Granules::Moves moves;
    Arrived arrived;
    for (; chunk != chunks.end() && arrived.size() < pace_.size(); ++chunk) {
      const std::lock_guard hosted(memory_.mutex);
      if (!leaves(*chunk)) continue;
      const Staging::Staged* const known = staging_.find(chunk->address);
      if (known && known->hash == chunk->hash) continue;
      std::optional<uint64_t> slot;
      if (known) slot = known->slot;
      if (!slot) slot = memory_.shadow.allocate(ordinal_of_device_address(chunk->address), to_, 1, true);
      if (!slot) return Error{"there is no room for the rest of the shadow"};
      // Nobody may take the old hash for what is half overwritten.
      staging_.put(chunk->address, {0, *slot});
      granules_.add(moves, *slot, chunk->slot);
      arrived.push_back({chunk->address, {chunk->hash, *slot}});
    }
    const uint64_t start = now_ns();
    if (const Result<> copied = granules_.copy(moves, Granules::While::kRunning); !copied) return copied.error();
    pace_.took(arrived.size(), now_ns() - start);
    if (to_ == Place::kDevice && !look_at(arrived)) return Error{"the device could not hash its memory"};
    for (const auto& [address, staged] : arrived) staging_.put(address, staged);
    copied += arrived.size() * kGranule;
    done_ += arrived.size() * kGranule;
    return chunk == chunks.end() ? uint64_t{0} : chunk->address;
  }

  // What has arrived counts, not what was sent.
  bool look_at(Arrived& arrived) {
    std::vector<uint64_t> slots, hashes;
    for (const auto& [address, staged] : arrived) slots.push_back(staged.slot);
    if (!granules_.hash(slots, hashes, Granules::While::kRunning)) return false;
    for (size_t i = 0; i < arrived.size(); ++i) arrived[i].second.hash = hashes[i];
    return true;
  }

  const Services services_;
  ProcessMemory& memory_;
  Granules& granules_;
  Staging& staging_;
  const Snapshots& snapshots_;
  Interrupts& interrupts_;
  const Purpose purpose_;
  const Place to_;
  const uint64_t bytes_hint_;
  std::vector<ipc::UniqueFd> room_;  // slabs that were given for it
  Pace pace_{kBatchTime, kLargestBatch};
  uint64_t total_ = 0, done_ = 0;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

Relocation::Relocation(const Services& services, ProcessMemory& memory, Granules& granules, Staging& staging,
                       const Snapshots& snapshots, Interrupts& interrupts)
    : services_(services),
      memory_(memory),
      granules_(granules),
      staging_(staging),
      snapshots_(snapshots),
      interrupts_(interrupts) {}

Relocation::~Relocation() = default;

void Relocation::start(Purpose purpose, Place to, uint64_t bytes_hint, std::vector<ipc::UniqueFd> room) {
  const std::lock_guard lock(mutex_);
  transfer_.reset();
  staging_.drop();
  transfer_ = std::make_unique<Transfer>(*this, purpose, to, bytes_hint, std::move(room));
}

void Relocation::end(bool drop) {
  const std::lock_guard lock(mutex_);
  transfer_.reset();
  if (!drop) return;
  staging_.drop();
  staging_.wishes.returns = true;
}

bool Relocation::begin_settling() {
  settle_at_ = 0;
  const std::lock_guard lock(mutex_);
  if (transfer_) {
    interrupts_.request(Interrupts::kSnapshot);
    return false;
  }
  settling_ = true;
  transfer_ = std::make_unique<Transfer>(*this, Purpose::kSettling, Place::kDevice, 0, std::vector<ipc::UniqueFd>());
  return true;
}

void Relocation::end_settling() {
  if (!std::exchange(settling_, false)) return;
  const std::lock_guard lock(mutex_);
  if (!transfer_ || transfer_->purpose() != Purpose::kSettling) return;
  transfer_.reset();
  staging_.drop();
}

}  // namespace xmig::server
