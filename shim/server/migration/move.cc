// Moves: a planned recovery on another device, with memory that was copied before (docs/decisions/0008).
//
// The target copies what the source's last cut holds out of the source's shadow, which is mapped here at its own
// addresses, and never touches what is the program's or the source's until take(). The source may take its next cut at any
// time, and write into the shadow while it is read. That is no harm: what counts is the hash of what has arrived, and what
// is not as the cut says is copied again in a later round, in the last resort when the source stands still.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <system_error>
#include <thread>

#include "journal/futex.h"
#include "server/clock.h"
#include "server/executor/executor.h"

namespace xmig::server {

using journal::kGranule;

namespace {

constexpr uint64_t kBatchGranules = 128;            // between two looks at the clock, and what is hashed at once
constexpr uint64_t kLongFill = 500'000'000;         // ns
constexpr int kCutReads = 200;                      // of a source that takes one cut after the other
constexpr auto kCutReadPause = std::chrono::milliseconds(5);

std::string error_text(CUresult result) { return " (CUDA error " + std::to_string(result) + ")"; }

// Does the driver say that the memory's device is out of this one's reach? Then host memory is a way round it; from
// everything else that can be wrong it is not.
bool is_about_peers(CUresult result) {
  switch (result) {
    case CUDA_ERROR_PEER_ACCESS_UNSUPPORTED:
    case CUDA_ERROR_PEER_ACCESS_NOT_ENABLED:
    case CUDA_ERROR_TOO_MANY_PEERS:
    case CUDA_ERROR_INVALID_DEVICE:  // of cuMemSetAccess: a device without a way to the memory's
    case CUDA_ERROR_NOT_SUPPORTED:   // of cuMemImportFromShareableHandle, likewise
      return true;
    default: return false;
  }
}

double ms_since(uint64_t start) { return static_cast<double>(now_ns() - start) / 1e6; }

}  // namespace

// --- the source

// Between two records, with an idle device.
void Executor::hand_over(uint64_t stopped) {
  drain();
  publish_executed();
  const uint64_t drained = now_ns();
  // Nothing was executed since the last cut: then that one will do.
  const bool cut_is_due = position_ != cut_position_ || cut_number_ == 0 || must_settle_;
  if (redoing_ || (cut_is_due && !take_cut("handover"))) {
    const std::string why = redoing_ ? "the job is being recovered" : cut_trouble_;
    return daemon_.handover_failed(why.empty() ? "work of the device waits for the program" : why);
  }
  trim_shadow(true);  // nobody is to import what is empty
  const double cut_ms = ms_since(drained);
  park([=, this] { daemon_.handed_over(cut_number_, position_, stopped, drained, cut_ms); });
  go_on();
  daemon_.continued(position_);
}

// Nobody else has the job after all.
void Executor::go_on() {
  journal::JournalHeader& header = job_.header();
  header.server_pid.store(static_cast<uint32_t>(::getpid()));
  generation_ = header.generation.fetch_add(1) + 1;
  header.state.store(static_cast<uint32_t>(journal::ServerState::kRunning));
  journal::futex_wake(header.state);
  policy_.start(now_ns());
}

// --- the target

bool Executor::begin_move(uint64_t first_id, Trouble& trouble) {
  comes_without_memory_ = true;
  physical_.taken(first_id - 1);
  if (!keeps_promises(trouble)) return false;
  const CUresult result = physical_.reserve(contexts_.count());
  if (result == CUDA_SUCCESS) return true;
  trouble = {"failed", "the device's address ranges cannot be reserved" + error_text(result)};
  return false;
}

bool Executor::import(Hosted memory, Trouble& trouble) {
  const bool foreign = memory.foreign;
  const uint64_t bytes = memory.bytes;
  if (memory.kind == HostedKind::kImage) preload_.add(memory);
  std::string why;
  const std::lock_guard lock(hosted_mutex_);
  const CUresult result = adopt_one(std::move(memory), why);
  if (result == CUDA_SUCCESS) return true;
  trouble = {foreign && is_about_peers(result) ? "no_peer" : "failed",
             std::to_string(bytes >> 20) + " MiB of the source: " + why};
  return false;
}

void Executor::forget(uint64_t id) {
  const std::lock_guard lock(hosted_mutex_);
  contexts_.use(0);
  preload_.drop(id);
  if (!shadow_.forget(id)) images_.forget(id);
}

// The source's last cut, at least this one. It is written by another process all the time: what does not decode, or is not
// the one that the header names, is read again.
std::optional<CutContent> Executor::read_cut(uint64_t at_least) {
  for (int tries = 0; tries < kCutReads; ++tries) {
    if (tries != 0) std::this_thread::sleep_for(kCutReadPause);
    const uint64_t cut = job_.header().cut.load();
    if (cut >> 1 < at_least) continue;
    if (cut == 0) return CutContent{};
    std::string why;
    auto content = read_cut_file(job_.fds().cut[cut & 1].get(), why);
    if (content && content->number == cut >> 1) return content;
  }
  return std::nullopt;
}

bool Executor::copy_and_hash(const std::vector<std::pair<uint64_t, uint64_t>>& moves, std::vector<uint64_t>& hashes) {
  std::vector<uint64_t> granules;
  for (const auto& [to, from] : moves) granules.push_back(to);
  return copy_chunks(moves) && hash_chunks(granules, hashes);
}

// What is known of a granule that lies behind those that were asked for before, from `at` on.
std::optional<uint64_t> Executor::known_hash(std::vector<Known>::const_iterator& at, uint64_t address) const {
  while (at != known_.cend() && at->address < address) ++at;
  return at != known_.cend() && at->address == address ? at->hash : std::nullopt;
}

bool Executor::round(uint64_t number, uint64_t cut, Trouble& trouble) {
  const uint64_t start = now_ns();
  const std::optional<CutContent> content = read_cut(cut);
  if (!content) {
    trouble = {"bad_cut", "cut " + std::to_string(cut) + " of the source cannot be read"};
    return false;
  }
  std::string why;
  if (!make_missing(*content, why)) {
    trouble = trouble_;
    return false;
  }
  RoundReport report;
  report.number = number;
  report.cut = content->number;
  const std::vector<ChunkState>& chunks = content->chunks;
  std::vector<Known> known;
  known.reserve(chunks.size());
  std::vector<size_t> wanted;
  std::vector<uint64_t> zeros;
  auto before = known_.cbegin();
  for (const ChunkState& chunk : chunks) {
    const bool in_order = known.empty() || chunk.address > known.back().address;
    if (!in_order || chunk.address % kGranule != 0 || !hosting_.backed(chunk.address, kGranule)) {
      trouble = {"bad_cut", "a chunk of the source's cut has no memory, or its turn is another"};
      return false;
    }
    const std::optional<uint64_t> hash = known_hash(before, chunk.address);
    const bool here = hash == chunk.hash;
    known.push_back({chunk.address, hash});
    if (chunk.slot == 0) {
      if (!here) zeros.push_back(chunk.address);
      known.back().hash = chunk.hash;
      continue;
    }
    report.total_bytes += kGranule;
    if (here) {
      report.settled_bytes += kGranule;
    } else if (shadow_.maps(chunk.slot)) {
      wanted.push_back(known.size() - 1);
    }
  }
  known_ = std::move(known);
  clear(zeros);
  uint64_t told = start;
  for (size_t first = 0; first < wanted.size(); first += kBatchGranules) {
    std::vector<std::pair<uint64_t, uint64_t>> moves;
    std::vector<uint64_t> hashes;
    const size_t end = std::min(first + kBatchGranules, wanted.size());
    for (size_t i = first; i < end; ++i) {
      known_[wanted[i]].hash.reset();
      moves.emplace_back(chunks[wanted[i]].address, chunks[wanted[i]].slot);
    }
    if (!copy_and_hash(moves, hashes)) {
      trouble = {"failed", "the device could not copy from the source's shadow"};
      return false;
    }
    for (size_t i = first; i < end; ++i) {
      known_[wanted[i]].hash = hashes[i - first];
      if (hashes[i - first] == chunks[wanted[i]].hash) report.settled_bytes += kGranule;
    }
    report.copied_bytes += moves.size() * kGranule;
    if (now_ns() - told < kProgressEvery) continue;
    told = now_ns();
    daemon_.round_progress(number, report.copied_bytes);
  }
  report.differing_bytes = report.total_bytes - report.settled_bytes;
  report.ms = ms_since(start);
  const uint64_t copied = now_ns();
  preload_.want(*content);
  while (preload_.pending()) preload_.step(Preload::kMostOfTarget);
  report.loading_ms = ms_since(copied);
  daemon_.round(report);
  return true;
}

bool Executor::take(uint64_t cut, Trouble& trouble) {
  journal::JournalHeader& header = job_.header();
  if (header.cut.load() >> 1 != cut) {
    trouble = {"bad_cut", "the journal's last cut is " + std::to_string(header.cut.load() >> 1) + " and not " +
                              std::to_string(cut)};
    return false;
  }
  std::string why;
  Entry entered(Entry::State::kOpen);
  if (recover({}, std::nullopt, std::nullopt, entered, why)) return true;
  trouble = trouble_.code.empty() ? Trouble{"failed", why} : trouble_;
  return false;
}

// While descriptors of a suspended job still come in.
void Executor::prepare_resumption() {
  comes_without_memory_ = true;
  try {
    buffers_ = std::async(std::launch::async, [this] { make_buffers(); });
  } catch (const std::system_error&) {
    // No thread to be had: they are made when they are needed.
  }
}

// For as much as its last cut holds.
void Executor::make_buffers() {
  const uint64_t cut = job_.header().cut.load();
  std::string why;
  const auto content = cut == 0 ? std::nullopt : read_cut_file(job_.fds().cut[cut & 1].get(), why);
  if (!content) return;  // recover() says so
  std::map<uint32_t, size_t> pieces;
  for (const ChunkState& chunk : content->chunks) {
    if (chunk.slot != 0) ++pieces[ordinal_of_device_address(chunk.address)];
  }
  for (const auto& [ordinal, count] : pieces) {
    if (ordinal < contexts_.count()) bounce_.make_ready(ordinal, count);
  }
}

// A suspended job goes on here.
bool Executor::resume_suspended(std::vector<Hosted> given, Trouble& trouble) {
  std::string why;
  Entry entered(Entry::State::kOpen);
  if (recover(std::move(given), std::nullopt, std::nullopt, entered, why)) return true;
  trouble = trouble_.code.empty() ? Trouble{"failed", why} : trouble_;
  job_.header().state.store(static_cast<uint32_t>(journal::ServerState::kSuspended));
  return false;
}

// --- jobs that come without their device memory

// Memory for what the cut holds. What goes is in no chunk of the cut, so that nothing is known of it after this round.
bool Executor::make_missing(const CutContent& content, std::string& why) {
  const std::lock_guard lock(hosted_mutex_);
  const CUresult result = hosting_.become(
      content.memory, [this](uint32_t ordinal) { contexts_.use(std::min(ordinal, contexts_.count() - 1)); },
      [this](uint64_t end) {
        if (arrival_) arrival_->made(end);
      });
  if (result != CUDA_SUCCESS) {
    uint64_t bytes = 0;
    for (const Extent& extent : content.memory) bytes += extent.bytes;
    why = "there is no memory for the " + std::to_string(bytes >> 20) + " MiB that the program has" + error_text(result);
    trouble_ = {result == CUDA_ERROR_OUT_OF_MEMORY ? "no_room" : "failed", why};
    return false;
  }
  return true;
}

void Executor::clear(const std::vector<uint64_t>& granules) {
  for (const uint64_t address : granules) {
    contexts_.use(ordinal_of_device_address(address));
    faults_.check(driver_.cuMemsetD8Async(address, 0, kGranule, nullptr));
  }
  for (uint32_t ordinal = 0; ordinal < contexts_.count(); ++ordinal) {
    contexts_.use(ordinal);
    faults_.check(driver_.cuCtxSynchronize());
  }
}

// What is in no device's memory comes while there is nothing to know of here yet. What is wrong with it fill() finds.
void Executor::begin_arrival(const CutContent& content) {
  const auto by_address = [](const auto& a, const auto& b) { return a.address < b.address; };
  if (!known_.empty() || !std::is_sorted(content.memory.begin(), content.memory.end(), by_address) ||
      !std::is_sorted(content.chunks.begin(), content.chunks.end(), by_address)) {
    return;
  }
  std::vector<Bounce::Piece> pieces;
  auto memory = content.memory.begin();
  for (const ChunkState& chunk : content.chunks) {
    while (memory != content.memory.end() && memory->address + memory->bytes <= chunk.address) ++memory;
    const bool has_memory = memory != content.memory.end() && memory->address <= chunk.address;
    const auto kept = chunk.slot != 0 ? shadow_.plain_at(chunk.slot) : std::nullopt;
    const uint32_t ordinal = ordinal_of_device_address(chunk.address);
    if (!has_memory || !kept || ordinal >= contexts_.count()) continue;
    pieces.push_back({chunk.address, kept->fd, kept->offset, ordinal});
  }
  if (pieces.empty()) return;
  try {
    arrival_ = std::make_unique<Arrival>(bounce_, std::move(pieces));
  } catch (const std::system_error&) {
    // No thread to be had: fill() brings it.
  }
}

// What has arrived is known from now on.
void Executor::end_arrival() {
  const std::unique_ptr<Arrival> arrival = std::move(arrival_);
  if (!arrival || !arrival->finish()) return;
  std::vector<uint64_t> granules, hashes;
  for (const Bounce::Piece& piece : arrival->pieces()) granules.push_back(piece.device);
  if (!hash_chunks(granules, hashes)) return;
  for (size_t i = 0; i < granules.size(); ++i) known_.push_back({granules[i], hashes[i]});
  if (const uint64_t took = now_ns() - arrival->began(); took > kLongFill) {
    log_(Level::kInfo, "bringing and hashing " + std::to_string(granules.size() * kGranule >> 20) + " MiB took " +
                           in_ms(took) + ", beside the rest; " + Bounce::text(bounce_.spent()));
  }
}

// The cut's content, where it is not known to be here already. What is copied is hashed, and has to be right.
bool Executor::fill(std::string& why) {
  end_arrival();
  std::vector<std::pair<uint64_t, uint64_t>> moves;
  std::vector<uint64_t> zeros, expected, hashes;
  auto known = known_.cbegin();
  for (const ChunkState& chunk : chunks_) {
    if (known_hash(known, chunk.address) == chunk.hash) continue;
    if (chunk.slot == 0) {
      zeros.push_back(chunk.address);
    } else {
      moves.emplace_back(chunk.address, chunk.slot);
      expected.push_back(chunk.hash);
    }
  }
  clear(zeros);
  bounce_.spent();
  const uint64_t start = now_ns();
  if (!copy_and_hash(moves, hashes)) faults_.give_up(sequence_, "the device could not copy from the shadow");
  if (const uint64_t took = now_ns() - start; took > kLongFill) {
    log_(Level::kInfo, "copying and hashing " + std::to_string(moves.size() * kGranule >> 20) + " MiB took " + in_ms(took) +
                          "; " + Bounce::text(bounce_.spent()));
  }
  if (hashes == expected) return true;
  why = "what was copied from the shadow is not what the cut says: it was changed, or is damaged";
  trouble_ = {"bad_cut", why};
  return false;
}

}  // namespace xmig::server
