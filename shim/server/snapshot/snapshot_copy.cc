#include "server/snapshot/snapshot_copy.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <span>
#include <system_error>
#include <utility>

#include "ipc/whole.h"
#include "server/clock.h"

namespace xmig::server {

using journal::kGranule;

namespace {

constexpr size_t kGranulesAtOnce = 1024;  // granules between two looks at whether it is given up

Result<ipc::UniqueFd> new_memory(const char* name, uint64_t bytes) {
  ipc::UniqueFd fd(::memfd_create(name, MFD_CLOEXEC));
  if (fd && ::ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0) return fd;
  return Error{std::string("host memory cannot be made: ") + std::strerror(errno)};
}

}  // namespace

void SnapshotCopy::make(uint64_t number, uint64_t since, std::vector<ipc::UniqueFd> room) {
  stop();
  stopping_ = begun_ = false;
  under_way_ = true;
  try {
    thread_ = std::thread([this, number, since, room = std::move(room)]() mutable { run(number, since, std::move(room)); });
  } catch (const std::system_error& error) {
    under_way_ = false;
    return services_.daemon.snapshot_not_copied(number, std::string("there is no thread: ") + error.what());
  }
  begun_.wait(false);
}

void SnapshotCopy::stop() {
  stopping_ = true;
  if (thread_.joinable()) thread_.join();
}

void SnapshotCopy::run(uint64_t number, uint64_t since, std::vector<ipc::UniqueFd> room) {
  const uint64_t start = now_ns();
  Copies copies;
  Result<ipc::UniqueFd> file = Error{"it was given up"};
  {
    const auto still = staging_.begin_batch_unless(stopping_);
    begun_ = true;
    begun_.notify_all();
    if (still) file = copy(number, since, copies, std::move(room));
  }
  under_way_ = false;
  if (!file) return services_.daemon.snapshot_not_copied(number, file.why());
  for (const Slab& slab : copies.slabs) {
    services_.daemon.snapshot_slab(number, slab.ordinal, slab.address, slab.bytes, slab.fd.get());
  }
  services_.daemon.snapshot_copied(number, copies.bytes, static_cast<double>(now_ns() - start) / 1e6, file->get());
}

Result<ipc::UniqueFd> SnapshotCopy::copy(uint64_t number, uint64_t since, Copies& copies, std::vector<ipc::UniqueFd> room) {
  if (snapshots_.number() != number) return Error{"another snapshot was taken since"};
  if (snapshots_.lacks_lost()) return Error{"a part of it was lost with a device, and is nowhere but in the program's memory"};
  if (const Result<> placed = place(since, copies, std::move(room)); !placed) return placed.error();
  if (const Result<> filled = fill(copies); !filled) return filled.error();
  return describe(number, copies);
}

// Each device's content lies one behind the other, as in the host's part of its shadow; what is known in pieces of its own.
Result<> SnapshotCopy::place(uint64_t since, Copies& copies, std::vector<ipc::UniqueFd> room) {
  const std::vector<ChunkState>& chunks = snapshots_.chunks();
  const std::vector<uint64_t>& written = snapshots_.written();
  const auto is_known = [&](size_t i) { return written[i] <= since; };
  ByDevice by_device;
  for (size_t i = 0; i < chunks.size(); ++i) {
    auto& filling = is_known(i) ? by_device.known : by_device.copied;
    filling[ordinal_of_device_address(chunks[i].address)].left += chunks[i].slot != 0;
  }
  const std::lock_guard lock(memory_.mutex);
  for (size_t i = 0; i < chunks.size(); ++i) {
    const ChunkState& chunk = chunks[i];
    if (chunk.slot == 0) {
      copies.slots.push_back(0);
      continue;
    }
    const uint32_t ordinal = ordinal_of_device_address(chunk.address);
    Filling& filling = (is_known(i) ? by_device.known : by_device.copied)[ordinal];
    if (!filling.slab || filling.used == copies.slabs[*filling.slab].bytes) {
      if (Result<> begun = begin_slab(ordinal, is_known(i), by_device, copies, room); !begun) return begun;
    }
    const Slab& slab = copies.slabs[*filling.slab];
    const uint64_t offset = filling.used;
    filling.used += kGranule;
    --filling.left;
    copies.slots.push_back(slab.address + offset);
    if (is_known(i)) continue;
    if (const auto plain = memory_.shadow.plain_at(chunk.slot)) {
      copies.from_plain.push_back({*plain, slab.fd.get(), offset});
    } else {
      copies.from_device.push_back({chunk.slot, slab.fd.get(), offset, ordinal});
    }
    copies.bytes += kGranule;
  }
  return {};
}

Result<> SnapshotCopy::begin_slab(uint32_t ordinal, bool known, ByDevice& by_device, Copies& copies, std::vector<ipc::UniqueFd>& room) {
  Filling& filling = (known ? by_device.known : by_device.copied)[ordinal];
  uint64_t& end = by_device.end[ordinal];
  const uint64_t address = end != 0 ? end : host_shadow_base(ordinal);
  const uint64_t bytes = std::min(filling.left * kGranule, kPlainBytes);
  ipc::UniqueFd fd;
  if (!known && !room.empty()) {
    fd = std::move(room.back());
    room.pop_back();
    if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) fd.reset();
  }
  if (!known && !fd) {
    Result<ipc::UniqueFd> made = new_memory("xmig-checkpoint", bytes);
    if (!made) return made.error();
    fd = *std::move(made);
  }
  end = address + kPlainBytes;  // wherever another one begins, as in a shadow
  filling.slab = copies.slabs.size();
  filling.used = 0;
  copies.slabs.push_back({ordinal, address, bytes, std::move(fd)});
  return {};
}

