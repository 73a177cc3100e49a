#include "server/cuda/timing/timing.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>

#include "server/clock.h"
#include "server/cuda/handlers/streams.h"

namespace xmig::server {
namespace {

using profiling::Kind;

constexpr size_t kUnderWay = 16'384;           // operations with events whose end was not seen yet
constexpr uint64_t kPollEvery = 200'000;       // ns, between two looks at them while there is other work
constexpr uint64_t kBaseEvery = 1'000'000'000; // ns: an event's time is a float of milliseconds, exact to 60 ns within a second
constexpr uint64_t kEndPatience = 1'000'000'000;  // ns, after the end of a trace, for what is under way
constexpr uint64_t kTickEvery = 32;            // launches
// Two events and a query cost about 5 us of the server's time, and no more than that of the device's: so often they stay below 0.3 %.
constexpr uint64_t kSamplesPerSecond = 500;
constexpr uint64_t kChooseEvery = 100'000'000;  // ns, between two looks at how many operations there are
constexpr uint32_t kFirstGap = 16;

template <typename T>
void publish(T& field, T value) {
  std::atomic_ref<T>(field).store(value, std::memory_order_release);
}

}  // namespace

Timing::Timing(Profiling& profiling, const DriverTable& driver, Contexts& contexts, Objects& objects, const LiveSet& live)
    : profiling_(profiling), driver_(driver), contexts_(contexts), objects_(objects), live_(live) {}

void Timing::close() {
  for (auto& [stream, lane] : lanes_) give_up(lane);
  lanes_.clear();
  for (uint32_t ordinal = 0; ordinal < contexts_.count(); ++ordinal) {
    if (!contexts_.is_open(ordinal)) continue;
    contexts_.use(ordinal);
    for (const CUevent event : free_[ordinal]) driver_.cuEventDestroy_v2(event);
    free_[ordinal].clear();
    bases_[ordinal].reset();  // which destroys its event
    if (base_streams_[ordinal]) driver_.cuStreamDestroy_v2(base_streams_[ordinal]);
    base_streams_[ordinal] = nullptr;
  }
  profile_.reset();
  trace_.reset();
}

// --- what the daemon wants

void Timing::follow() {
  seen_ = profiling_.changes();
  Profiling::Wanted wanted = profiling_.wanted();
  every_ = wanted.every;
  if (wanted.profile != profile_) start_profile(std::move(wanted.profile));
  if (wanted.trace != trace_ && !wanted.end) start_trace(std::move(wanted.trace));
  if (wanted.end && trace_ && !ending_) {
    ending_ = true;
    end_by_ = now_ns() + kEndPatience;
    if (lanes_.empty()) end_trace();
  }
}

void Timing::start_profile(std::shared_ptr<ProfilingPage> page) {
  for (auto& [stream, lane] : lanes_) {
    for (Timed& timed : lane.timed) timed.entry = 0;  // entries have other numbers now
  }
  profile_ = std::move(page);
  known_.fill({});
  launches_ = ticked_ = ticks_ = operations_ = chosen_operations_ = 0;
  chosen_at_ = now_ns();
  gap_ = std::min(kFirstGap, every_);
  until_ = 1;
  if (!profile_) return;
  profiling::ProfileHeader& header = profile();
  header.version = profiling::kVersion;
  header.began = chosen_at_;
  allocated();
  publish(header.magic, profiling::kProfileMagic);
  tick(chosen_at_);
}

void Timing::start_trace(std::shared_ptr<ProfilingPage> page) {
  if (trace_) end_trace();
  trace_ = std::move(page);
  names_.clear();
  streams_.clear();
  last_name_ = 0;
  ending_ = false;
  if (!trace_) return;
  profiling::TraceHeader& header = trace();
  header.version = profiling::kVersion;
  header.began = now_ns();
  publish(header.magic, profiling::kTraceMagic);
}

void Timing::end_trace() {
  publish(trace().ended, 1u);
  trace_.reset();
  ending_ = false;
}

void Timing::rest() {
  if (profile_ && ticked_ != launches_) tick(now_ns());
}

// --- what is under way

void Timing::poll() {
  const uint64_t now = now_ns();
  if (now - polled_at_ < kPollEvery) return;
  polled_at_ = now;
  for (auto at = lanes_.begin(); at != lanes_.end();) {
    Lane& lane = at->second;
    contexts_.use(lane.ordinal);
    while (!lane.timed.empty()) {
      const CUresult result = driver_.cuEventQuery(lane.timed.front().ended);
      if (result == CUDA_ERROR_NOT_READY) break;
      // After a fault nothing more is known of what was under way, and the server ends.
      if (result != CUDA_SUCCESS || !finish(lane, lane.timed.front())) {
        give_up(lane);
        break;
      }
      give_event(lane.ordinal, lane.timed.front().began);
      give_event(lane.ordinal, lane.timed.front().ended);
      lane.timed.pop_front();
      --under_way_;
    }
    at = lane.timed.empty() ? lanes_.erase(at) : std::next(at);
  }
  if (ending_ && (lanes_.empty() || now >= end_by_)) {
    for (auto& [stream, lane] : lanes_) {
      for (const Timed& timed : lane.timed) {
        if (timed.base) drop();
      }
    }
    end_trace();
  }
}

bool Timing::finish(Lane& lane, const Timed& timed) {
  float took_ms = 0;
  if (driver_.cuEventElapsedTime_v2(&took_ms, timed.began, timed.ended) != CUDA_SUCCESS) return false;
  const auto took = static_cast<uint64_t>(std::max(0.0, double{took_ms} * 1e6));
  if (timed.entry != 0 && profile_) {
    profiling::ProfileEntry& entry = this->entry(timed.entry - 1);
    entry.recent_ns[entry.timed % profiling::kRecent] = static_cast<float>(took);
    publish(entry.total_ns, entry.total_ns + took);
    publish(entry.timed, entry.timed + 1);
    ++profile().samples;
  }
  if (!timed.base || !trace_) return true;
  float since_ms = 0;
  if (driver_.cuEventElapsedTime_v2(&since_ms, timed.base->event, timed.began) != CUDA_SUCCESS) return false;
  profiling::EventPiece piece{};
  piece.header = {static_cast<uint32_t>(profiling::Piece::kEvent), sizeof(piece)};
  piece.kind = static_cast<uint32_t>(timed.operation.kind);
  piece.name = timed.name;
  piece.ordinal = lane.ordinal;
  piece.stream = timed.stream;
  piece.began = timed.base->at + static_cast<uint64_t>(static_cast<int64_t>(double{since_ms} * 1e6));
  piece.took = took;
  piece.bytes = timed.operation.bytes;
  piece.sequence = timed.sequence;
  std::copy(std::begin(timed.operation.grid), std::end(timed.operation.grid), piece.grid);
  std::copy(std::begin(timed.operation.block), std::end(timed.operation.block), piece.block);
  piece.shared_bytes = timed.operation.shared_bytes;
  piece.replayed = timed.replayed;
  write(&piece, sizeof(piece));
  return true;
}

void Timing::give_up(Lane& lane) {
  for (const Timed& timed : lane.timed) {
    driver_.cuEventDestroy_v2(timed.began);
    driver_.cuEventDestroy_v2(timed.ended);
    if (timed.base) drop();
    if (timed.entry != 0 && profile_) ++profile().dropped;
  }
  under_way_ -= lane.timed.size();
  lane.timed.clear();
}

CUevent Timing::take_event(uint32_t ordinal) {
  std::vector<CUevent>& free = free_[ordinal];
  CUevent event = nullptr;
  if (free.empty()) {
    return driver_.cuEventCreate(&event, CU_EVENT_DEFAULT) == CUDA_SUCCESS ? event : nullptr;
  }
  event = free.back();
  free.pop_back();
  return event;
}

void Timing::give_event(uint32_t ordinal, CUevent event) { free_[ordinal].push_back(event); }

// In a stream of ours that never has anything else, so it is there at once.
std::shared_ptr<const Timing::Base> Timing::base(uint32_t ordinal) {
  std::shared_ptr<const Base>& last = bases_[ordinal];
  if (last && now_ns() - last->at < kBaseEvery) return last;
  contexts_.use(ordinal);
  CUstream& stream = base_streams_[ordinal];
  if (!stream && driver_.cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0) != CUDA_SUCCESS) return nullptr;
  const DriverTable& driver = driver_;
  auto made = std::make_unique<Base>();
  if (driver_.cuEventCreate(&made->event, CU_EVENT_DEFAULT) != CUDA_SUCCESS) return nullptr;
  const uint64_t before = now_ns();
  if (driver_.cuEventRecordWithFlags(made->event, stream, 0) != CUDA_SUCCESS ||
      driver_.cuEventSynchronize(made->event) != CUDA_SUCCESS) {
    driver_.cuEventDestroy_v2(made->event);
    return nullptr;
  }
  made->at = before + (now_ns() - before) / 2;
  // What is under way still refers to the one before, whose event has to stay for it.
  last = std::shared_ptr<const Base>(made.release(), [&driver](const Base* base) {
    driver.cuEventDestroy_v2(base->event);
    delete base;
  });
  return last;
}

