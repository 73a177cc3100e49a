#include "server/migration/incoming.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "server/clock.h"
#include "server/peers.h"

namespace xmig::server {

using journal::kGranule;

namespace {

constexpr uint64_t kBatchGranules = 128;            // between two looks at the clock, and what is hashed at once
constexpr uint64_t kLongFill = 500'000'000;         // ns
constexpr int kSnapshotReads = 200;                      // of a source that takes one snapshot after the other
constexpr auto kSnapshotReadPause = std::chrono::milliseconds(5);

constexpr auto kByAddress = [](const auto& a, const auto& b) { return a.address < b.address; };

double ms_since(uint64_t start) { return static_cast<double>(now_ns() - start) / 1e6; }

}  // namespace

// --- a move, round by round

Result<> Incoming::begin_move(uint64_t first_id) {
  comes_ = true;
  memory_.physical.taken(first_id - 1);
  if (Result<> kept = keeps_promises(services_); !kept) return kept;
  const Status reserved = memory_.physical.reserve(services_.contexts.count());
  if (reserved) return {};
  return Error{"the device's address ranges cannot be reserved (" + services_.device.text(reserved) + ")"};
}

Result<> Incoming::import(Hosted memory) {
  const uint64_t bytes = memory.bytes;
  if (memory.kind == HostedKind::kImage) preload_.add(memory);
  const std::lock_guard lock(memory_.mutex);
  const Result<> adopted = adoption_.adopt(std::move(memory));
  if (adopted) return {};
  return Error{std::to_string(bytes >> 20) + " MiB of the source: " + adopted.why(), adopted.error().code};
}

void Incoming::forget(uint64_t id) {
  const std::lock_guard lock(memory_.mutex);
  services_.contexts.use(services_.contexts.home());
  preload_.drop(id);
  if (!memory_.shadow.forget(id)) memory_.images.forget(id);
}

// The source's last snapshot, at least this one. It is written by another process all the time: what does not decode, or is not
// the one that the header names, is read again.
std::optional<SnapshotContent> Incoming::read_snapshot(uint64_t at_least) const {
  for (int tries = 0; tries < kSnapshotReads; ++tries) {
    if (tries != 0) std::this_thread::sleep_for(kSnapshotReadPause);
    const uint64_t snapshot = services_.job.header().snapshot.load();
    if (snapshot >> 1 < at_least) continue;
    if (snapshot == 0) return SnapshotContent{};
    auto content = read_snapshot_file(services_.job.fds().snapshot[snapshot & 1].get());
    if (content && content->number == snapshot >> 1) return std::move(*content);
  }
  return std::nullopt;
}

// What is known of a granule that lies behind those that were requested before, from `at` on.
std::optional<uint64_t> Incoming::known_hash(std::vector<Known>::const_iterator& at, uint64_t address) const {
  while (at != known_.cend() && at->address < address) ++at;
  return at != known_.cend() && at->address == address ? at->hash : std::nullopt;
}

struct Incoming::Round {
  const uint64_t start = now_ns();
  SnapshotContent content;
  RoundReport report;
  std::vector<size_t> wanted;   // of its chunks, those to be copied
  std::vector<uint64_t> zeros;  // granules that are to be
};

Result<> Incoming::round(uint64_t number, uint64_t snapshot) {
  Round round;
  std::optional<SnapshotContent> content = read_snapshot(snapshot);
  if (!content) return Error{"snapshot " + std::to_string(snapshot) + " of the source cannot be read", "bad_snapshot"};
  round.content = std::move(*content);
  round.report.number = number;
  round.report.snapshot = round.content.number;
  if (Result<> made = make_missing(round.content); !made) return made;
  if (Result<> compared = compare(round); !compared) return compared;
  granules_.clear(round.zeros);
  if (Result<> copied = copy(round); !copied) return copied;
  RoundReport& report = round.report;
  report.differing_bytes = report.total_bytes - report.settled_bytes;
  report.ms = ms_since(round.start);
  const uint64_t loading = now_ns();
  preload_.want(round.content);
  while (preload_.pending()) preload_.step(Preload::kMostOfTarget);
  report.loading_ms = ms_since(loading);
  services_.daemon.round(report);
  return {};
}

// What of the snapshot is here already, and what is not.
Result<> Incoming::compare(Round& round) {
  const std::vector<ChunkState>& chunks = round.content.chunks;
  std::vector<Known> known;
  known.reserve(chunks.size());
  auto before = known_.cbegin();
  for (const ChunkState& chunk : chunks) {
    const bool in_order = known.empty() || chunk.address > known.back().address;
    if (!in_order || chunk.address % kGranule != 0 || !memory_.hosting.backed(chunk.address, kGranule)) {
      return Error{"a chunk of the source's snapshot has no memory, or its turn is another", "bad_snapshot"};
    }
    const std::optional<uint64_t> hash = known_hash(before, chunk.address);
    const bool here = hash == chunk.hash;
    known.push_back({chunk.address, hash});
    if (chunk.slot == 0) {
      if (!here) round.zeros.push_back(chunk.address);
      known.back().hash = chunk.hash;
      continue;
    }
    round.report.total_bytes += kGranule;
    if (here) {
      round.report.settled_bytes += kGranule;
    } else if (memory_.shadow.maps(chunk.slot)) {
      round.wanted.push_back(known.size() - 1);
    }
  }
  known_ = std::move(known);
  return {};
}

Result<> Incoming::copy(Round& round) {
  const std::vector<ChunkState>& chunks = round.content.chunks;
  const std::vector<size_t>& wanted = round.wanted;
  RoundReport& report = round.report;
  uint64_t reported = round.start;
  for (size_t first = 0; first < wanted.size(); first += kBatchGranules) {
    std::vector<Granules::Move> moves;
    std::vector<uint64_t> hashes;
    const size_t end = std::min(first + kBatchGranules, wanted.size());
    for (size_t i = first; i < end; ++i) {
      known_[wanted[i]].hash.reset();
      moves.emplace_back(chunks[wanted[i]].address, chunks[wanted[i]].slot);
    }
    if (!granules_.copy_and_hash(moves, hashes)) return Error{"the device could not copy from the source's shadow"};
    for (size_t i = first; i < end; ++i) {
      known_[wanted[i]].hash = hashes[i - first];
      if (hashes[i - first] == chunks[wanted[i]].hash) report.settled_bytes += kGranule;
    }
    report.copied_bytes += moves.size() * kGranule;
    if (now_ns() - reported < kProgressEvery) continue;
    reported = now_ns();
    services_.daemon.round_progress(report.number, report.copied_bytes);
  }
  return {};
}

// --- a resumption

void Incoming::know(const std::map<uint64_t, uint64_t>& hashes, uint64_t bytes) {
  arrived_bytes_ = bytes;
  for (const auto& [address, hash] : hashes) known_.push_back({address, hash});
}

void Incoming::prepare_resumption(bool all) {
  comes_ = true;
  if (!all) return;
  try {
    buffers_ = std::async(std::launch::async, [this] { make_buffers(); });
  } catch (const std::system_error&) {
    // No thread to be had: they are made when they are needed.
  }
}

// For as much as its last snapshot holds.
void Incoming::make_buffers() {
  const uint64_t snapshot = services_.job.header().snapshot.load();
  if (snapshot == 0) return;
  const auto content = read_snapshot_file(services_.job.fds().snapshot[snapshot & 1].get());
  if (!content) return;  // the recovery says so
  std::map<uint32_t, size_t> pieces;
  for (const ChunkState& chunk : content->chunks) {
    if (chunk.slot != 0) ++pieces[ordinal_of_device_address(chunk.address)];
  }
  for (const auto& [ordinal, count] : pieces) {
    if (ordinal < services_.contexts.count()) granules_.staging_copy().make_ready(ordinal, count);
  }
}

// --- the recovery of both

// Memory for what the snapshot holds. What goes is in no chunk of the snapshot, so that nothing is known of it after this round.
Result<> Incoming::make_missing(const SnapshotContent& content) {
  if (Result<> claimed = claim(content); !claimed) return claimed;
  const std::lock_guard lock(memory_.mutex);
  Contexts& contexts = services_.contexts;
  const Status made = memory_.hosting.become(
      content.memory, [&](uint32_t ordinal) { contexts.use(std::min(ordinal, contexts.count() - 1)); },
      [this](uint64_t end) {
        if (arrival_) arrival_->made(end);
      });
  if (made) return {};
  uint64_t bytes = 0;
  for (const Extent& extent : content.memory) bytes += extent.bytes;
  return Error{
      "there is no memory for the " + std::to_string(bytes >> 20) + " MiB that the program has (" +
          services_.device.text(made) + ")",
      made.problem() == Problem::kNoMemory ? "no_room" : "failed"};
}

// Its part of the job's quota. Of a move, what the source has stays the source's meanwhile.
Result<> Incoming::claim(const SnapshotContent& content) {
  Quota& quota = services_.sharing.quota();
  if (!quota.there_is()) return {};
  std::array<uint64_t, journal::kMaxDevices> wanted{};
  for (const Extent& extent : content.memory) {
    if (const uint32_t ordinal = ordinal_of_device_address(extent.address); ordinal < wanted.size()) wanted[ordinal] += extent.bytes;
  }
  for (uint32_t ordinal = 0; ordinal < services_.contexts.count(); ++ordinal) {
    if (quota.claim(ordinal, wanted[ordinal], content.sequence)) continue;
    return Error{"the program has " + std::to_string(wanted[ordinal] >> 20) + " MiB, and the job's memory quota of " +
                     std::to_string(quota.bytes() >> 20) + " MiB has no room for that on this device: " +
                     std::to_string(quota.left(ordinal) >> 20) + " MiB are left beside the job's other programs",
                 "no_room"};
  }
  return {};
}

// What is neither here nor in a device's memory begins to come. What is wrong with it fill() finds.
void Incoming::begin_arrival(const SnapshotContent& content) {
  began_ = now_ns();
  if (!std::is_sorted(content.memory.begin(), content.memory.end(), kByAddress) ||
      !std::is_sorted(content.chunks.begin(), content.chunks.end(), kByAddress)) {
    return;
  }
  std::vector<StagingCopy::Piece> pieces;
  auto memory = content.memory.begin();
  auto known = known_.cbegin();
  for (const ChunkState& chunk : content.chunks) {
    if (known_hash(known, chunk.address) == chunk.hash) continue;
    while (memory != content.memory.end() && memory->address + memory->bytes <= chunk.address) ++memory;
    const bool has_memory = memory != content.memory.end() && memory->address <= chunk.address;
    const auto kept = chunk.slot != 0 ? memory_.shadow.plain_at(chunk.slot) : std::nullopt;
    const uint32_t ordinal = ordinal_of_device_address(chunk.address);
    if (!has_memory || !kept || ordinal >= services_.contexts.count()) continue;
    pieces.push_back({chunk.address, kept->fd, kept->offset, ordinal});
  }
  if (pieces.empty()) return;
  try {
    arrival_ = std::make_unique<Arrival>(granules_.staging_copy(), std::move(pieces));
  } catch (const std::system_error&) {
    // No thread to be had: fill() brings it.
  }
}

// What has arrived is known from now on.
void Incoming::end_arrival() {
  const std::unique_ptr<Arrival> arrival = std::move(arrival_);
  if (!arrival || !arrival->finish()) return;
  std::vector<uint64_t> granules, hashes;
  for (const StagingCopy::Piece& piece : arrival->pieces()) granules.push_back(piece.device);
  if (!granules_.hash(granules, hashes)) return;
  std::vector<Known> arrived, all;
  for (size_t i = 0; i < granules.size(); ++i) arrived.push_back({granules[i], hashes[i]});
  std::ranges::set_union(arrived, known_, std::back_inserter(all), kByAddress);
  known_ = std::move(all);
  arrived_bytes_ += granules.size() * kGranule;
  if (const uint64_t took = now_ns() - arrival->began(); took > kLongFill) {
    services_.log(Level::kInfo, "bringing and hashing " + std::to_string(granules.size() * kGranule >> 20) +
                                    " MiB took " + in_ms(took) + ", beside the rest; " +
                                    StagingCopy::text(granules_.staging_copy().spent()));
  }
}

// The snapshot's content, where it is not known to be here already. What is copied is hashed, and has to be right.
Result<> Incoming::fill(const std::vector<ChunkState>& chunks, uint64_t sequence) {
  end_arrival();
  std::vector<Granules::Move> moves;
  std::vector<uint64_t> zeros, expected, hashes;
  RoundReport report;
  auto known = known_.cbegin();
  for (const ChunkState& chunk : chunks) {
    report.total_bytes += chunk.slot == 0 ? 0 : kGranule;
    if (known_hash(known, chunk.address) == chunk.hash) continue;
    if (chunk.slot == 0) {
      zeros.push_back(chunk.address);
    } else {
      moves.emplace_back(chunk.address, chunk.slot);
      expected.push_back(chunk.hash);
    }
  }
  granules_.clear(zeros);
  granules_.staging_copy().spent();
  const uint64_t start = now_ns();
  if (!granules_.copy_and_hash(moves, hashes)) {
    services_.faults.give_up(sequence, "the device could not copy from the shadow");
  }
  if (const uint64_t took = now_ns() - start; took > kLongFill) {
    services_.log(Level::kInfo, "copying and hashing " + std::to_string(moves.size() * kGranule >> 20) + " MiB took " +
                                    in_ms(took) + "; " + StagingCopy::text(granules_.staging_copy().spent()));
  }
  report.settled_bytes = report.total_bytes;
  report.copied_bytes = std::exchange(arrived_bytes_, 0) + moves.size() * kGranule;
  report.ms = ms_since(began_);
  if (hashes != expected) return Error{"what was copied from the shadow is not what the snapshot says: it was changed, or is damaged", "bad_snapshot"};
  services_.daemon.round(report);
  return {};
}

bool Incoming::end() {
  known_.clear();
  return std::exchange(comes_, false);
}

}  // namespace xmig::server
