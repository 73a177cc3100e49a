// Taking a cut: see docs/architecture.md.
//
// The shadow is updated in place. That is safe because, from `cutting` to the store of `cut`, the device memory itself
// is the state: a server that dies in between is followed by one that takes the same cut again. So before the first
// byte of the shadow changes, everything that the cut needs must be there: slots, and pages for its file.
#include <algorithm>

#include "ipc/whole.h"
#include "journal/futex.h"
#include "server/clock.h"
#include "server/executor/executor.h"

namespace xmig::server {

using journal::kGranule;

namespace {

// After a cut that was not possible: hashing everything again at once would not make it possible.
constexpr uint64_t kFirstRetry = 50'000'000;
constexpr uint64_t kLastRetry = 1'000'000'000;
// How long a job may stand still, or wait for the program, so that it can be given to another server.
constexpr uint64_t kHandoverPatience = 10'000'000'000;
constexpr uint64_t kTrimShadowEvery = 5'000'000;

}  // namespace

// Device work that only ends when the program does something: a cut that waited for it could wait for ever, because the
// program may in turn wait for records that come after the cut.
bool Executor::external_waits() {
  if (outside_waits_.load(std::memory_order_acquire) != 0) return true;
  if (value_waits_ && !device_idle()) return true;
  value_waits_ = false;
  const journal::JournalHeader& header = job_.header();
  // A position that was posted twice and not taken yet must not be trimmed either.
  return header.callbacks_posted.load(std::memory_order_acquire) !=
         header.callbacks_taken.load(std::memory_order_acquire);
}

// Decides between two batches whether to cut, and if so stops execution until the device is idle. The executor goes on
// answering meanwhile.
void Executor::consider_cut(bool idle) {
  const uint64_t now = now_ns();
  stall_.passed(now, !idle, progress_.unfinished());
  policy_.saw(live_.bytes());
  if (!stop_) {
    stop_ = wants_cut(idle, now);
    if (!stop_) return;
    if (placement_.bound()) placement_.leave();
  }
  if (device_idle()) {
    const Stop stop = *std::exchange(stop_, std::nullopt);
    if (stop.request == kPause) {
      wait_paused();
    } else if (stop.request == kHandover) {
      hand_over(stop.since);
    } else if (stop.request == kSuspend) {
      suspend(stop.since);
    } else {
      take_cut(stop.reason, stop.since);
      cuts_decided_.fetch_add(1);
    }
    return;
  }
  if (now < stop_->deadline) return;
  if (stop_->request == kHandover || stop_->request == kSuspend) {
    constexpr const char* kWhy = "the device does not come to an end with what it has";
    const bool suspending = stop_->request == kSuspend;
    stop_.reset();
    return suspending ? fail_suspend(kWhy) : daemon_.handover_failed(kWhy);
  }
  const bool stops = stop_->deadline != stop_->since;
  if (const uint64_t progress = progress_.signature();
      stops && progress != stop_->progress && now - stop_->since < CutPolicy::kLongestDelay) {
    stop_->progress = progress;  // it works its queue off
    stop_->deadline = now + policy_.patience(now);
    return;
  }
  if (!stops) {
    policy_.busy(now);
  } else {
    policy_.gave_up(now, now - stop_->since);
  }
  if (cut_now_) cut_blocked_until_ = now + (now - stop_->since);
  stop_.reset();
}

CutPolicy::Now Executor::policy_now(uint64_t now) const {
  return {now, stall_.replay(), stall_.constant(), stall_.working(), live_.bytes()};
}

std::optional<Executor::Stop> Executor::wants_cut(bool idle, uint64_t now) {
  if (settle_at_ != 0 && now >= settle_at_) start_settling();
  const uint64_t gained = position_ - cut_position_;
  if (gained == 0) cut_now_ = false;
  const uint32_t asked = requests_.load(std::memory_order_relaxed);
  if (gained == 0 && !(asked & (kPause | kHandover | kSuspend)) && !(asked & kCut && must_settle_)) {
    if (asked & (kCut | kAnswer)) {
      const uint32_t answered = requests_.fetch_and(~(kCut | kAnswer)) & (kCut | kAnswer);
      if (must_settle_) {
        requests_.fetch_or(answered);  // since the look at `asked` there is something to cut after all
      } else if (answered & kAnswer) {
        daemon_.cut_stands(cut_number_);
      }
      cuts_decided_.fetch_add(1);
    }
    return std::nullopt;
  }
  const bool possible = now >= cut_blocked_until_;
  const journal::JournalHeader& header = job_.header();
  const bool caught_up = header.tail.load(std::memory_order_relaxed) == position_;
  const bool waiters = header.trimmed_waiters.load(std::memory_order_relaxed) != 0;
  const CutPolicy::Now known = policy_now(now);
  Stop stop{nullptr, now, ~0ull, kCut};
  if (asked & kPause) {
    stop.request = kPause;
  } else if (asked & (kHandover | kSuspend)) {
    stop.request = asked & kHandover ? kHandover : kSuspend;
    if (handover_by_ == 0) handover_by_ = now + kHandoverPatience;
    stop.deadline = handover_by_;
    if (redoing_ && now < stop.deadline) return std::nullopt;  // the journal is the lost server's as long as that takes
  } else if (asked & kCut) {
    stop.reason = "asked for";
  } else if (cut_now_ && possible) {
    stop.reason = "the device reads memory of the program";
    stop.deadline = now + policy_.patience(now);  // its work may wait for what a later record does
  } else if (possible && CutPolicy::needs_room(position_ - trimmed_, gained, job_.journal().ring_bytes(), waiters,
                                               caught_up)) {
    stop.reason = "the journal fills";
  } else if (possible && policy_.overdue(known)) {
    stop.reason = "time";
    // In a redo everything is enqueued already, and has to be done in any case.
    if (!redoing_) stop.deadline = now + policy_.patience(now);
  } else if (possible && idle && policy_.due(known) && !waits_.watching()) {
    stop.reason = "idle";
    stop.deadline = now;
  } else if (possible && !idle && !redoing_ && policy_.due_here(known)) {
    stop.reason = "little is live";
    stop.deadline = now + policy_.patience(now);
  } else {
    return std::nullopt;
  }
  // Asked last, for it may ask the device.
  const bool outside = external_waits();
  const bool for_another = stop.request == kHandover || stop.request == kSuspend;
  if (outside && (!for_another || now < stop.deadline)) return std::nullopt;
  requests_.fetch_and(~stop.request);
  if (stop.deadline != stop.since) stop.progress = progress_.signature();
  if (for_another) handover_by_ = 0;
  return stop;
}

bool Executor::device_idle() {
  for (uint32_t ordinal = 0; ordinal < contexts_.count(); ++ordinal) {
    contexts_.use(ordinal);
    if (!busy_streams(ordinal).empty()) return false;
  }
  return true;
}

void Executor::drain() {
  waits_.hand_over();  // replies do not wait for the rest
  for (uint32_t ordinal = 0; ordinal < contexts_.count(); ++ordinal) {
    contexts_.use(ordinal);
    faults_.check(driver_.cuCtxSynchronize());
  }
  waits_.finish_all();
  working_.clear();
  progress_.idle(sequence_);
  intake_.drained();
}

// A cut's own kernel and copies go where the program's last kernel went. In a stream of their own they left an H200 in a state
// in which each of the program's kernels begins 0.3 us later behind the one before (decision 0020).
device::Device::Where Executor::where(uint32_t ordinal, While when) const {
  if (when == While::kRunning) return std::nullopt;
  return kernels_in_[ordinal];
}

bool Executor::hash_chunks(const std::vector<uint64_t>& granules, std::vector<uint64_t>& hashes, While when) {
  hashes.resize(granules.size());
  std::vector<device::Chunk> chunks;
  for (size_t first = 0; first < granules.size();) {
    const uint32_t ordinal = ordinal_of_address(granules[first]);
    chunks.clear();
    size_t end = first;
    for (; end < granules.size() && ordinal_of_address(granules[end]) == ordinal; ++end) {
      chunks.push_back({granules[end], kGranule});
    }
    contexts_.use(ordinal);
    if (!device_.hash(chunks, std::span(hashes).subspan(first, end - first), where(ordinal, when))) return false;
    first = end;
  }
  return true;
}

void Executor::add_move(Moves& moves, uint64_t to, uint64_t from) const {
  const auto plain = [this](uint64_t at) { return at >= kShadowBase ? shadow_.plain_at(at) : std::nullopt; };
  if (const auto target = plain(to)) {
    moves.to_plain.push_back({from, target->fd, target->offset, ordinal_of_address(from), target->mapped ? to : 0});
  } else if (const auto source = plain(from)) {
    moves.from_plain.push_back({to, source->fd, source->offset, ordinal_of_address(to)});
  } else {
    moves.direct.emplace_back(to, from);
  }
}

bool Executor::copy_chunks(const std::vector<std::pair<uint64_t, uint64_t>>& all) {
  Moves moves;
  for (const auto& [to, from] : all) add_move(moves, to, from);
  std::string why;
  return copy(moves, why);
}

bool Executor::copy(const Moves& sorted, std::string& why, While when) {
  if (!bounce_.to_plain(sorted.to_plain, why) || !bounce_.to_device(sorted.from_plain, why)) return false;
  why = "the device could not copy";
  const auto& moves = sorted.direct;
  std::vector<device::Move> batch;  // of one device
  uint32_t batch_ordinal = 0;
  const auto flush = [&] {
    if (batch.empty()) return true;
    contexts_.use(batch_ordinal);
    return device_.copy(std::exchange(batch, {}), where(batch_ordinal, when));
  };
  for (const auto& [to, from] : moves) {
    const uint32_t ordinal = ordinal_of_address(std::min(to, from));  // the device's range lies below the shadow's
    if (ordinal != batch_ordinal && !flush()) return false;
    batch_ordinal = ordinal;
    if (!batch.empty() && batch.back().to + batch.back().bytes == to && batch.back().from + batch.back().bytes == from) {
      batch.back().bytes += kGranule;
    } else {
      batch.push_back({to, from, kGranule});
    }
  }
  return flush();
}

bool Executor::take_cut(const char* reason, uint64_t stopped) {
  if (placement_.bound()) placement_.leave();
  if (external_waits()) return false;
  drain();
  publish_executed();
  journal::JournalHeader& header = job_.header();
  const uint64_t start = now_ns();
  // What is not in device memory is lost with this server: it has to be there before that is the state.
  for (auto& [address, variable] : variables_) from_variable(variable);
  if (!placed_.keep([this](uint32_t ordinal) { return where(ordinal, While::kDrained); })) {
    faults_.give_up(sequence_, "the device could not keep the variables of its modules");
  }
  header.cutting.store(position_ + 1, std::memory_order_seq_cst);
  injector_.at_cut(0, sequence_);

  std::unique_lock still = keep_staging_still();
  place_ = wanted_place_;
  CutReport report;
  report.reason = reason;
  uint64_t once_ns = 0;
  const std::string trouble = attempt_cut(report, once_ns);
  const uint64_t end = now_ns();
  if (!trouble.empty()) {
    header.cutting.store(0, std::memory_order_seq_cst);
    cut_retry_ = std::clamp(cut_retry_ * 2, kFirstRetry, kLastRetry);
    cut_blocked_until_ = end + cut_retry_;
    policy_.postpone(cut_blocked_until_);
    if (trouble != cut_trouble_) {
      log_(Level::kWarning, "no cut is possible, the last one stays: " + trouble +
                                ". The job goes on; a recovery would redo more, and a full journal would stop it");
      cut_trouble_ = trouble;
    }
    return false;
  }
  cut_trouble_.clear();
  cut_retry_ = 0;
  cut_now_ = false;
  // A server's first cut tells nothing of the next: code, pages and buffers are touched for the first time, too.
  const uint64_t once = std::exchange(has_cut_, true) ? once_ns : end - start;
  const uint64_t waited = stopped != 0 ? start - stopped : 0;
  policy_.taken(end, end - start - std::min(end - start, once), waited);
  stall_.snapshot(end, end - start);
  report.ms = static_cast<double>(end - start) / 1e6;
  report.waited_ms = static_cast<double>(waited) / 1e6;
  report.off_device = place_ != Place::kDevice;
  requests_.fetch_and(~kAnswer);
  daemon_.cut(report);
  still.unlock();
  end_settling();
  return true;
}

// What a granule of zeros hashes to. Nothing, if there is no memory in which to find out.
std::optional<uint64_t> Executor::zeros_hash() {
  if (zeros_hash_) return zeros_hash_;
  const auto slot = shadow_.allocate(0, Place::kDevice, 1, true);  // where kernels reach it in any case
  if (!slot) return std::nullopt;
  contexts_.use(0);
  faults_.check(driver_.cuMemsetD8Async(*slot, 0, kGranule, nullptr));
  faults_.check(driver_.cuCtxSynchronize());
  const device::Chunk chunk{*slot, kGranule};
  uint64_t hash = 0;
  if (device_.hash(std::span(&chunk, 1), std::span(&hash, 1), where(0, While::kDrained))) zeros_hash_ = hash;
  shadow_.free(*slot);
  return zeros_hash_;
}

// May content not stay in this slot?
bool Executor::must_leave(uint64_t slot) const {
  return (evict_shadow_ && shadow_.on_device(slot)) || shadow_.is_foreign(slot) ||
         (place_ != Place::kDevice && shadow_.place(slot) != place_);
}

// May it go back to the device?
bool Executor::may_return(uint64_t slot) const {
  return shadow_returns_ && cut_place() == Place::kDevice && !shadow_.on_device(slot);
}

// How many of these need a place in the shadow and have none, by device.
std::array<uint64_t, journal::kMaxDevices> Executor::slots_wanted(const std::vector<uint64_t>& granules,
                                                                  const std::vector<uint64_t>& hashes) const {
  std::array<uint64_t, journal::kMaxDevices> wanted{};
  auto old = chunks_.cbegin();
  for (size_t i = 0; i < granules.size(); ++i) {
    while (old != chunks_.cend() && old->address < granules[i]) ++old;
    const bool known = old != chunks_.cend() && old->address == granules[i] && old->slot != 0;
    const bool stays = known && !must_leave(old->slot) && !may_return(old->slot);
    bool differs = false;
    const bool has_one = known && !stays && staged(granules[i], hashes[i], differs);
    wanted[ordinal_of_device_address(granules[i])] += !stays && !has_one && hashes[i] != zeros_hash_;
  }
  return wanted;
}

// What the last cut had to copy, and what may stay where it is: it is copied again without a look. That reads it once, not twice,
// and where it has not changed, the shadow gets what it has.
std::vector<bool> Executor::likely_changed(const std::vector<uint64_t>& granules) const {
  std::vector<bool> likely(granules.size());
  auto old = chunks_.cbegin();
  auto changed = changed_.cbegin();
  for (size_t i = 0; i < granules.size(); ++i) {
    while (changed != changed_.cend() && *changed < granules[i]) ++changed;
    if (changed == changed_.cend()) break;
    if (*changed != granules[i]) continue;
    while (old != chunks_.cend() && old->address < granules[i]) ++old;
    likely[i] = old != chunks_.cend() && old->address == granules[i] && old->slot != 0 && shadow_.on_device(old->slot) &&
                !must_leave(old->slot) && !may_return(old->slot);
  }
  return likely;
}

// What is copied is what these chunks hash to.
bool Executor::fill_shadow(std::vector<ChunkState>& chunks, const std::vector<Changed>& changed) {
  std::vector<Bounce::Piece> plain;
  std::vector<ChunkState*> direct;
  for (const auto& [number, before] : changed) {
    ChunkState& chunk = chunks[number];
    const auto target = shadow_.plain_at(chunk.slot);
    if (!target) {
      direct.push_back(&chunk);
      continue;
    }
    const uint64_t mapped = target->mapped ? chunk.slot : 0;
    plain.push_back({chunk.address, target->fd, target->offset, ordinal_of_device_address(chunk.address), mapped});
  }
  // Faults on purpose strike when so many have been copied.
  const auto in_parts = [this](size_t others, size_t count, auto&& bring) {
    size_t brought = 0;
    for (size_t i = 0; i < count; ++i) {
      if (!injector_.cut_due(others + i + 1)) continue;
      if (!bring(brought, i)) return false;
      injector_.at_cut(others + i + 1, sequence_);
      brought = i;
    }
    return bring(brought, count);
  };
  std::string why;
  std::vector<device::Move> moves;  // of one device
  std::vector<uint64_t> hashes;
  return in_parts(0, plain.size(), [&](size_t first, size_t end) {
    return bounce_.to_plain(std::span(plain).subspan(first, end - first), why);
  }) && in_parts(plain.size(), direct.size(), [&](size_t first, size_t end) {
    while (first < end) {
      const uint32_t ordinal = ordinal_of_device_address(direct[first]->address);
      moves.clear();
      for (size_t i = first; i < end && ordinal_of_device_address(direct[i]->address) == ordinal; ++i) {
        moves.push_back({direct[i]->slot, direct[i]->address, kGranule});
      }
      hashes.resize(moves.size());
      contexts_.use(ordinal);
      if (!device_.copy_and_hash(moves, hashes, where(ordinal, While::kDrained))) return false;
      for (const uint64_t hash : hashes) direct[first++]->hash = hash;
    }
    return true;
  });
}

// Empty: committed. Otherwise the reason, and nothing has changed. `once_ns`: of its time, what the next cut of the same work
// will not take, because this one found new places in the shadow.
std::string Executor::attempt_cut(CutReport& report, uint64_t& once_ns) {
  const std::vector<uint64_t>& granules = live_.listed().granules;
  std::vector<bool> unseen;
  {
    const std::lock_guard lock(hosted_mutex_);
    unseen = likely_changed(granules);
  }
  std::vector<uint64_t> hashes(granules.size()), seen, seen_hashes;
  for (size_t i = 0; i < granules.size(); ++i) {
    if (!unseen[i]) seen.push_back(granules[i]);
  }
  const uint64_t hashing = now_ns();
  if (!hash_chunks(seen, seen_hashes)) {
    faults_.give_up(sequence_, "the device could not hash its memory");
  }
  report.hash_ms = static_cast<double>(now_ns() - hashing) / 1e6;
  report.hashed_bytes = seen.size() * kGranule;
  for (size_t i = 0, known = 0; i < granules.size(); ++i) {
    if (!unseen[i]) hashes[i] = seen_hashes[known++];
  }

  const std::lock_guard lock(hosted_mutex_);
  CutContent content;
  std::vector<ChunkState>& next = content.chunks;
  std::vector<Changed> changed;
  std::vector<uint64_t> taken, given_back;
  next.reserve(granules.size());
  const std::optional<uint64_t> zeros_hash = this->zeros_hash();
  std::array<uint64_t, journal::kMaxDevices> wanted = slots_wanted(granules, hashes);
  const auto give_back = [&](const ChunkState& chunk) {
    if (chunk.slot != 0) given_back.push_back(chunk.slot);
  };
  size_t fresh = 0;
  const uint64_t placing = now_ns();
  auto old = chunks_.cbegin();
  for (size_t i = 0; i < granules.size(); ++i) {
    const uint64_t address = granules[i];
    const uint32_t ordinal = ordinal_of_device_address(address);
    for (; old != chunks_.cend() && old->address < address; ++old) give_back(*old);
    if (unseen[i]) {
      changed.push_back({next.size(), old->hash});
      next.push_back({address, 0, old->slot});
      ++old;
      continue;
    }
    const bool zeros = hashes[i] == zeros_hash;
    std::optional<uint64_t> slot, before;
    bool differs = true;
    if (old != chunks_.cend() && old->address == address) {
      const bool leaves = zeros || old->slot == 0 || must_leave(old->slot);
      const bool returns = !leaves && may_return(old->slot);
      if (!zeros && (leaves || returns)) slot = staged(address, hashes[i], differs);
      if (leaves || slot) {
        give_back(*old);
      } else if (const auto nearer = returns ? returned(ordinal, wanted[ordinal]) : std::nullopt) {
        give_back(*old);
        taken.push_back(*nearer);
        slot = nearer;
      } else {
        slot = old->slot;
        before = old->hash;
        differs = before != hashes[i];
      }
      ++old;
    }
    if (zeros) {
      next.push_back({address, hashes[i], 0});
      continue;
    }
    if (!slot) {
      // While the shadow returns, what is new does not go where the rest is leaving.
      if (shadow_returns_) slot = shadow_.allocate(ordinal, cut_place(), wanted[ordinal], true);
      if (!slot) slot = shadow_.allocate(ordinal, cut_place(), wanted[ordinal]);
      --wanted[ordinal];
      if (!slot) {
        for (const uint64_t mine : taken) shadow_.free(mine);
        shadow_.trim();
        return cut_place() == Place::kFile ? "the directory has no room for the shadow"
                                           : "there is no memory for the shadow, neither on the device nor on the host";
      }
      taken.push_back(*slot);
      ++fresh;
    }
    if (differs) changed.push_back({next.size(), before});
    next.push_back({address, hashes[i], *slot});
  }
  for (; old != chunks_.cend(); ++old) give_back(*old);
  if (fresh != 0) once_ns = now_ns() - placing;

  content.number = cut_number_ + 1;
  content.position = position_;
  content.sequence = sequence_;
  content.failures = failures_;
  content.memory = hosting_.extents();
  content.live = live_.listed().ranges;
  std::vector<uint64_t> images;
  objects_.modules.for_each([&](uint32_t, const Module& module) { images.push_back(module.image); });
  objects_.graphs.for_each([&](uint32_t, const GraphExec& graph) { images.push_back(graph.image); });
  content.images = images_.states(images);
  objects_.events.for_each([&](uint32_t index, const Event& event) {
    if (event.recorded != 0) content.events.push_back({index, event.recorded});
  });
  content.objects = objects_.records.list();
  for (const auto& [address, variable] : variables_) content.variables.push_back(variable);
  const uint64_t bytes = serialised_bytes(content);
  const int file = job_.fds().cut[content.number & 1].get();
  if (!reserve_cut_file(file, bytes)) {
    const std::string why = std::strerror(errno);
    for (const uint64_t mine : taken) shadow_.free(mine);
    shadow_.trim();
    return "there is no space for " + std::to_string(bytes) + " bytes in the cut's file: " + why;
  }

  // From here on nothing may fail for want of something.
  const uint64_t copying = now_ns();
  const bool copied = fill_shadow(next, changed);
  const uint64_t copied_after = now_ns() - copying;
  report.copy_ms = static_cast<double>(copied_after) / 1e6;
  if (fresh != 0) once_ns += copied_after * fresh / changed.size();
  if (!copied || !ipc::write_all(file, serialise(content))) {
    faults_.give_up(sequence_, "a cut could not be written");
  }
  journal::JournalHeader& header = job_.header();
  header.cut.store(content.number << 1 | (content.number & 1), std::memory_order_seq_cst);
  header.cut_position.store(position_, std::memory_order_relaxed);
  header.cutting.store(0, std::memory_order_seq_cst);

  cut_number_ = content.number;
  cut_position_ = position_;
  changed_.clear();
  for (const auto& [number, before] : changed) {
    if (before && *before != next[number].hash) changed_.push_back(next[number].address);
  }
  chunks_ = std::move(next);
  for (const uint64_t slot : given_back) shadow_.free(slot);
  for (const ChunkState& chunk : chunks_) consume_staged(chunk);
  shadow_returns_ = false;
  must_settle_ = false;
  settle_at_ = 0;
  copy_log_.release(position_, evict_shadow_ || place_ != Place::kDevice);
  hosting_.release_dead();
  images_.release_unneeded(images);
  if (settling_) {
    trim_shadow_at_ = now_ns();  // all that came with a move: too much for one stop
  } else {
    shadow_.trim();
  }
  report.number = content.number;
  report.position = position_;
  report.sequence = sequence_;
  report.chunks = granules.size();
  report.copied_bytes = changed.size() * kGranule;
  report.live_bytes = live_.bytes();
  report.journal_bytes = position_ - trimmed_;
  report.objects = content.objects.size();
  trim();
  return {};
}

// What the first cut after a move or a resumption has left empty goes slab by slab. All at once stopped a program of 40 GB
// for 25 ms.
void Executor::trim_shadow(bool whole) {
  if (trim_shadow_at_ == 0 || (!whole && now_ns() < trim_shadow_at_)) return;
  const std::lock_guard lock(hosted_mutex_);
  const bool more = shadow_.trim(whole ? ~0ull : 1);
  trim_shadow_at_ = more ? now_ns() + kTrimShadowEvery : 0;
}

void Executor::trim() {
  if (trimmed_ >= cut_position_) return;
  journal::JournalHeader& header = job_.header();
  if (blocking_slot_ && header.threads[*blocking_slot_].waiting.load(std::memory_order_acquire) == blocked_at_) return;
  blocking_slot_.reset();
  uint64_t limit = cut_position_;
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

}  // namespace xmig::server