// --- records

void Timing::before(const Record& record, Streams& streams, bool replayed) {
  Operation operation;
  if (!operation_of(record, operation)) return;
  uint32_t number = 0;
  bool sampled = false;
  if (profile_ && !replayed) {
    ++operations_;
    number = entry_of(operation);
    if (number != 0) {
      profiling::ProfileEntry& entry = this->entry(number - 1);
      ++entry.calls;
      entry.bytes += operation.bytes;
    } else {
      ++profile().unlisted;
    }
    if (operation.is_launch()) count(operation);
    sampled = due() && number != 0;
  }
  const bool traced = trace_ && !ending_;
  if (!sampled && !traced) [[likely]] return;
  if (under_way_ >= kUnderWay) {
    if (traced) drop();
    if (sampled) ++profile().dropped;
    return;
  }
  CUstream stream = nullptr;
  if (!streams.translate(operation.stream, &stream)) return;
  const uint32_t ordinal = streams.ordinal();
  std::shared_ptr<const Base> base = traced ? this->base(ordinal) : nullptr;
  contexts_.use(ordinal);
  if (traced && !base) drop();
  if (!base && !sampled) return;
  if (sampled && operation.kind == Kind::kKernel) entry(number - 1).reachable_bytes = reachable(record);
  open_.began = take_event(ordinal);
  open_.ended = take_event(ordinal);
  if (!open_.began || !open_.ended || driver_.cuEventRecordWithFlags(open_.began, stream, 0) != CUDA_SUCCESS) {
    for (CUevent* const event : {&open_.began, &open_.ended}) {
      if (*event) driver_.cuEventDestroy_v2(*event);
      *event = nullptr;
    }
    if (base) drop();
    return;
  }
  open_.base = std::move(base);
  open_.operation = operation;
  open_.entry = sampled ? number : 0;
  open_.name = open_.base ? name_number(operation) : 0;
  open_.stream = open_.base ? stream_number(operation.stream, stream) : 0;
  open_.sequence = record.sequence();
  open_.replayed = replayed;
  open_stream_ = stream;
  open_ordinal_ = ordinal;
}

