#include "server/recovery/replicas.h"

#include <fcntl.h>

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "ipc/whole.h"
#include "server/clock.h"

namespace xmig::server {

using journal::kGranule;

namespace {

std::string in_mib(size_t chunks) { return std::to_string(chunks * kGranule >> 20) + " MiB"; }

Error nobody_has(const std::vector<ChunkState>& missing, size_t all, size_t ranks) {
  char first[20];
  std::snprintf(first, sizeof(first), "%#llx", static_cast<unsigned long long>(missing.front().address));
  return Error{"its device was lost with its memory, and " + std::to_string(missing.size()) + " of " + std::to_string(all) +
               " chunks (" + in_mib(missing.size()) + ", the first at " + first + ") are in the memory of no other rank, and have no copy in host memory; " +
               std::to_string(ranks) + " that could have them were searched"};
}

}  // namespace

Result<> Replicas::fill(const std::vector<ChunkState>& lost, uint64_t sequence) {
  if (lost.empty()) return {};
  const std::vector<ChunkState> without_copy = take_copies(lost, sequence);
  if (without_copy.empty()) return {};
  const Result<Brought> brought = bring(without_copy, sequence, "that were lost with a device");
  if (!brought) return brought.error();
  if (brought->missing.empty()) return {};
  return nobody_has(brought->missing, lost.size(), brought->ranks);
}

Result<Replicas::Brought> Replicas::bring(const std::vector<ChunkState>& chunks, uint64_t sequence, const char* what) {
  const uint64_t start = now_ns();
  services_.daemon.replicas_wanted(chunks.size() * kGranule);
  std::optional<ReplicaSources::Named> sources = services_.replica_sources.wait();
  if (!sources) return Error{"the daemon has gone, and nobody else knows where memory has replicas", kInterrupted};
  const uint64_t begun = now_ns();
  std::vector<ChunkState> wanted = chunks;
  for (ReplicaSource& source : sources->near) {
    if (!wanted.empty()) wanted = take(source, wanted, sequence);
  }
  services_.log(Level::kInfo, in_mib(chunks.size() - wanted.size()) + " of " + in_mib(chunks.size()) + " " + what +
                                  " were copied from other ranks in " + in_ms(now_ns() - begun) +
                                  ", after " + in_ms(begun - start) + " until they were there");
  for (uint32_t rank = 0; rank < sources->far && !wanted.empty(); ++rank) {
    Result<std::vector<ChunkState>> left = take_far(rank, wanted, sequence);
    if (!left) return left.error();
    wanted = *std::move(left);
  }
  return Brought{std::move(wanted), sources->near.size() + sources->far};
}

Result<std::vector<ChunkState>> Replicas::take_far(uint32_t rank, const std::vector<ChunkState>& wanted, uint64_t sequence) {
  const uint64_t start = now_ns();
  std::vector<ChunkState> left;
  for (std::span<const ChunkState> rest(wanted); !rest.empty();) {
    std::vector<ChunkHash> hashes;
    for (const ChunkState& chunk : rest.first(std::min(rest.size(), kMostChunks))) hashes.emplace_back(chunk.address, chunk.hash);
    services_.daemon.chunks_wanted(rank, hashes);
    const std::optional<ChunksBrought> brought = services_.replica_sources.await_chunks();
    if (!brought) return Error{"the daemon has gone, and nobody else reaches the other nodes", kInterrupted};
    const bool over = !brought->why.empty() || brought->examined == 0 || brought->examined > hashes.size();
    if (over) {
      services_.log(Level::kWarning, "nothing more comes from another node: " + brought->why);
      left.insert(left.end(), rest.begin(), rest.end());
      break;
    }
    const std::vector<ChunkState> missing = take(*brought, rest.first(brought->examined), sequence);
    left.insert(left.end(), missing.begin(), missing.end());
    rest = rest.subspan(brought->examined);
  }
  services_.log(Level::kInfo, in_mib(wanted.size() - left.size()) + " of " + in_mib(wanted.size()) +
                                  " that were lost with a device came from another node in " + in_ms(now_ns() - start));
  return left;
}

// In order, of those that were examined.
std::vector<ChunkState> Replicas::take(const ChunksBrought& brought, std::span<const ChunkState> wanted, uint64_t sequence) {
  std::vector<StagingCopy::Piece> pieces;
  std::vector<Match> matches;
  std::vector<ChunkState> left;
  for (size_t i = 0; i < wanted.size(); ++i) {
    const ChunkState& chunk = wanted[i];
    if (pieces.size() < brought.found.size() && brought.found[pieces.size()] == i) {
      pieces.push_back({chunk.address, brought.content.get(), pieces.size() * kGranule, ordinal_of_device_address(chunk.address)});
      matches.push_back({chunk, 0});
    } else {
      left.push_back(chunk);
    }
  }
  if (matches.empty()) return left;
  const Result<> copied = granules_.staging_copy().to_device(pieces);
  if (!copied) services_.log(Level::kWarning, "what came from another node cannot be read: " + copied.why());
  const std::vector<ChunkState> wrong = differing(matches, sequence);
  left.insert(left.end(), wrong.begin(), wrong.end());
  std::ranges::sort(left, {}, &ChunkState::address);
  return left;
}

// Which content they have is not written anywhere: it is hashed.
std::vector<ChunkState> Replicas::take_copies(const std::vector<ChunkState>& wanted, uint64_t sequence) {
  const uint64_t start = now_ns();
  std::unordered_map<uint64_t, std::optional<Shadow::PlainAt>> copies;  // by hash
  for (const ChunkState& chunk : wanted) copies.emplace(chunk.hash, std::nullopt);
  std::vector<Shadow::PlainAt> unused;
  {
    const std::lock_guard lock(memory_.mutex);
    unused = memory_.shadow.unused_plain();
  }
  std::vector<std::byte> buffer(unused.empty() ? 0 : kGranule);
  for (const Shadow::PlainAt& at : unused) {
    if (!ipc::read_all(at.fd, buffer, at.offset)) continue;
    const auto found = copies.find(services_.device.hash_of(buffer));
    if (found != copies.end()) found->second = at;
  }
  std::vector<StagingCopy::Piece> pieces;
  std::vector<Match> matches;
  std::vector<ChunkState> left;
  for (const ChunkState& chunk : wanted) {
    if (const auto& copy = copies.at(chunk.hash)) {
      pieces.push_back({chunk.address, copy->fd, copy->offset, ordinal_of_device_address(chunk.address)});
      matches.push_back({chunk, 0});
    } else {
      left.push_back(chunk);
    }
  }
  if (matches.empty()) return left;
  const Result<> copied = granules_.staging_copy().to_device(pieces);
  if (!copied) services_.log(Level::kWarning, "copies in host memory cannot be read: " + copied.why());
  const std::vector<ChunkState> wrong = differing(matches, sequence);
  left.insert(left.end(), wrong.begin(), wrong.end());
  std::ranges::sort(left, {}, &ChunkState::address);
  services_.log(Level::kInfo, in_mib(matches.size() - wrong.size()) + " of " + in_mib(wanted.size()) +
                                  " that were lost with a device were copied from host memory in " + in_ms(now_ns() - start));
  return left;
}

// Equal content at the same address goes first: it is a replica; elsewhere it is equal by chance.
std::vector<ChunkState> Replicas::take(ReplicaSource& source, const std::vector<ChunkState>& wanted, uint64_t sequence) {
  const std::optional<SnapshotContent> content = newest_of(source.snapshots);
  if (!content) return wanted;
  std::unordered_map<uint64_t, uint64_t> slots;  // by hash
  for (const ChunkState& chunk : wanted) slots.emplace(chunk.hash, 0);
  std::map<uint64_t, const ChunkState*> at;
  for (const ChunkState& chunk : content->chunks) {
    if (chunk.slot == 0) continue;
    const auto found = slots.find(chunk.hash);
    if (found == slots.end()) continue;
    found->second = chunk.slot;
    at.emplace(chunk.address, &chunk);
  }
  std::map<uint64_t, Hosted*> slabs;
  for (Hosted& slab : source.shadow) slabs.emplace(slab.address, &slab);
  std::map<Hosted*, std::vector<Match>> matches;
  std::vector<ChunkState> left;
  for (const ChunkState& chunk : wanted) {
    const auto same = at.find(chunk.address);
    const uint64_t slot = same != at.end() && same->second->hash == chunk.hash ? same->second->slot : slots.at(chunk.hash);
    const auto slab = slabs.upper_bound(slot);
    const bool there = slot % kGranule == 0 && slab != slabs.begin() && slot - std::prev(slab)->first < std::prev(slab)->second->bytes;
    if (there) {
      matches[std::prev(slab)->second].push_back({chunk, slot});
    } else {
      left.push_back(chunk);
    }
  }
  for (const auto& [slab, its] : matches) {
    const std::vector<ChunkState> missing = take(*slab, its, sequence);
    left.insert(left.end(), missing.begin(), missing.end());
  }
  std::ranges::sort(left, {}, &ChunkState::address);
  return left;
}

std::vector<ChunkState> Replicas::take(Hosted& slab, const std::vector<Match>& matches, uint64_t sequence) {
  if (slab.place() != Place::kDevice) return take_plain(slab, matches, sequence);
  // Each device of this process needs a mapping that it can reach.
  std::vector<ChunkState> left;
  std::map<uint32_t, std::vector<Match>> by_ordinal;
  for (const Match& match : matches) by_ordinal[ordinal_of_device_address(match.chunk.address)].push_back(match);
  for (const auto& [ordinal, its] : by_ordinal) {
    const std::vector<ChunkState> missing = take_mapped(slab, its, sequence);
    left.insert(left.end(), missing.begin(), missing.end());
  }
  return left;
}

// In this process's own range of shadows, at addresses that it does not use.
std::vector<ChunkState> Replicas::take_mapped(Hosted& slab, const std::vector<Match>& matches, uint64_t sequence) {
  std::vector<ChunkState> all;
  for (const Match& match : matches) all.push_back(match.chunk);
  const uint32_t ordinal = ordinal_of_device_address(all.front().address);
  std::optional<uint64_t> address;
  if (ordinal < services_.contexts.count() && whole_granules(kGranule, slab.bytes)) {
    const std::lock_guard lock(memory_.mutex);
    address = memory_.shadow.set_aside(ordinal, Place::kDevice, slab.bytes);
  }
  if (!address) return all;
  Hosted window{.kind = HostedKind::kShadow, .ordinal = static_cast<int>(ordinal), .address = *address, .bytes = slab.bytes,
                .fd = ipc::UniqueFd(::fcntl(slab.fd.get(), F_DUPFD_CLOEXEC, 3)), .foreign = true};
  services_.contexts.use(ordinal);
  if (const Status mapped = memory_.physical.adopt(window); !mapped) {
    services_.log(Level::kWarning, "memory of another rank cannot be mapped (" + services_.device.text(mapped) + ")");
  } else {
    std::vector<Granules::Move> moves;
    for (const Match& match : matches) moves.emplace_back(match.chunk.address, *address + (match.slot - slab.address));
    if (!granules_.copy(moves)) services_.faults.give_up(sequence, "the device could not copy from another rank's shadow");
    all = differing(matches, sequence);
    memory_.physical.let_go(window);
  }
  const std::lock_guard lock(memory_.mutex);
  memory_.shadow.give_up(*address);
  return all;
}

// Host memory, or a file: it is read, whether or not the rank has it at an address.
std::vector<ChunkState> Replicas::take_plain(const Hosted& slab, const std::vector<Match>& matches, uint64_t sequence) {
  std::vector<StagingCopy::Piece> pieces;
  for (const Match& match : matches) {
    const uint64_t at = match.chunk.address;
    pieces.push_back({at, slab.fd.get(), match.slot - slab.address, ordinal_of_device_address(at)});
  }
  const Result<> copied = granules_.staging_copy().to_device(pieces);
  if (!copied) services_.log(Level::kWarning, "host memory of another rank cannot be read: " + copied.why());
  return differing(matches, sequence);
}

// What has arrived is right, or is not used.
std::vector<ChunkState> Replicas::differing(const std::vector<Match>& matches, uint64_t sequence) {
  std::vector<uint64_t> granules, hashes;
  for (const Match& match : matches) granules.push_back(match.chunk.address);
  if (!granules_.hash(granules, hashes)) services_.faults.give_up(sequence, "the device could not hash its memory");
  std::vector<ChunkState> wrong;
  for (size_t i = 0; i < matches.size(); ++i) {
    if (hashes[i] != matches[i].chunk.hash) wrong.push_back(matches[i].chunk);
  }
  if (!wrong.empty()) {
    services_.log(Level::kWarning, std::to_string(wrong.size()) + " chunks of another rank are not what its snapshot says: they are not used");
  }
  return wrong;
}

}  // namespace xmig::server
