#include "server/migration/ahead.h"

#include <fcntl.h>

#include <algorithm>
#include <array>
#include <set>
#include <string>

#include "server/clock.h"

namespace xmig::server {

using journal::kGranule;

namespace {

constexpr size_t kGranulesAtOnce = 128;  // between two looks at what the daemon says

}  // namespace

void Ahead::open(RoundAhead round) {
  forget();
  report_ = {.number = round.number};
  round_ = std::move(round);
}

Result<SnapshotContent> Ahead::begin() {
  began_ = now_ns();
  std::optional<SnapshotContent> content = newest_of(round_->snapshots);
  if (!content) return Error{"the snapshot of what comes ahead cannot be read", "bad_snapshot"};
  report_.snapshot = content->number;
  if (Result<> checked = check(*content); !checked) return checked.error();
  if (Result<> made = make(*content); !made) return made.error();
  if (Result<> compared = compare(content->chunks); !compared) return compared.error();
  return std::move(*content);
}

// It comes from another node: no more than was announced for each device, and all chunks in the memory that it names.
Result<> Ahead::check(const SnapshotContent& content) const {
  std::array<uint64_t, journal::kMaxDevices> bytes{};
  for (const Extent& extent : content.memory) {
    const uint32_t ordinal = ordinal_of_device_address(extent.address);
    const bool right = ordinal < contexts_.count() && whole_granules(extent.address, extent.bytes) &&
                       in_device_range(ordinal, extent.address, extent.bytes);
    if (!right) return Error{"memory of what comes ahead is at no place of the program's", "bad_snapshot"};
    bytes[ordinal] += extent.bytes;
    if (bytes[ordinal] <= (ordinal < round_->most_bytes.size() ? round_->most_bytes[ordinal] : 0)) continue;
    return Error{"what comes ahead has more memory than was announced", "bad_snapshot"};
  }
  uint64_t before = 0;
  for (const ChunkState& chunk : content.chunks) {
    if (chunk.address <= before || chunk.address % kGranule != 0) {
      return Error{"a chunk of what comes ahead is at no place of the program's", "bad_snapshot"};
    }
    before = chunk.address;
  }
  return {};
}

Result<> Ahead::make(const SnapshotContent& content) {
  const uint32_t count = contexts_.count();
  for (const Extent& extent : content.memory) {
    const Status opened = contexts_.try_open(ordinal_of_device_address(extent.address));
    if (!opened) return Error{"no context for what comes ahead: " + device_.text(opened), "failed"};
  }
  if (const Status reserved = physical_.reserve(count); !reserved) {
    return Error{"the device's address ranges cannot be reserved (" + device_.text(reserved) + ")", "failed"};
  }
  const Status made = hosting_.become(content.memory, [this](uint32_t ordinal) { contexts_.use(ordinal); });
  if (made) return {};
  uint64_t bytes = 0;
  for (const Extent& extent : content.memory) bytes += extent.bytes;
  return Error{"there is no memory for the " + std::to_string(bytes >> 20) + " MiB that the program has (" + device_.text(made) + ")",
               made.problem() == Problem::kNoMemory ? "no_room" : "failed"};
}

// What of the snapshot is here already, and what is not. Of what it has not, nothing is known from here on.
Result<> Ahead::compare(const std::vector<ChunkState>& chunks) {
  std::map<uint64_t, uint64_t> known;
  std::vector<uint64_t> zeros;
  for (const ChunkState& chunk : chunks) {
    if (!hosting_.backed(chunk.address, kGranule)) return Error{"a chunk of what comes ahead has no memory", "bad_snapshot"};
    const auto before = known_.find(chunk.address);
    const bool here = before != known_.end() && before->second == chunk.hash;
    if (here || chunk.slot == 0) known.emplace_hint(known.end(), chunk.address, chunk.hash);
    if (chunk.slot == 0) {
      if (!here) zeros.push_back(chunk.address);
      continue;
    }
    report_.total_bytes += kGranule;
    if (here) {
      report_.settled_bytes += kGranule;
    } else if (const std::optional<StagingCopy::Piece> piece = source_of(chunk)) {
      wanted_.emplace_back(chunk, *piece);
    }
  }
  known_.clear();
  if (Result<> cleared = clear(zeros); !cleared) return cleared;
  known_ = std::move(known);
  return {};
}

std::optional<StagingCopy::Piece> Ahead::source_of(const ChunkState& chunk) const {
  const auto next = sources_.upper_bound(chunk.slot);
  if (next == sources_.begin()) return std::nullopt;
  const Hosted& source = std::prev(next)->second;
  const uint64_t offset = chunk.slot - source.address;
  if (source.bytes < kGranule || offset > source.bytes - kGranule) return std::nullopt;
  return StagingCopy::Piece{chunk.address, source.fd.get(), offset, ordinal_of_device_address(chunk.address)};
}

Result<> Ahead::clear(const std::vector<uint64_t>& granules) {
  std::set<uint32_t> ordinals;
  for (const uint64_t granule : granules) {
    const uint32_t ordinal = ordinal_of_device_address(granule);
    ordinals.insert(ordinal);
    contexts_.use(ordinal);
    if (!device_.clear(granule, kGranule, nullptr)) return Error{"the device could not clear its memory", "failed"};
  }
  for (const uint32_t ordinal : ordinals) {
    contexts_.use(ordinal);
    if (!device_.synchronize()) return Error{"the device could not clear its memory", "failed"};
  }
  return {};
}

Result<> Ahead::step() {
  const size_t end = std::min(next_ + kGranulesAtOnce, wanted_.size());
  std::vector<StagingCopy::Piece> pieces;
  for (size_t i = next_; i < end; ++i) pieces.push_back(wanted_[i].second);
  if (Result<> copied = staging_copy_.to_device(pieces); !copied) return Error{copied.why(), "failed"};
  while (next_ < end) {
    const uint32_t ordinal = wanted_[next_].second.ordinal;
    std::vector<device::Chunk> chunks;
    for (size_t i = next_; i < end && wanted_[i].second.ordinal == ordinal; ++i) {
      chunks.push_back({wanted_[i].first.address, kGranule});
    }
    std::vector<uint64_t> hashes(chunks.size());
    contexts_.use(ordinal);
    if (!device_.hash(chunks, hashes, std::nullopt)) return Error{"the device could not hash its memory", "failed"};
    for (const uint64_t hash : hashes) {
      const ChunkState& chunk = wanted_[next_++].first;
      report_.copied_bytes += kGranule;
      if (hash != chunk.hash) continue;  // its place has been used for something else: a later round has it
      known_.insert_or_assign(chunk.address, hash);
      report_.settled_bytes += kGranule;
    }
  }
  return {};
}

RoundReport Ahead::end() {
  report_.differing_bytes = report_.total_bytes - report_.settled_bytes;
  report_.ms = static_cast<double>(now_ns() - began_) / 1e6;
  forget();
  return report_;
}

void Ahead::forget() {
  round_.reset();
  sources_.clear();
  wanted_.clear();
  next_ = 0;
}

void Ahead::hand_over(std::vector<Hosted>& given, uint64_t first_id, Incoming& incoming) {
  forget();
  std::vector<Hosted> made = hosting_.give();
  std::vector<ipc::UniqueFd> again;
  for (const Hosted& memory : made) again.emplace_back(::fcntl(memory.fd.get(), F_DUPFD_CLOEXEC, 3));
  if (std::ranges::any_of(again, [](const ipc::UniqueFd& fd) { return !fd; })) {  // as without a round
    for (Hosted& memory : made) physical_.let_go(memory);
    known_.clear();
    return;
  }
  physical_.taken(first_id - 1);
  for (const Hosted& memory : given) physical_.taken(memory.id);
  for (size_t i = 0; i < made.size(); ++i) {
    Hosted& memory = made[i];
    memory.id = physical_.next_id();
    given.push_back({memory.id, memory.kind, memory.ordinal, memory.address, memory.bytes, memory.name, std::move(again[i])});
    physical_.made_ahead(std::move(memory));
  }
  incoming.know(std::exchange(known_, {}), report_.copied_bytes);
}

}  // namespace xmig::server