void Timing::after() {
  if (!open_.began) [[likely]] return;
  contexts_.use(open_ordinal_);
  Lane& lane = lanes_[open_stream_];
  lane.ordinal = open_ordinal_;
  Timed timed = std::exchange(open_, {});
  if (driver_.cuEventRecordWithFlags(timed.ended, open_stream_, 0) == CUDA_SUCCESS) {
    lane.timed.push_back(std::move(timed));
    ++under_way_;
    return;
  }
  driver_.cuEventDestroy_v2(timed.began);
  driver_.cuEventDestroy_v2(timed.ended);
  if (timed.base) drop();
  if (lane.timed.empty()) lanes_.erase(open_stream_);
}

void Timing::allocated() {
  if (!profile_) return;
  profiling::ProfileHeader& header = profile();
  header.live_bytes = live_.bytes();
  header.peak_bytes = std::max(header.peak_bytes, header.live_bytes);
}

void Timing::forget_kernels() {
  known_.fill({});
  names_.clear();
}

// --- the profile

void Timing::count(const Operation& operation) {
  auto* const ring = reinterpret_cast<uint32_t*>(profile_->at(profiling::kLaunchesAt));
  const uint64_t key = operation.key();
  ring[launches_ % profiling::kLaunches] = static_cast<uint32_t>(key ^ key >> 32);
  publish(profile().launches, ++launches_);
  if (launches_ - ticked_ >= kTickEvery) tick(now_ns());
}

