#include "server/memory/granules.h"

namespace xmig::server {

using journal::kGranule;

// A snapshot's own kernel and copies go where the program's last kernel went. In a stream of their own they left an H200 in a state
// in which each of the program's kernels begins 0.3 us later behind the one before (decision 0020).
device::Runtime::Where Granules::where(uint32_t ordinal, While when) const {
  if (when == While::kRunning) return std::nullopt;
  return kernels_in_[ordinal];
}

bool Granules::hash(const std::vector<uint64_t>& granules, std::vector<uint64_t>& hashes, While when) {
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

void Granules::add(Moves& moves, uint64_t to, uint64_t from) const {
  const auto plain = [this](uint64_t at) { return at >= kShadowBase ? shadow_.plain_at(at) : std::nullopt; };
  if (const auto target = plain(to)) {
    moves.to_plain.push_back({from, target->fd, target->offset, ordinal_of_address(from), target->mapped ? to : 0});
  } else if (const auto source = plain(from)) {
    moves.from_plain.push_back({to, source->fd, source->offset, ordinal_of_address(to)});
  } else {
    moves.direct.emplace_back(to, from);
  }
}

bool Granules::copy(const std::vector<Move>& all) {
  Moves moves;
  for (const auto& [to, from] : all) add(moves, to, from);
  return static_cast<bool>(copy(moves));
}

Result<> Granules::copy(const Moves& moves, While when) {
  if (Result<> copied = staging_copy_.to_plain(moves.to_plain); !copied) return copied;
  if (Result<> copied = staging_copy_.to_device(moves.from_plain); !copied) return copied;
  std::vector<device::Move> batch;  // of one device
  uint32_t batch_ordinal = 0;
  const auto flush = [&] {
    if (batch.empty()) return true;
    contexts_.use(batch_ordinal);
    return device_.copy(std::exchange(batch, {}), where(batch_ordinal, when));
  };
  const Error failed{"the device could not copy"};
  for (const auto& [to, from] : moves.direct) {
    const uint32_t ordinal = ordinal_of_address(std::min(to, from));  // the device's range lies below the shadow's
    if (ordinal != batch_ordinal && !flush()) return failed;
    batch_ordinal = ordinal;
    if (!batch.empty() && batch.back().to + batch.back().bytes == to && batch.back().from + batch.back().bytes == from) {
      batch.back().bytes += kGranule;
    } else {
      batch.push_back({to, from, kGranule});
    }
  }
  if (!flush()) return failed;
  return {};
}

bool Granules::copy_and_hash(const std::vector<Move>& moves, std::vector<uint64_t>& hashes) {
  std::vector<uint64_t> granules;
  for (const auto& [to, from] : moves) granules.push_back(to);
  return copy(moves) && hash(granules, hashes);
}

bool Granules::copy_and_hash(const std::vector<device::Move>& moves, std::span<uint64_t> hashes, uint32_t ordinal) {
  contexts_.use(ordinal);
  return device_.copy_and_hash(moves, hashes, where(ordinal));
}

void Granules::clear(const std::vector<uint64_t>& granules) {
  for (const uint64_t address : granules) {
    contexts_.use(ordinal_of_device_address(address));
    faults_.check(device_.clear(address, kGranule, nullptr));
  }
  for (uint32_t ordinal = 0; ordinal < contexts_.count(); ++ordinal) {
    if (!contexts_.is_open(ordinal)) continue;
    contexts_.use(ordinal);
    faults_.check(device_.synchronize());
  }
}

}  // namespace xmig::server
