#include "server/snapshot/host_copies.h"

#include <sys/stat.h>

#include <algorithm>
#include <iterator>
#include <mutex>
#include <optional>
#include <span>
#include <system_error>
#include <utility>

#include "ipc/whole.h"
#include "server/clock.h"

namespace xmig::server {

using journal::kGranule;

namespace {

constexpr size_t kBatch = 16;  // granules: so long a snapshot may have to wait

// Nothing, if they cannot be read: then more is copied than needs to be.
std::vector<uint64_t> hashes_in(const ipc::UniqueFd& file) {
  struct stat about {};
  if (!file || ::fstat(file.get(), &about) != 0 || about.st_size <= 0) return {};
  std::vector<uint64_t> hashes(static_cast<size_t>(about.st_size) / sizeof(uint64_t));
  return ipc::read_all(file.get(), std::as_writable_bytes(std::span(hashes)), 0) ? hashes : std::vector<uint64_t>{};
}

}  // namespace

void HostCopies::make(std::vector<ReplicaSource> others, CopyUnique request) {
  stop();
  stopping_ = false;
  {
    const std::lock_guard lock(memory_.mutex);
    memory_.copy_log.keep_on_host();
  }
  try {
    thread_ = std::thread([this, others = std::move(others), request = std::move(request)] { run(others, request); });
  } catch (const std::system_error&) {
    // No thread to be had: after the next snapshot perhaps.
  }
}

void HostCopies::stop() {
  stopping_ = true;
  if (thread_.joinable()) thread_.join();
}

void HostCopies::run(const std::vector<ReplicaSource>& others, const CopyUnique& request) {
  std::unordered_set<uint64_t> theirs;
  for (const uint64_t hash : hashes_in(request.elsewhere)) theirs.insert(hash);
  for (const ReplicaSource& other : others) {
    const std::optional<SnapshotContent> content = newest_of(other.snapshots);
    if (!content) continue;
    for (const ChunkState& chunk : content->chunks) {
      if (chunk.slot != 0) theirs.insert(chunk.hash);
    }
  }
  Wanted wanted;
  if (!look(request.snapshot, theirs, wanted) || stopping_) return;
  const uint64_t bytes = wanted.size() * kGranule;
  const bool fits = bytes <= request.bytes;
  release_others_than(fits ? wanted : Wanted{});
  const bool made = fits && copy(wanted, request.snapshot);
  const uint64_t held = copies_.size() * kGranule;
  const uint64_t brought = brought_to_device();
  services_.daemon.copies_made(request.snapshot, held, (made ? 0 : bytes - std::min(bytes, held)) + brought, brought);
}

// What copies from page-locked memory have brought since the snapshot, before they were to bring it to host memory.
uint64_t HostCopies::brought_to_device() {
  const std::lock_guard lock(memory_.mutex);
  return memory_.copy_log.bytes_on_device();
}

// What of it only this device has. What is in host memory anyway needs no copy. False: there is a newer one, of which the daemon requests
// the same when it knows what the others have at it.
bool HostCopies::look(uint64_t snapshot, const std::unordered_set<uint64_t>& theirs, Wanted& wanted) {
  const auto batch = staging_.begin_batch_unless(stopping_);
  if (!batch || snapshots_.number() != snapshot) return false;
  const std::lock_guard lock(memory_.mutex);
  for (const ChunkState& chunk : snapshots_.chunks()) {
    const bool alone = chunk.slot != 0 && !theirs.contains(chunk.hash) && memory_.shadow.on_device(chunk.slot);
    if (alone) wanted.emplace(chunk.hash, chunk.slot);
  }
  return true;
}

void HostCopies::release_others_than(const Wanted& wanted) {
  const std::lock_guard lock(memory_.mutex);
  std::erase_if(copies_, [&](const auto& copy) {
    if (wanted.contains(copy.first)) return false;
    memory_.shadow.free(copy.second);
    return true;
  });
}

// False: not all of it.
bool HostCopies::copy(const Wanted& wanted, uint64_t snapshot) {
  for (auto at = wanted.begin(); at != wanted.end();) {
    const auto batch = staging_.begin_batch_unless(stopping_);
    if (!batch || snapshots_.number() != snapshot || !copy_batch(at, wanted)) return false;
  }
  return true;
}

bool HostCopies::copy_batch(Wanted::const_iterator& at, const Wanted& wanted) {
  Granules::Moves moves;
  std::vector<std::pair<uint64_t, uint64_t>> made;
  {
    const std::lock_guard lock(memory_.mutex);
    const uint64_t left = static_cast<uint64_t>(std::distance(at, wanted.end()));
    for (; at != wanted.end() && made.size() < kBatch; ++at) {
      if (copies_.contains(at->first)) continue;
      const uint32_t ordinal = ordinal_of_slot(at->second);
      const std::optional<uint64_t> slot = memory_.shadow.allocate(ordinal, Place::kHost, left, true);
      if (!slot) break;
      granules_.add(moves, *slot, at->second);
      made.emplace_back(at->first, *slot);
    }
    if (made.empty()) return at == wanted.end();
  }
  const bool copied = static_cast<bool>(granules_.copy(moves, Granules::While::kRunning));
  if (copied) {
    copies_.insert(made.begin(), made.end());
  } else {
    const std::lock_guard lock(memory_.mutex);
    for (const auto& [hash, slot] : made) memory_.shadow.free(slot);
  }
  return copied;
}

}  // namespace xmig::server
