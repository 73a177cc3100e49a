#include "server/recovery/recovery.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "journal/record_info.h"
#include "server/clock.h"
#include "server/peers.h"

namespace xmig::server {

using journal::kGranule;

namespace {

constexpr uint64_t kLongRestore = 10'000'000;  // ns

// Is there all of this memory?
bool covers(const std::vector<Hosted>& given, const std::vector<Extent>& memory) {
  std::map<uint64_t, uint64_t> there;
  for (const Hosted& one : given) {
    if (one.kind == HostedKind::kDevice) there.emplace(one.address, one.bytes);
  }
  const auto is_there = [&](const Extent& extent) {
    for (uint64_t at = extent.address; at < extent.address + extent.bytes;) {
      const auto next = there.upper_bound(at);
      if (next == there.begin() || at - std::prev(next)->first >= std::prev(next)->second) return false;
      at = std::prev(next)->first + std::prev(next)->second;
    }
    return true;
  };
  return std::ranges::all_of(memory, is_there);
}

}  // namespace

Result<> Recovery::follow(std::vector<Hosted> given, const Assign& assignment, Entry& entry) {
  Times times{now_ns()};
  if (Result<> checked = check_journal(); !checked) return checked;
  const bool ahead = !entry.is_open();
  if (!ahead) begin_to_write();
  Result<Found> found = look();
  if (!found) return found.error();
  find_unfinished(*found, assignment.decided);
  find_differing(*found, assignment);
  if (Result<> reached = check_reach(*found); !reached) return reached;
  Entry* const awaited = ahead ? &entry : nullptr;
  // Of one that has just been taken the shadow has everything, too.
  const bool lost = !found->snapshot_again() && !covers(given, found->content.memory);
  const Result<> recovered = found->memory_is_state() && !lost ? from_memory(*found, std::move(given), awaited, times)
                                                      : from_shadow(*found, std::move(given), awaited, times);
  if (!recovered) return recovered;
  hand_to_execution(*found, assignment.deliver, assignment.careful);
  return {};
}

Result<> Recovery::arrive(std::vector<Hosted> given, const std::function<Result<>()>& awaited) {
  Times times{now_ns()};
  if (Result<> checked = check_journal(); !checked) return checked;
  begin_to_write();
  Result<Found> found = look();
  if (!found) return found.error();
  if (Result<> reached = check_reach(*found); !reached) return reached;
  if (Result<> recovered = from_elsewhere(*found, std::move(given), times, !awaited); !recovered) return recovered;
  if (awaited) {
    if (Result<> entered = awaited(); !entered) return entered;
    execution_.entered();
    execution_.join_again();
  }
  hand_to_execution(*found, std::nullopt, std::nullopt);
  return {};
}

// --- the paths

Result<> Recovery::from_shadow(Found& found, std::vector<Hosted> given, Entry* entry, Times& times) {
  if (Result<> adopted = adopt(std::move(given)); !adopted) return adopted;
  find_lost(found);
  if (Result<> replaced = replace_lost_memory(found.content, !entry); !replaced) return replaced;
  const Result<std::vector<Extent>> fresh = back(found.content);
  if (!fresh) return fresh.error();
  if (!entry) services_.daemon.phase("mapped");
  times.mapped = now_ns();
  if (Result<> made = make_objects(found); !made) return made;
  if (entry) {
    if (Result<> entered = enter(*entry, times); !entered) return entered;
    services_.daemon.phase("mapped");
  }
  times.made = now_ns();
  if (Result<> content = restore_memory(*fresh, found); !content) return content;
  // How long it took says nothing where the entry was waited for in between.
  return restored(found, entry ? Times{} : times);
}

Result<> Recovery::from_memory(Found& found, std::vector<Hosted> given, Entry* entry, Times& times) {
  if (Result<> adopted = adopt(std::move(given)); !adopted) return adopted;
  find_lost(found);  // before the snapshot that is taken again gives it places
  if (const Result<std::vector<Extent>> fresh = back(found.content); !fresh) return Error{kStateIsGone};
  // What the lost server's device work may still write is a snapshot's: variables are among that, and objects read them.
  if (entry) {
    if (Result<> entered = enter(*entry, times); !entered) return entered;
  }
  services_.daemon.phase("mapped");
  times.mapped = now_ns();
  if (Result<> made = make_objects(found); !made) return made;
  times.made = now_ns();
  if (Result<> variables = restored(found, entry ? Times{} : times); !variables) return variables;
  return found.snapshot_again() ? take_snapshot_again(found) : Result<>{};
}

Result<> Recovery::from_elsewhere(Found& found, std::vector<Hosted> given, Times& times, bool joins) {
  if (Result<> adopted = adopt(std::move(given)); !adopted) return adopted;
  incoming_.begin_arrival(found.content);
  if (Result<> made = incoming_.make_missing(found.content); !made) return made;
  if (const Result<std::vector<Extent>> fresh = back(found.content); !fresh) return fresh.error();
  services_.daemon.phase("mapped");
  times.mapped = now_ns();
  if (Result<> made = make_objects(found, joins); !made) return made;
  times.made = now_ns();
  if (Result<> filled = incoming_.fill(snapshots_.chunks(), found.content.sequence); !filled) return filled;
  return restored(found, times);
}

// --- what they share

Result<> Recovery::check_journal() const {
  const journal::JournalHeader& header = services_.job.header();
  if (header.magic != journal::kMagic || header.version != journal::kLayoutVersion ||
      header.device_count != services_.contexts.count()) {
    return Error{"the journal is not one of this server's kind"};
  }
  return keeps_promises(services_);
}

Result<Recovery::Found> Recovery::look() const {
  const journal::JournalHeader& header = services_.job.header();
  Found found;
  found.tail = header.tail.load();
  found.executed = std::min(header.executed.load(), found.tail);
  const uint64_t snapshot = header.snapshot.load();
  if (snapshot == 0) return found;
  Result<SnapshotContent> content = read_snapshot_file(services_.job.fds().snapshot[snapshot & 1].get());
  if (!content) return Error{"the last snapshot cannot be read: " + content.why()};
  if (content->number != snapshot >> 1) return Error{"the last snapshot cannot be read: it has another number"};
  found.content = std::move(*content);
  return found;
}

// A snapshot that was being taken. With the other ranks of a group: only if it had been decided; until then it has changed nothing.
void Recovery::find_unfinished(Found& found, uint64_t decided) const {
  const journal::JournalHeader& header = services_.job.header();
  found.committing = header.committing.load();
  found.round = header.round_prepared.load();
  if (found.round > decided) found.committing = found.round = 0;
}

// As the daemon has found, which has compared this snapshot with those of the other ranks (docs/decisions/0053).
void Recovery::find_differing(Found& found, const Assign& assignment) const {
  if (assignment.differing.empty() || assignment.differing_snapshot != found.content.number || found.memory_is_state()) return;
  for (const auto& [address, hash] : assignment.differing) {
    const auto chunk = std::ranges::find(found.content.chunks, address, &ChunkState::address);
    if (chunk != found.content.chunks.end() && chunk->slot != 0) found.differing.push_back({address, hash, chunk->slot});
  }
}

Result<> Recovery::check_reach(const Found& found) const {
  const uint64_t position = found.content.position;
  if (position > found.tail || found.tail - position > services_.job.journal().ring_bytes() ||
      (found.snapshot_again() && found.committing - 1 > found.tail)) {
    return Error{"the journal does not reach back to the last snapshot"};
  }
  return {};
}

Result<> Recovery::enter(Entry& entry, const Times& times) {
  if (!entry.is_open()) services_.log(Level::kInfo, "prepared a recovery in " + in_ms(now_ns() - times.began));
  if (!entry.wait()) return Error{"the server ends before the one before it"};
  begin_to_write();
  return {};
}

// From here on this server writes what is shared.
void Recovery::begin_to_write() {
  services_.job.header().state.store(static_cast<uint32_t>(journal::ServerState::kRecovering));
  execution_.entered();
  describe_peers(services_);
}

Result<> Recovery::adopt(std::vector<Hosted> given) {
  if (const Status reserved = memory_.physical.reserve(services_.contexts.count()); !reserved) {
    return Error{"the device's address ranges cannot be reserved (" + services_.device.text(reserved) + ")"};
  }
  services_.contexts.use(services_.contexts.home());
  const std::lock_guard lock(memory_.mutex);
  memory_.physical.keep_ahead(given);
  for (Hosted& memory : given) {
    if (Result<> adopted = adoption_.adopt(std::move(memory)); !adopted) return adopted;
  }
  return {};
}

void Recovery::find_lost(Found& found) {
  std::vector<uint64_t> places;
  for (ChunkState& chunk : found.content.chunks) {
    if (chunk.slot == 0 || memory_.shadow.maps(chunk.slot)) continue;
    if (const auto right = std::ranges::find(found.differing, chunk.address, &ChunkState::address); right != found.differing.end()) {
      chunk.hash = right->hash;
      found.differing.erase(right);
    }
    found.lost.push_back(chunk);
    places.push_back(chunk.slot);
    chunk.slot = 0;
  }
  if (places.empty()) return;
  std::ranges::sort(places);
  const std::lock_guard lock(memory_.mutex);
  memory_.shadow.avoid(places);
}

// Of this server's devices, where the memory that the daemon held was lost. Who has not entered yet makes nothing for the job.
Result<> Recovery::replace_lost_memory(const SnapshotContent& content, bool entered) {
  uint64_t bytes = 0;
  const std::lock_guard lock(memory_.mutex);
  for (const Extent& extent : content.memory) {
    if (!whole_granules(extent.address, extent.bytes) || memory_.hosting.exists(extent.address, extent.bytes)) continue;
    const uint32_t ordinal = ordinal_of_device_address(extent.address);
    if (ordinal >= services_.contexts.count()) continue;  // the next step says so
    if (!entered) return Error{"memory was lost with a device: its replacement is not made ahead"};
    services_.contexts.use(ordinal);
    if (const Status made = memory_.hosting.grow(ordinal, extent.address, extent.bytes); !made) {
      return Error{"its device was lost with its memory, and here there is none for " + std::to_string(extent.bytes >> 20) + " MiB of it (" +
                   services_.device.text(made) + ")"};
    }
    bytes += extent.bytes;
  }
  if (bytes != 0) {
    services_.log(Level::kWarning, "a device was lost with its memory: " + std::to_string(bytes >> 20) + " MiB were made anew");
  }
  return {};
}

// Exactly the snapshot's memory is the program's. What was made for it that had been grown since the snapshot.
Result<std::vector<Extent>> Recovery::back(const SnapshotContent& content) {
  std::vector<Extent> fresh;
  if (!memory_.hosting.restore(content.memory, fresh)) return Error{"physical memory of the last snapshot is missing"};
  return fresh;
}

Result<> Recovery::make_objects(Found& found, bool joins) {
  SnapshotContent& content = found.content;
  execution_.start_at(content, found.executed);
  const uint64_t trimmed = std::min(services_.job.header().trimmed.load(), content.position);
  if (Result<> taken = snapshots_.take_over(content, trimmed); !taken) return taken;
  if (Result<> kept = keep_copies(found); !kept) return kept;
  if (Result<> live = restore_live(content); !live) return live;
  if (Result<> made = execution_.make_objects(content); !made) return made;
  if (joins && !found.snapshot_again()) execution_.join_again();
  return {};
}

Result<> Recovery::restore_live(const SnapshotContent& content) {
  for (const LiveRange& range : content.live) {
    if (!memory_.hosting.backed(range.address, range.bytes) || !memory_.live.add(range)) {
      return Error{"an allocation of the last snapshot has no memory"};
    }
  }
  for (const Images::State& image : content.images) {
    if (!memory_.images.restore(image)) return Error{"module image " + std::to_string(image.number) + " is missing"};
  }
  discard_what_was_not_kept();
  return {};
}

// What was live at the snapshot and is in no chunk of it had been given back by the program's allocator.
void Recovery::discard_what_was_not_kept() {
  const std::vector<uint64_t> granules = memory_.live.listed().granules;  // a copy: the list changes with what it says
  const std::vector<ChunkState>& chunks = snapshots_.chunks();
  auto chunk = chunks.cbegin();
  for (const uint64_t granule : granules) {
    while (chunk != chunks.cend() && chunk->address < granule) ++chunk;
    if (chunk == chunks.cend() || chunk->address != granule) memory_.live.discard(granule, kGranule);
  }
}

// Bytes that copies have left on the device, for the replay.
Result<> Recovery::keep_copies(const Found& found) {
  for (uint64_t at = found.content.position; at < found.tail;) {
    journal::RecordHeader record;
    std::memcpy(static_cast<void*>(&record), services_.job.journal().at(at), sizeof(record));
    if (record.size < sizeof(record) || record.size % 8 != 0 || record.size > found.tail - at) break;  // the replay will say so
    const bool copies = record.op < kRecordKinds && kRecordInfos[record.op].keeps_bytes;
    const bool copied = (record.state.load() & 0xff) == journal::kCopied && record.reply_hash != 0;
    // One byte at least: how many there are is checked when the record's turn comes.
    if (copied && copies && !memory_.copy_log.keep(record.reply_hash, 1, at)) {
      return Error{"what a copy from page-locked memory has brought since the last snapshot is not there any more"};
    }
    at += record.size;
  }
  return {};
}

Result<> Recovery::restore_memory(const std::vector<Extent>& fresh, const Found& found) {
  const uint64_t sequence = found.content.sequence;
  // Grown since the snapshot: the replay must find it as the first run did.
  for (const Extent& extent : fresh) {
    services_.contexts.use(ordinal_of_device_address(extent.address));
    services_.faults.check(services_.device.clear(extent.address, extent.bytes, nullptr));
  }
  granules_.clear({});  // waits for that
  const std::vector<ChunkState>& chunks = snapshots_.chunks();
  std::vector<uint64_t> granules, hashes, zeros;
  for (const ChunkState& chunk : chunks) granules.push_back(chunk.address);
  if (!granules_.hash(granules, hashes)) services_.faults.give_up(sequence, "the device could not hash its memory");
  std::vector<Granules::Move> moves;
  std::vector<ChunkState> elsewhere;
  auto lost = found.lost.cbegin();
  for (size_t i = 0; i < granules.size(); ++i) {
    while (lost != found.lost.cend() && lost->address < granules[i]) ++lost;
    if (hashes[i] == chunks[i].hash) continue;
    if (chunks[i].slot != 0) {
      moves.emplace_back(chunks[i].address, chunks[i].slot);
    } else if (lost != found.lost.cend() && lost->address == granules[i]) {
      elsewhere.push_back(*lost);
    } else {
      zeros.push_back(chunks[i].address);
    }
  }
  granules_.clear(zeros);
  if (!granules_.copy(moves)) services_.faults.give_up(sequence, "the device could not copy from the shadow");
  if (Result<> filled = replicas_.fill(elsewhere, sequence); !filled) return filled;
  snapshots_.place_again(found.lost, sequence);
  if (!elsewhere.empty() && !found.differing.empty()) {
    services_.log(Level::kWarning, "memory that differs from that of other ranks is not replaced: some was lost with a device as well");
    return {};
  }
  return replace_differing(found);
}

// Memory is as the own snapshot says. What others do not have any more stays so.
Result<> Recovery::replace_differing(const Found& found) {
  if (found.differing.empty()) return {};
  const uint64_t sequence = found.content.sequence;
  const Result<Replicas::Brought> brought = replicas_.bring(found.differing, sequence, "that differed from other ranks");
  if (!brought) return brought.error();
  std::vector<Granules::Move> moves;
  std::vector<ChunkState> replaced;
  size_t sealed = 0;
  for (const ChunkState& chunk : found.differing) {
    if (std::ranges::find(brought->missing, chunk.address, &ChunkState::address) != brought->missing.end()) {
      moves.emplace_back(chunk.address, chunk.slot);
    } else if (memory_.shadow.is_sealed(chunk.slot)) {
      sealed += 1;  // a checkpoint has it, too: the device has what others hold, and the next snapshot copies it elsewhere
    } else {
      moves.emplace_back(chunk.slot, chunk.address);
      replaced.push_back(chunk);
    }
  }
  if (!granules_.copy(moves)) services_.faults.give_up(sequence, "the device could not copy to the shadow");
  snapshots_.replace(replaced);
  services_.log(Level::kWarning, std::to_string(replaced.size() + sealed) + " of " + std::to_string(found.differing.size()) +
                                     " chunks that differed from other ranks were replaced with what these hold");
  return {};
}

// Memory is as at the snapshot. `times.mapped`: 0, if nothing is to be reported of them.
Result<> Recovery::restored(const Found& found, const Times& times) {
  if (Result<> variables = execution_.restore_variables(); !variables) return variables;
  if (Quota& quota = services_.sharing.quota(); quota.there_is()) {
    for (uint32_t ordinal = 0; ordinal < services_.contexts.count(); ++ordinal) {
      quota.take_over(ordinal, memory_.hosting.alive_bytes(ordinal), found.content.sequence);
    }
  }
  services_.daemon.phase("restored");
  if (const uint64_t now = now_ns(); times.mapped != 0 && now - times.mapped > kLongRestore) {
    services_.log(Level::kInfo, "after " + in_ms(times.mapped - times.began) + " to map memory, restoring took " +
                                    in_ms(times.made - times.mapped) + " for " +
                                    std::to_string(found.content.objects.size()) + " objects and " +
                                    in_ms(now - times.made) + " for memory");
  }
  return {};
}

Result<> Recovery::take_snapshot_again(const Found& found) {
  if (Result<> executed = execution_.execute_objects(found.committing - 1); !executed) return executed;
  const Result<> taken =
      found.round != 0 ? execution_.take_snapshot_of_round(found.round) : execution_.take_snapshot("the lost server was taking it");
  if (!taken) return Error{"the snapshot that the lost server was taking cannot be taken again: " + taken.why()};
  services_.log(Level::kInfo, "the snapshot that the lost server was taking was taken again");
  execution_.join_again();
  return {};
}

void Recovery::hand_to_execution(const Found& found, std::optional<Delivery> deliver, std::optional<Careful> careful) {
  journal::JournalHeader& header = services_.job.header();
  header.committing.store(0);
  header.round_prepared.store(0);
  header.round_suspended.store(0);
  header.snapshot_position.store(snapshots_.position());
  execution_.begin_replay(found.executed, deliver, careful);
}

}  // namespace xmig::server