void Timing::tick(uint64_t now) {
  auto* const ring = reinterpret_cast<profiling::Tick*>(profile_->at(profiling::kTicksAt));
  ring[ticks_ % profiling::kTicks] = {launches_, now};
  publish(profile().ticks, ++ticks_);
  ticked_ = launches_;
  if (now - chosen_at_ >= kChooseEvery) {
    const uint64_t per_second = (operations_ - chosen_operations_) * 1'000'000'000 / (now - chosen_at_);
    gap_ = static_cast<uint32_t>(std::clamp<uint64_t>(per_second / kSamplesPerSecond, std::min(kFirstGap, every_), 1u << 20));
    chosen_at_ = now;
    chosen_operations_ = operations_;
  }
}

// At random: what a program does has a period, and every so many operations would be the same ones again and again.
bool Timing::due() {
  if (every_ == 0 || --until_ != 0) return false;
  random_ ^= random_ << 13;
  random_ ^= random_ >> 7;
  random_ ^= random_ << 17;
  const uint32_t mean = std::max(gap_, every_);
  until_ = 1 + static_cast<uint32_t>(random_ % (2 * uint64_t{mean} - 1));
  return true;
}

uint32_t Timing::entry_of(const Operation& operation) {
  const uint64_t key = operation.key();
  for (size_t at = key % known_.size(), looked = 0; looked < 64; at = (at + 1) % known_.size(), ++looked) {
    if (known_[at].key == key) [[likely]] return known_[at].number;
    if (known_[at].key != 0) continue;
    known_[at] = {key, new_entry(operation)};
    return known_[at].number;
  }
  return 0;
}

// A module that was loaded again has kernels of other numbers and of the same names.
uint32_t Timing::new_entry(const Operation& operation) {
  profiling::ProfileHeader& header = profile();
  profiling::ProfileEntry made{};
  made.kind = static_cast<uint32_t>(operation.kind);
  made.shared_bytes = operation.shared_bytes;
  std::copy(std::begin(operation.grid), std::end(operation.grid), made.grid);
  std::copy(std::begin(operation.block), std::end(operation.block), made.block);
  const std::string name = operation.kind == Kind::kKernel ? kernel_name(operation, sizeof(made.name) - 1) : name_of(operation);
  std::memcpy(made.name, name.data(), name.size());
  for (uint32_t i = 0; i < header.entries; ++i) {
    const profiling::ProfileEntry& other = entry(i);
    if (other.kind == made.kind && other.shared_bytes == made.shared_bytes && std::equal(made.grid, made.grid + 3, other.grid) &&
        std::equal(made.block, made.block + 3, other.block) && std::strncmp(made.name, other.name, sizeof(made.name)) == 0) {
      return i + 1;
    }
  }
  if (header.entries >= profiling::kEntries) return 0;
  const Kernel* const kernel = operation.kind == Kind::kKernel ? objects_.kernel(journal::handle_index(operation.what)) : nullptr;
  const auto attribute = [&](CUdevice_attribute which) {
    int value = 0;
    const CUresult result = driver_.cuDeviceGetAttribute(&value, which, 0);
    return static_cast<uint32_t>(result == CUDA_SUCCESS ? std::max(value, 0) : 0);
  };
  // Both edges of the clock, which is in kHz.
  made.memory_mbps = static_cast<uint32_t>(uint64_t{attribute(CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)} * 2 *
                                           (attribute(CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH) / 8) / 1000);
  if (kernel) {
    int blocks = 0;
    const int size = static_cast<int>(operation.block[0] * operation.block[1] * operation.block[2]);
    if (driver_.cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(&blocks, kernel->real, size, operation.shared_bytes, 0) !=
        CUDA_SUCCESS) {
      blocks = 0;
    }
    made.blocks_per_processor = static_cast<uint32_t>(std::max(blocks, 0));
    made.processors = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    made.threads_per_processor = attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR);
  }
  entry(header.entries) = made;
  publish(header.entries, header.entries + 1);
  return header.entries;
}

