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
#include "journal/numbers.h"
#include "journal/record_info.h"
#include "server/clock.h"
#include "server/records/record.h"
#include "server/snapshot/rounding.h"

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

void SnapshotCopy::make(uint64_t number, uint64_t since, uint32_t keep_bits, std::vector<ipc::UniqueFd> room) {
  stop();
  stopping_ = begun_ = false;
  under_way_ = true;
  try {
    thread_ = std::thread([this, number, since, keep_bits, room = std::move(room)]() mutable {
      run(number, since, keep_bits, std::move(room));
    });
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

void SnapshotCopy::run(uint64_t number, uint64_t since, uint32_t keep_bits, std::vector<ipc::UniqueFd> room) {
  const uint64_t start = now_ns();
  Copies copies;
  Result<SnapshotContent> content = Error{"it was given up"};
  {
    const auto still = staging_.begin_batch_unless(stopping_);
    begun_ = true;
    begun_.notify_all();
    if (still) content = copy(number, since, keep_bits, copies, std::move(room));
  }
  under_way_ = false;  // the shadow is not needed any more, so the next snapshot does not wait for what follows
  Result<ipc::UniqueFd> file = content ? finish(keep_bits, copies, *content) : Result<ipc::UniqueFd>(content.error());
  if (!file) return services_.daemon.snapshot_not_copied(number, file.why());
  for (Slab& slab : copies.slabs) {
    services_.daemon.snapshot_slab(number, slab.ordinal, slab.address, slab.bytes, slab.kind == kRounded, slab.fd.get());
    slab.fd.reset();  // before the daemon has all of them: it keeps only what nobody else can write to
  }
  services_.daemon.snapshot_copied(number, copies.bytes, static_cast<double>(now_ns() - start) / 1e6, copies.rounded, file->get());
}

// The snapshot's file as it is, whose content is in the copies then.
Result<SnapshotContent> SnapshotCopy::copy(uint64_t number, uint64_t since, uint32_t keep_bits, Copies& copies,
                                           std::vector<ipc::UniqueFd> room) {
  if (snapshots_.number() != number) return Error{"another snapshot was taken since"};
  if (snapshots_.lacks_lost()) return Error{"a part of it was lost with a device, and is nowhere but in the program's memory"};
  Result<SnapshotContent> content = read_snapshot_file(services_.job.fds().snapshot[number & 1].get());
  if (!content) return content.error();
  if (content->number != number || content->chunks.size() != snapshots_.chunks().size()) {
    return Error{"the snapshot's file is another one's"};
  }
  if (keep_bits != 0) {
    if (Result<> found = find_numbers(*content, copies); !found) return found.error();
  }
  if (const Result<> placed = place(since, copies, std::move(room)); !placed) return placed.error();
  if (const Result<> filled = fill(copies); !filled) return filled.error();
  return content;
}

Result<ipc::UniqueFd> SnapshotCopy::finish(uint32_t keep_bits, Copies& copies, SnapshotContent& content) {
  if (const Result<> rounded = round(keep_bits, copies, content); !rounded) return rounded.error();
  return describe(content, copies);
}

// As they were named when the snapshot was taken: the program goes on meanwhile.
Result<> SnapshotCopy::find_numbers(const SnapshotContent& content, Copies& copies) const {
  std::vector<journal::NamedNumbers> named;
  for (const std::span<const std::byte> stored : content.objects) {
    Record record;
    if (!record.load_stored(stored)) return Error{"a record of the snapshot is none"};
    if (static_cast<Op>(record.header().op) != kNamesNumbers) continue;
    journal::NamedNumbers& numbers = named.emplace_back();
    if (!record.arguments(numbers) || !numbers.sound()) return Error{"numbers that are named are none"};
  }
  std::ranges::sort(named, {}, &journal::NamedNumbers::address);
  size_t chunk = 0;
  for (const journal::NamedNumbers& numbers : named) {
    RoundedNumbers& found = copies.rounded[numbers.type];
    ++found.ranges;
    uint64_t at = numbers.address;
    const uint64_t end = numbers.address + numbers.bytes;
    while (at < end) {
      const uint64_t granule = at / kGranule * kGranule, next = std::min(end, granule + kGranule);
      while (chunk < content.chunks.size() && content.chunks[chunk].address < granule) ++chunk;
      const bool here = chunk < content.chunks.size() && content.chunks[chunk].address == granule;
      if (here && content.chunks[chunk].slot != 0) {
        copies.numbers.push_back({.chunk = chunk, .offset = at - granule, .bytes = next - at, .type = numbers.number_type()});
      } else {
        found.bytes += next - at;  // zeros
      }
      at = next;
    }
  }
  return {};
}

// Each device's content lies one behind the other, as in the host's part of its shadow; what is known, and what is rounded, in pieces of
// their own.
Result<> SnapshotCopy::place(uint64_t since, Copies& copies, std::vector<ipc::UniqueFd> room) {
  const std::vector<ChunkState>& chunks = snapshots_.chunks();
  const std::vector<uint64_t>& written = snapshots_.written();
  std::vector<Kind> kinds(chunks.size());
  for (size_t i = 0; i < chunks.size(); ++i) {
    const auto rounded = rounded_.find(chunks[i].address);
    const bool exact = rounded == rounded_.end() || rounded->second < since;
    kinds[i] = written[i] <= since && exact ? kKnown : kCopied;
  }
  for (const Numbers& numbers : copies.numbers) kinds[numbers.chunk] = kRounded;
  ByDevice by_device;
  for (size_t i = 0; i < chunks.size(); ++i) {
    by_device.filling[kinds[i]][ordinal_of_device_address(chunks[i].address)].left += chunks[i].slot != 0;
  }
  auto numbers = copies.numbers.begin();
  const std::lock_guard lock(memory_.mutex);
  for (size_t i = 0; i < chunks.size(); ++i) {
    const ChunkState& chunk = chunks[i];
    if (chunk.slot == 0) {
      copies.slots.push_back(0);
      continue;
    }
    const uint32_t ordinal = ordinal_of_device_address(chunk.address);
    Filling& filling = by_device.filling[kinds[i]][ordinal];
    if (!filling.slab || filling.used == copies.slabs[*filling.slab].bytes) {
      if (Result<> begun = begin_slab(ordinal, kinds[i], by_device, copies, room); !begun) return begun;
    }
    const Slab& slab = copies.slabs[*filling.slab];
    const uint64_t offset = filling.used;
    filling.used += kGranule;
    --filling.left;
    copies.slots.push_back(slab.address + offset);
    if (kinds[i] == kKnown) continue;
    for (; numbers != copies.numbers.end() && numbers->chunk == i; ++numbers) {
      numbers->to = slab.fd.get();
      numbers->at = offset;
    }
    if (const auto plain = memory_.shadow.plain_at(chunk.slot)) {
      copies.from_plain.push_back({*plain, slab.fd.get(), offset});
    } else {
      copies.from_device.push_back({chunk.slot, slab.fd.get(), offset, ordinal});
    }
    copies.bytes += kGranule;
  }
  return {};
}

Result<> SnapshotCopy::begin_slab(uint32_t ordinal, Kind kind, ByDevice& by_device, Copies& copies, std::vector<ipc::UniqueFd>& room) {
  Filling& filling = by_device.filling[kind][ordinal];
  uint64_t& end = by_device.end[ordinal];
  const uint64_t address = end != 0 ? end : host_shadow_base(ordinal);
  const uint64_t bytes = std::min(filling.left * kGranule, kPlainBytes);
  ipc::UniqueFd fd;
  if (kind != kKnown && !room.empty()) {
    fd = std::move(room.back());
    room.pop_back();
    if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) fd.reset();
  }
  if (kind != kKnown && !fd) {
    Result<ipc::UniqueFd> made = new_memory("xmig-checkpoint", bytes);
    if (!made) return made.error();
    fd = *std::move(made);
  }
  end = address + kPlainBytes;  // wherever another one begins, as in a shadow
  filling.slab = copies.slabs.size();
  filling.used = 0;
  copies.slabs.push_back({ordinal, address, bytes, kind, std::move(fd)});
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

// In the copy, of which each such chunk gets the hash of what it has now.
Result<> SnapshotCopy::round(uint32_t keep_bits, Copies& copies, SnapshotContent& content) {
  std::vector<std::byte> buffer(copies.numbers.empty() ? 0 : kGranule);
  const auto no_room = [] { return Error{std::string("the copy cannot be rounded: ") + std::strerror(errno)}; };
  for (auto at = copies.numbers.cbegin(); at != copies.numbers.cend();) {
    if (stopping_) return Error{"it was given up"};
    const Numbers& first = *at;
    if (!ipc::read_all(first.to, buffer, first.at)) return no_room();
    for (; at != copies.numbers.cend() && at->chunk == first.chunk; ++at) {
      RoundedNumbers& found = copies.rounded[static_cast<size_t>(at->type)];
      round_numbers(std::span(buffer).subspan(at->offset, at->bytes), at->type, keep_bits, found);
    }
    ChunkState& chunk = content.chunks[first.chunk];
    rounded_[chunk.address] = content.number;
    chunk.hash = services_.device.hash_of(buffer);
    if (!ipc::write_all(first.to, buffer, first.at)) return no_room();
  }
  return {};
}

// The snapshot's file, with the places of the copies.
Result<ipc::UniqueFd> SnapshotCopy::describe(SnapshotContent& content, const Copies& copies) {
  for (size_t i = 0; i < copies.slots.size(); ++i) content.chunks[i].slot = copies.slots[i];
  const std::vector<std::byte> bytes = serialise(content);
  Result<ipc::UniqueFd> file = new_memory("xmig-snapshot", bytes.size());
  if (file && !ipc::write_all(file->get(), bytes)) return Error{std::string("host memory has no room: ") + std::strerror(errno)};
  return file;
}

}  // namespace xmig::server
