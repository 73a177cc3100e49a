#include "server/snapshot/snapshots.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <utility>

#include "ipc/whole.h"
#include "journal/futex.h"
#include "server/clock.h"

namespace xmig::server {

using journal::kGranule;

namespace {

constexpr uint64_t kTrimShadowEvery = 5'000'000;

}  // namespace

void Snapshots::begin(const Moment& moment) {
  services_.job.header().committing.store(moment.position + 1, std::memory_order_seq_cst);
  services_.injector.at_snapshot(0, moment.sequence);
}

Result<Snapshots::Taken> Snapshots::take(const Moment& moment, bool gradually) {
  if (Result<> prepared = prepare(moment); !prepared) return prepared.error();
  return finish(moment, gradually);
}

Result<> Snapshots::prepare(const Moment& moment) {
  std::unique_lock still = staging_.keep_still();
  place_ = staging_.wishes.place;
  Taken taken;
  Draft draft{.granules = memory_.live.listed().granules};
  hash(draft, moment, taken.report);

  const std::lock_guard lock(memory_.mutex);
  const uint64_t placing = now_ns();
  Result<> possible = place(draft);
  if (draft.fresh != 0) taken.once_ns = now_ns() - placing;
  if (possible) {
    describe(draft, moment);
    possible = reserve(draft);
  }
  if (!possible) {
    give_up(draft);
    services_.job.header().committing.store(0, std::memory_order_seq_cst);
    return possible;
  }
  prepared_.emplace(std::move(draft), std::move(taken), std::move(still));
  return {};
}

void Snapshots::abandon() {
  const std::lock_guard lock(memory_.mutex);
  give_up(prepared_->draft);
  prepared_.reset();
  services_.job.header().committing.store(0, std::memory_order_seq_cst);
}

// From here on nothing may fail for want of something.
Snapshots::Taken Snapshots::finish(const Moment& moment, bool gradually) {
  Prepared prepared = *std::exchange(prepared_, std::nullopt);
  Draft& draft = prepared.draft;
  Taken& taken = prepared.taken;
  const std::lock_guard lock(memory_.mutex);
  const uint64_t copying = now_ns();
  copy(draft, moment);
  const uint64_t copied_after = now_ns() - copying;
  taken.report.copy_ms = static_cast<double>(copied_after) / 1e6;
  if (draft.fresh != 0) taken.once_ns += copied_after * draft.fresh / draft.changed.size();
  commit(draft, moment, gradually);
  report(draft, moment, taken.report);
  trim();
  taken.end = now_ns();
  return std::move(taken);
}

void Snapshots::hash(Draft& draft, const Moment& moment, SnapshotReport& report) {
  const std::vector<uint64_t>& granules = draft.granules;
  {
    const std::lock_guard lock(memory_.mutex);
    draft.unseen = likely_changed(granules);
  }
  std::vector<uint64_t> seen, seen_hashes;
  for (size_t i = 0; i < granules.size(); ++i) {
    if (!draft.unseen[i]) seen.push_back(granules[i]);
  }
  const uint64_t hashing = now_ns();
  if (!granules_.hash(seen, seen_hashes)) {
    services_.faults.give_up(moment.sequence, "the device could not hash its memory");
  }
  report.hash_ms = static_cast<double>(now_ns() - hashing) / 1e6;
  report.hashed_bytes = seen.size() * kGranule;
  draft.hashes.resize(granules.size());
  for (size_t i = 0, known = 0; i < granules.size(); ++i) {
    if (!draft.unseen[i]) draft.hashes[i] = seen_hashes[known++];
  }
}

// Each granule gets a place: the one that it has, or another, or none if it is zeros.
Result<> Snapshots::place(Draft& draft) {
  const std::vector<uint64_t>& granules = draft.granules;
  const std::optional<uint64_t> zeros_hash = this->zeros_hash();
  draft.wanted = slots_wanted(granules, draft.hashes);
  std::vector<ChunkState>& next = draft.content.chunks;
  next.reserve(granules.size());
  const auto give_back = [&](const ChunkState& chunk) {
    if (chunk.slot != 0) draft.given_back.push_back(chunk.slot);
  };
  auto old = chunks_.cbegin();
  for (size_t i = 0; i < granules.size(); ++i) {
    const uint64_t address = granules[i], hash = draft.hashes[i];
    for (; old != chunks_.cend() && old->address < address; ++old) give_back(*old);
    if (draft.unseen[i]) {
      draft.changed.push_back({next.size(), old->hash});
      next.push_back({address, 0, old->slot});
      ++old;
      continue;
    }
    const bool zeros = hash == zeros_hash;
    Placed placed;
    if (old != chunks_.cend() && old->address == address) {
      placed = keep_or_move(draft, *old, hash, zeros);
      if (placed.slot != old->slot) give_back(*old);
      ++old;
    }
    if (zeros) {
      next.push_back({address, hash, 0});
      continue;
    }
    if (!placed.slot) placed.slot = new_slot(draft, ordinal_of_device_address(address));
    if (!placed.slot) {
      return Error{place_now() == Place::kFile ? "the directory has no room for the shadow"
                                               : "there is no memory for the shadow, neither on the device nor on the host"};
    }
    if (placed.differs) draft.changed.push_back({next.size(), placed.before});
    next.push_back({address, hash, *placed.slot});
  }
  for (; old != chunks_.cend(); ++old) give_back(*old);
  return {};
}

// Of a granule that the last snapshot has, too: the slot that it has there, or what was staged for it, or one nearer to the device.
// Nothing if it needs another, or none.
Snapshots::Placed Snapshots::keep_or_move(Draft& draft, const ChunkState& old, uint64_t hash, bool zeros) {
  const bool leaves = zeros || old.slot == 0 || must_leave(old.slot, old.hash != hash);
  const bool returns = !leaves && may_return(old.slot);
  Placed placed;
  if (!zeros && (leaves || returns)) {
    placed.slot = staging_.prepared(old.address, hash, place_now(), placed.differs);
  }
  if (leaves || placed.slot) return placed;
  const uint32_t ordinal = ordinal_of_device_address(old.address);
  if (const auto nearer = returns ? returned(ordinal, draft.wanted[ordinal]) : std::nullopt) {
    draft.taken.push_back(*nearer);
    return {nearer, std::nullopt, true};
  }
  return {old.slot, old.hash, old.hash != hash};
}

std::optional<uint64_t> Snapshots::new_slot(Draft& draft, uint32_t ordinal) {
  uint64_t& wanted = draft.wanted[ordinal];
  std::optional<uint64_t> slot;
  // While the shadow returns, what is new does not go where the rest is leaving.
  if (staging_.wishes.returns) slot = memory_.shadow.allocate(ordinal, place_now(), wanted, true);
  if (!slot) slot = memory_.shadow.allocate(ordinal, place_now(), wanted);
  --wanted;
  if (!slot) return slot;
  draft.taken.push_back(*slot);
  ++draft.fresh;
  return slot;
}

void Snapshots::describe(Draft& draft, const Moment& moment) {
  SnapshotContent& content = draft.content;
  content.number = number_ + 1;
  content.position = moment.position;
  content.sequence = moment.sequence;
  content.failures = moment.failures;
  content.memory = memory_.hosting.extents();
  content.live = memory_.live.listed().ranges;
  moment.objects.describe(content, draft.images);
  content.images = memory_.images.states(draft.images);
}

Result<> Snapshots::reserve(const Draft& draft) {
  const uint64_t bytes = serialised_bytes(draft.content);
  if (reserve_snapshot_file(file_of(draft), bytes)) return {};
  return Error{"there is no space for " + std::to_string(bytes) + " bytes in the snapshot's file: " + std::strerror(errno)};
}

void Snapshots::give_up(const Draft& draft) {
  for (const uint64_t mine : draft.taken) memory_.shadow.free(mine);
  memory_.shadow.trim();
}

void Snapshots::copy(Draft& draft, const Moment& moment) {
  const bool copied = fill_shadow(draft.content.chunks, draft.changed, moment.sequence);
  if (!copied || !ipc::write_all(file_of(draft), serialise(draft.content))) {
    services_.faults.give_up(moment.sequence, "a snapshot could not be written");
  }
}

void Snapshots::commit(Draft& draft, const Moment& moment, bool gradually) {
  SnapshotContent& content = draft.content;
  journal::JournalHeader& header = services_.job.header();
  header.snapshot.store(content.number << 1 | (content.number & 1), std::memory_order_seq_cst);
  header.snapshot_position.store(moment.position, std::memory_order_relaxed);
  header.committing.store(0, std::memory_order_seq_cst);

  number_ = content.number;
  position_ = moment.position;
  changed_.clear();
  for (const auto& [number, before] : draft.changed) {
    if (before && *before != content.chunks[number].hash) changed_.push_back(content.chunks[number].address);
  }
  note_written(draft);
  lacks_lost_ = false;
  chunks_ = std::move(content.chunks);
  for (const uint64_t slot : draft.given_back) memory_.shadow.free(slot);
  for (const ChunkState& chunk : chunks_) staging_.consume(chunk);
  staging_.wishes.returns = false;
  staging_.wishes.must_settle = false;
  memory_.copy_log.release(position_, evict_ || place_ != Place::kDevice);
  memory_.hosting.release_dead();
  services_.sharing.quota().refresh(moment.sequence);
  memory_.images.release_unneeded(draft.images);
  if (gradually) {
    trim_shadow_at_ = now_ns();  // all that came with a move: too much for one stop
  } else {
    memory_.shadow.trim();
  }
}

// What has the slot that it had, and was not copied there, is as old as it was.
void Snapshots::note_written(const Draft& draft) {
  const std::vector<ChunkState>& next = draft.content.chunks;
  std::vector<uint64_t> written(next.size(), draft.content.number);
  for (size_t i = 0, old = 0; i < next.size() && old < chunks_.size();) {
    if (next[i].address == chunks_[old].address) {
      if (next[i].slot == chunks_[old].slot) written[i] = written_[old];
      ++i, ++old;
    } else {
      next[i].address < chunks_[old].address ? ++i : ++old;
    }
  }
  for (const Changed& changed : draft.changed) written[changed.chunk] = draft.content.number;
  written_ = std::move(written);
}

void Snapshots::report(const Draft& draft, const Moment& moment, SnapshotReport& report) const {
  report.number = number_;
  report.position = position_;
  report.sequence = moment.sequence;
  report.chunks = draft.granules.size();
  report.copied_bytes = draft.changed.size() * kGranule;
  report.live_bytes = memory_.live.bytes();
  report.journal_bytes = position_ - trimmed_;
  report.objects = draft.content.objects.size();
  report.off_device = place_ != Place::kDevice;
}

int Snapshots::file_of(const Draft& draft) const { return services_.job.fds().snapshot[draft.content.number & 1].get(); }

// What a granule of zeros hashes to. Nothing, if there is no memory in which to find out.
std::optional<uint64_t> Snapshots::zeros_hash() {
  if (zeros_hash_) return zeros_hash_;
  const uint32_t home = services_.contexts.home();
  const auto slot = memory_.shadow.allocate(home, Place::kDevice, 1, true);  // where kernels reach it in any case
  if (!slot) return std::nullopt;
  services_.contexts.use(home);
  services_.faults.check(services_.device.clear(*slot, kGranule, nullptr));
  services_.faults.check(services_.device.synchronize());
  const device::Chunk chunk{*slot, kGranule};
  uint64_t hash = 0;
  if (services_.device.hash(std::span(&chunk, 1), std::span(&hash, 1), granules_.where(home))) zeros_hash_ = hash;
  memory_.shadow.free(*slot);
  return zeros_hash_;
}

// May content not stay in this slot, or what differs from it not come there?
bool Snapshots::must_leave(uint64_t slot, bool differs) const {
  return (differs && memory_.shadow.is_sealed(slot)) || (evict_ && memory_.shadow.on_device(slot)) || memory_.shadow.is_foreign(slot) ||
         (place_ != Place::kDevice && memory_.shadow.place(slot) != place_);
}

// May it go back to the device?
bool Snapshots::may_return(uint64_t slot) const {
  return staging_.wishes.returns && place_now() == Place::kDevice && !memory_.shadow.on_device(slot);
}

// A slot on the device, if there is room: for what may return there.
std::optional<uint64_t> Snapshots::returned(uint32_t ordinal, uint64_t& wanted) {
  const auto slot = memory_.shadow.allocate(ordinal, Place::kDevice, wanted, true);
  if (slot) {
    --wanted;
  } else {
    staging_.wishes.returns = false;  // no room: not requested once for every granule
  }
  return slot;
}

// How many of these need a place in the shadow and have none, by device.
std::array<uint64_t, journal::kMaxDevices> Snapshots::slots_wanted(const std::vector<uint64_t>& granules,
                                                                  const std::vector<uint64_t>& hashes) const {
  std::array<uint64_t, journal::kMaxDevices> wanted{};
  auto old = chunks_.cbegin();
  for (size_t i = 0; i < granules.size(); ++i) {
    while (old != chunks_.cend() && old->address < granules[i]) ++old;
    const bool known = old != chunks_.cend() && old->address == granules[i] && old->slot != 0;
    const bool stays = known && !must_leave(old->slot, old->hash != hashes[i]) && !may_return(old->slot);
    bool differs = false;
    const bool has_one = known && !stays && staging_.prepared(granules[i], hashes[i], place_now(), differs);
    wanted[ordinal_of_device_address(granules[i])] += !stays && !has_one && hashes[i] != zeros_hash_;
  }
  return wanted;
}

// What the last snapshot had to copy, and what may stay where it is: it is copied again without a look. That reads it once, not twice,
// and where it has not changed, the shadow gets what it has.
std::vector<bool> Snapshots::likely_changed(const std::vector<uint64_t>& granules) const {
  std::vector<bool> likely(granules.size());
  auto old = chunks_.cbegin();
  auto changed = changed_.cbegin();
  for (size_t i = 0; i < granules.size(); ++i) {
    while (changed != changed_.cend() && *changed < granules[i]) ++changed;
    if (changed == changed_.cend()) break;
    if (*changed != granules[i]) continue;
    while (old != chunks_.cend() && old->address < granules[i]) ++old;
    likely[i] = old != chunks_.cend() && old->address == granules[i] && old->slot != 0 && memory_.shadow.on_device(old->slot) &&
                !must_leave(old->slot, true) && !may_return(old->slot);
  }
  return likely;
}

// What is copied is what these chunks hash to.
bool Snapshots::fill_shadow(std::vector<ChunkState>& chunks, const std::vector<Changed>& changed, uint64_t sequence) {
  std::vector<StagingCopy::Piece> plain;
  std::vector<ChunkState*> direct;
  for (const auto& [number, before] : changed) {
    ChunkState& chunk = chunks[number];
    const auto target = memory_.shadow.plain_at(chunk.slot);
    if (!target) {
      direct.push_back(&chunk);
      continue;
    }
    const uint64_t mapped = target->mapped ? chunk.slot : 0;
    plain.push_back({chunk.address, target->fd, target->offset, ordinal_of_device_address(chunk.address), mapped});
  }
  // Faults are injected when so many have been copied.
  const auto in_parts = [this, sequence](size_t others, size_t count, auto&& bring) {
    size_t brought = 0;
    for (size_t i = 0; i < count; ++i) {
      if (!services_.injector.snapshot_due(others + i + 1)) continue;
      if (!bring(brought, i)) return false;
      services_.injector.at_snapshot(others + i + 1, sequence);
      brought = i;
    }
    return bring(brought, count);
  };
  std::vector<device::Move> moves;  // of one device
  std::vector<uint64_t> hashes;
  return in_parts(0, plain.size(), [&](size_t first, size_t end) {
    return static_cast<bool>(granules_.staging_copy().to_plain(std::span(plain).subspan(first, end - first)));
  }) && in_parts(plain.size(), direct.size(), [&](size_t first, size_t end) {
    while (first < end) {
      const uint32_t ordinal = ordinal_of_device_address(direct[first]->address);
      moves.clear();
      for (size_t i = first; i < end && ordinal_of_device_address(direct[i]->address) == ordinal; ++i) {
        moves.push_back({direct[i]->slot, direct[i]->address, kGranule});
      }
      hashes.resize(moves.size());
      if (!granules_.copy_and_hash(moves, hashes, ordinal)) return false;
      for (const uint64_t hash : hashes) direct[first++]->hash = hash;
    }
    return true;
  });
}

void Snapshots::trim_shadow() {
  if (trim_shadow_at_ != 0 && now_ns() >= trim_shadow_at_) trim_slabs(1);
}

// The empty ones.
void Snapshots::trim_slabs(size_t most) {
  const std::lock_guard lock(memory_.mutex);
  const bool more = memory_.shadow.trim(most);
  trim_shadow_at_ = more ? now_ns() + kTrimShadowEvery : 0;
}

void Snapshots::trim() {
  if (trimmed_ >= position_) return;
  journal::JournalHeader& header = services_.job.header();
  if (blocking_slot_ && header.threads[*blocking_slot_].waiting.load(std::memory_order_acquire) == blocked_at_) return;
  blocking_slot_.reset();
  uint64_t limit = position_;
  for (uint32_t i = 0; i < journal::kMaxThreads; ++i) {
    const uint64_t waiting = header.threads[i].waiting.load(std::memory_order_acquire);
    if (waiting >= limit) continue;
    limit = std::max(waiting, trimmed_);
    blocking_slot_ = i;
    blocked_at_ = waiting;
  }
  if (limit == trimmed_) return;
  trimmed_ = limit;
  header.trimmed.store(limit, std::memory_order_seq_cst);
  header.trimmed_futex.fetch_add(1, std::memory_order_seq_cst);
  if (header.trimmed_waiters.load(std::memory_order_seq_cst) != 0) journal::futex_wake(header.trimmed_futex);
}

Result<> Snapshots::take_over(SnapshotContent& content, uint64_t trimmed) {
  number_ = content.number;
  position_ = content.position;
  trimmed_ = trimmed;
  uint64_t last = 0;
  for (const ChunkState& chunk : content.chunks) {
    const bool in_order = chunk.address > last && chunk.address % kGranule == 0;
    const bool kept = chunk.slot == 0 || memory_.shadow.take(chunk.slot);
    if (!in_order || !memory_.hosting.backed(chunk.address, kGranule) || !kept) {
      return Error{"a chunk of the last snapshot has no memory, or no shadow"};
    }
    last = chunk.address;
  }
  chunks_ = std::move(content.chunks);
  written_.assign(chunks_.size(), number_);
  return {};
}

void Snapshots::place_again(const std::vector<ChunkState>& lost, uint64_t sequence) {
  std::map<uint32_t, std::vector<ChunkState>> by_ordinal;
  for (const ChunkState& chunk : lost) by_ordinal[ordinal_of_slot(chunk.slot)].push_back(chunk);
  for (auto& [ordinal, chunks] : by_ordinal) {
    std::vector<uint64_t> slots;
    std::vector<Granules::Move> moves;
    for (const ChunkState& chunk : chunks) {
      slots.push_back(chunk.slot);
      moves.emplace_back(chunk.slot, chunk.address);
    }
    std::ranges::sort(slots);
    const uint64_t start = now_ns();
    services_.contexts.use(ordinal);
    const std::lock_guard lock(memory_.mutex);
    Result<std::vector<Hosted>> made = memory_.shadow.make_again(ordinal, slots);
    if (!made) {
      lacks_lost_ = true;
      services_.log(Level::kWarning, "the shadow that was lost with a device is not made again before the next snapshot: " + made.why());
      continue;
    }
    if (!granules_.copy(moves)) services_.faults.give_up(sequence, "the device could not copy to the shadow");
    memory_.shadow.add_again(*std::move(made), slots);
    services_.log(Level::kInfo, std::to_string(chunks.size() * kGranule >> 20) + " MiB of the shadow were made again in " +
                                    in_ms(now_ns() - start));
    for (const ChunkState& chunk : chunks) written_again(chunk.address).slot = chunk.slot;
  }
}

void Snapshots::replace(const std::vector<ChunkState>& chunks) {
  for (const ChunkState& chunk : chunks) written_again(chunk.address).hash = chunk.hash;
}

// A chunk of the last snapshot whose place was written since: no copy of that snapshot has what is there now.
ChunkState& Snapshots::written_again(uint64_t address) {
  const auto chunk = std::ranges::lower_bound(chunks_, address, {}, &ChunkState::address);
  written_[static_cast<size_t>(chunk - chunks_.begin())] = number_ + 1;
  return *chunk;
}

}  // namespace xmig::server