Result<> SnapshotCopy::fill(const Copies& copies) {
  const std::span<const StagingCopy::Piece> pieces(copies.from_device);
  uint64_t done = 0, reported = now_ns();
  const auto passed = [&](size_t granules) {
    done += granules * kGranule;
    if (now_ns() - reported < kProgressEvery) return;
    reported = now_ns();
    services_.daemon.suspend_progress(done, copies.bytes);
  };
  const Error given_up{"it was given up"};
  for (size_t first = 0; first < pieces.size(); first += kGranulesAtOnce) {
    if (stopping_) return given_up;
    const auto batch = pieces.subspan(first, std::min(kGranulesAtOnce, pieces.size() - first));
    if (Result<> copied = granules_.staging_copy().to_plain(batch); !copied) return copied;
    passed(batch.size());
  }
  std::vector<std::byte> buffer(copies.from_plain.empty() ? 0 : kGranule);
  for (const Copies::Plain& piece : copies.from_plain) {
    if (stopping_) return given_up;
    if (!ipc::read_all(piece.from.fd, buffer, piece.from.offset) || !ipc::write_all(piece.to, buffer, piece.offset)) {
      return Error{std::string("host memory has no room for the copy: ") + std::strerror(errno)};
    }
    passed(1);
  }
  return {};
}

// The snapshot's file, with the places of the copies.
Result<ipc::UniqueFd> SnapshotCopy::describe(uint64_t number, const Copies& copies) const {
  Result<SnapshotContent> content = read_snapshot_file(services_.job.fds().snapshot[number & 1].get());
  if (!content) return content.error();
  if (content->number != number || content->chunks.size() != copies.slots.size()) return Error{"the snapshot's file is another one's"};
  for (size_t i = 0; i < copies.slots.size(); ++i) content->chunks[i].slot = copies.slots[i];
  const std::vector<std::byte> bytes = serialise(*content);
  Result<ipc::UniqueFd> file = new_memory("xmig-snapshot", bytes.size());
  if (file && !ipc::write_all(file->get(), bytes)) return Error{std::string("host memory has no room: ") + std::strerror(errno)};
  return file;
}

}  // namespace xmig::server