std::string Timing::kernel_name(const Operation& operation, size_t longest) {
  const Kernel* const kernel = journal::handle_is(operation.what, journal::Kind::kFunction)
                                   ? objects_.kernel(journal::handle_index(operation.what))
                                   : nullptr;
  const char* name = nullptr;
  if (!kernel || driver_.cuFuncGetName(&name, kernel->real) != CUDA_SUCCESS || !name) return "kernel";
  return readable(name, longest);
}

// Allocations that a kernel's parameters point into: at most so much it can read or write, unless it finds further addresses there.
uint64_t Timing::reachable(const Record& record) const {
  Args_xmLaunch args;
  const std::span<const std::byte> payload = record.payload();
  if (record.header().op == static_cast<uint16_t>(Op::xmFirstLaunch) || !record.arguments(args)) return 0;
  const size_t first = size_t{args.attributes} * sizeof(CUlaunchAttribute);
  if (args.attributes > 64 || first > payload.size()) return 0;
  const size_t end = std::min<size_t>(payload.size(), first + args.parameter_bytes);
  std::array<uint64_t, 16> seen{};
  size_t count = 0;
  uint64_t bytes = 0;
  for (size_t at = first; at + sizeof(uint64_t) <= end && count < seen.size(); at += sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, payload.data() + at, sizeof(word));
    const LiveRange* const range = live_.around(word);
    if (!range || std::find(seen.begin(), seen.begin() + count, range->address) != seen.begin() + count) continue;
    seen[count++] = range->address;
    bytes += range->bytes;
  }
  return bytes;
}

// --- the trace

uint32_t Timing::stream_number(uint64_t handle, CUstream stream) {
  const uint64_t which = journal::handle_is(handle, journal::Kind::kStream) ? handle : reinterpret_cast<uintptr_t>(stream);
  return streams_.try_emplace(which, static_cast<uint32_t>(streams_.size() + 1)).first->second;
}

uint32_t Timing::name_number(const Operation& operation) {
  const uint64_t which = operation.what << 8 | static_cast<uint64_t>(operation.kind);
  const auto found = names_.find(which);
  if (found != names_.end()) return found->second;
  const std::string text = operation.kind == Kind::kKernel ? kernel_name(operation, profiling::kLongestName) : name_of(operation);
  return names_[which] = write_name(text);
}

uint32_t Timing::write_name(std::string_view text) {
  text = text.substr(0, profiling::kLongestName);
  profiling::NamePiece piece{};
  const size_t bytes = (sizeof(piece) + text.size() + 7) / 8 * 8;
  piece.header = {static_cast<uint32_t>(profiling::Piece::kName), static_cast<uint32_t>(bytes)};
  piece.number = last_name_ + 1;
  piece.length = static_cast<uint32_t>(text.size());
  return write(&piece, sizeof(piece), text) ? ++last_name_ : 0;
}

bool Timing::write(const void* piece, size_t bytes, std::string_view text) {
  profiling::TraceHeader& header = trace();
  const size_t whole = (bytes + text.size() + 7) / 8 * 8;
  if (profiling::kPiecesAt + header.written + whole > trace_->size()) {
    drop();
    return false;
  }
  std::byte* const to = trace_->at(profiling::kPiecesAt + header.written);
  std::memcpy(to, piece, bytes);
  if (!text.empty()) std::memcpy(to + bytes, text.data(), text.size());
  publish(header.written, header.written + whole);
  return true;
}

void Timing::drop() {
  if (trace_) publish(trace().dropped, trace().dropped + 1);
}

void Timing::did(Kind kind, std::string_view what, uint64_t began, uint64_t ended) {
  if (!trace_) [[likely]] return;
  profiling::EventPiece piece{};
  piece.header = {static_cast<uint32_t>(profiling::Piece::kEvent), sizeof(piece)};
  piece.kind = static_cast<uint32_t>(kind);
  piece.name = write_name(what);
  piece.began = began;
  piece.took = ended > began ? ended - began : 0;
  write(&piece, sizeof(piece));
}

}  // namespace xmig::server
