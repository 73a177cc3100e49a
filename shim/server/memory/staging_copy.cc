#include "server/memory/staging_copy.h"

#include <emmintrin.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <optional>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>

#include "journal/layout.h"
#include "journal/mapping.h"
#include "server/clock.h"

namespace xmig::server {

using journal::kGranule;

namespace {

constexpr const char* kDeviceFailed = "the device could not copy";
// Of one copy: the bus does 3 % less with half of it. The kernel's writing is faster from smaller buffers, which stay in the
// caches (docs/decisions/0018).
constexpr uint64_t kMostBytes = 2 * kGranule;

// Adds the time until its end.
class Timer {
 public:
  explicit Timer(uint64_t& sum) : sum_(sum), start_(now_ns()) {}
  ~Timer() { sum_ += now_ns() - start_; }
  Timer(const Timer&) = delete;

 private:
  uint64_t& sum_;
  const uint64_t start_;
};

// 0, or an errno.
int transfer(auto&& call, const StagingCopy::Piece& piece, std::byte* buffer) {
  for (uint64_t done = 0; done < piece.bytes;) {
    const ssize_t now = call(piece.fd, buffer + done, piece.bytes - done, static_cast<off_t>(piece.offset + done));
    if (now < 0 && errno == EINTR) continue;
    if (now <= 0) return now < 0 ? errno : EIO;  // shorter than it was
    done += static_cast<uint64_t>(now);
  }
  return 0;
}

// What is written is not read again soon: it needs no place in the caches, where the device puts the next buffers.
void stream(void* to, const void* from, uint64_t bytes) {
  auto* out = static_cast<__m128i*>(to);
  const auto* in = static_cast<const __m128i*>(from);
  for (const __m128i* const end = in + bytes / sizeof(__m128i); in != end; in += 4, out += 4) {
    const __m128i a = _mm_load_si128(in), b = _mm_load_si128(in + 1), c = _mm_load_si128(in + 2), d = _mm_load_si128(in + 3);
    _mm_stream_si128(out, a);
    _mm_stream_si128(out + 1, b);
    _mm_stream_si128(out + 2, c);
    _mm_stream_si128(out + 3, d);
  }
  _mm_sfence();
}

// Those that follow each other on both sides are copied at once, unless the kernel is to write them.
std::vector<StagingCopy::Piece> joined(std::span<const StagingCopy::Piece> pieces, bool to_device) {
  std::vector<StagingCopy::Piece> result;
  for (const StagingCopy::Piece& piece : pieces) {
    StagingCopy::Piece* const last = result.empty() ? nullptr : &result.back();
    const bool fits = last && (to_device || piece.mapped != 0) && last->bytes + piece.bytes <= kMostBytes;
    if (fits && last->fd == piece.fd && last->ordinal == piece.ordinal && last->device + last->bytes == piece.device &&
        last->offset + last->bytes == piece.offset) {
      last->bytes += piece.bytes;
    } else {
      result.push_back(piece);
    }
  }
  return result;
}

}  // namespace

// Page-locked memory for the buffers of several lanes: when each locked its own, sixteen took 115 ms.
class StagingCopy::Locked {
 public:
  Locked(device::Runtime& device, size_t bytes) : device_(device) {
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS;
    space_ = journal::Mapping(::mmap(nullptr, bytes + kGranule, PROT_READ | PROT_WRITE, kFlags, -1, 0), bytes + kGranule);
    if (!space_) return;
    // Huge pages: sooner there, and sooner locked.
    const uint64_t start = (reinterpret_cast<uintptr_t>(space_.data()) + kGranule - 1) / kGranule * kGranule;
    data_ = reinterpret_cast<std::byte*>(start);
    ::madvise(data_, bytes, MADV_HUGEPAGE);
    // Where this fails, as on a device without memory, the copies are slower, and right.
    static_cast<void>(device_.lock_host(data_, bytes, false));
  }
  ~Locked() {
    if (data_) device_.unlock_host(data_);
  }
  Locked(const Locked&) = delete;

  std::byte* data() const { return data_; }  // null: there was no memory

 private:
  device::Runtime& device_;
  journal::Mapping space_;
  std::byte* data_ = nullptr;
};

// What one thread has: a stream of one device, and two buffers with an event behind the last use of each.
class StagingCopy::Lane {
 public:
  static constexpr size_t kBytes = 2 * kMostBytes;

  // Its buffers are at `offset` in `memory`.
  Lane(device::Runtime& device, uint32_t ordinal, std::shared_ptr<Locked> memory, size_t offset)
      : device_(device), ordinal_(ordinal), memory_(std::move(memory)) {
    buffers_ = memory_->data() + offset;
    static_cast<void>(device_.create_stream(stream_));  // without one, in the default stream
    good_ = true;
    for (device::EventHandle& event : events_) good_ &= static_cast<bool>(device_.create_event(event));
  }
  ~Lane() {
    static_cast<void>(device_.synchronize(stream_));
    for (const device::EventHandle event : events_) {
      if (event) device_.destroy_event(event);
    }
    if (stream_) device_.destroy(stream_);
  }
  Lane(const Lane&) = delete;

  bool good() const { return good_; }
  uint32_t ordinal() const { return ordinal_; }
  Spent spent() { return std::exchange(spent_, {}); }
  int error() const { return error_; }  // errno of the last failure; 0: it was the device's

  bool to_plain(const Piece& piece) {
    const size_t mine = next();
    if (!device_.copy_to_host(buffer(mine), piece.device, piece.bytes, stream_) || !mark(mine)) {
      return false;
    }
    // While the device fills this one, the one before it is emptied.
    const bool fine = finish();
    waiting_ = piece;
    waiting_in_ = mine;
    return fine;
  }
  bool to_device(const Piece& piece) {
    const size_t mine = next();
    if (used_[mine] && !wait(mine)) return false;
    {
      const Timer timer(spent_.copying_ns);
      error_ = transfer(::pread, piece, buffer(mine));
    }
    if (error_ != 0) return false;
    return device_.copy_from_host(piece.device, buffer(mine), piece.bytes, stream_) && mark(mine);
  }
  // All copies are done.
  bool settle() {
    if (!finish()) return false;
    const Timer timer(spent_.waiting_ns);
    return static_cast<bool>(device_.synchronize(stream_));
  }

 private:
  size_t next() { return turn_++ % 2; }
  std::byte* buffer(size_t i) { return buffers_ + i * kMostBytes; }
  bool mark(size_t i) {
    used_[i] = true;
    return static_cast<bool>(device_.record(events_[i], stream_));
  }
  bool wait(size_t i) {
    const Timer timer(spent_.waiting_ns);
    return static_cast<bool>(device_.synchronize_event(events_[i]));
  }
  bool finish() {
    if (!waiting_) return true;
    if (!wait(waiting_in_)) return false;
    const Piece piece = *std::exchange(waiting_, std::nullopt);
    const Timer timer(spent_.copying_ns);
    error_ = 0;
    if (piece.mapped != 0) {
      stream(reinterpret_cast<void*>(piece.mapped), buffer(waiting_in_), piece.bytes);
    } else {
      error_ = transfer(::pwrite, piece, buffer(waiting_in_));
    }
    return error_ == 0;
  }

  device::Runtime& device_;
  const uint32_t ordinal_;
  const std::shared_ptr<Locked> memory_;
  std::byte* buffers_ = nullptr;
  device::StreamHandle stream_ = nullptr;
  std::array<device::EventHandle, 2> events_{};
  std::array<bool, 2> used_{};
  size_t turn_ = 0;
  std::optional<Piece> waiting_;  // what the buffer `waiting_in_` is for
  size_t waiting_in_ = 0;
  Spent spent_;
  int error_ = 0;
  bool good_ = false;
};

// Each thread takes the next piece when it is done with one: they end at about the same time.
struct StagingCopy::Run {
  bool to_plain;
  std::vector<Piece> pieces{};
  const Watermark* made = nullptr;
  std::atomic<size_t> next{0};
  std::atomic<bool> good{true};
  std::mutex mutex;
  std::string why;

  void failed(const std::string& text) {
    good = false;
    const std::lock_guard lock(mutex);
    if (why.empty()) why = text;
  }
};

StagingCopy::StagingCopy(device::Runtime& device, std::function<void(uint32_t)> use_ordinal, size_t most_threads)
    : device_(device), use_ordinal_(std::move(use_ordinal)), most_threads_(most_threads) {}

StagingCopy::~StagingCopy() {
  for (std::unique_ptr<Lane>& lane : idle_) {
    use_ordinal_(lane->ordinal());
    lane.reset();
  }
}

// The kernel lets no two threads write to one descriptor at once. So neighbours are of different ones, as far as a device has
// several: the first piece of each, then the second of each.
Result<> StagingCopy::to_plain(std::span<const Piece> pieces) {
  std::map<int, size_t> count;
  std::vector<std::tuple<uint32_t, size_t, Piece>> turns;
  for (const Piece& piece : joined(pieces, false)) turns.emplace_back(piece.ordinal, count[piece.fd]++, piece);
  std::stable_sort(turns.begin(), turns.end(), [](const auto& a, const auto& b) {
    return std::tie(std::get<0>(a), std::get<1>(a)) < std::tie(std::get<0>(b), std::get<1>(b));
  });
  Run all{.to_plain = true};
  for (const auto& [ordinal, turn, piece] : turns) all.pieces.push_back(piece);
  return run(all);
}

Result<> StagingCopy::to_device(std::span<const Piece> pieces, const Watermark* made) {
  Run all{.to_plain = false, .pieces = joined(pieces, true), .made = made};
  return run(all);
}

void StagingCopy::make_ready(uint32_t ordinal, size_t pieces) {
  const std::lock_guard lock(mutex_);
  const auto there = std::count_if(idle_.begin(), idle_.end(), [&](const auto& one) { return one->ordinal() == ordinal; });
  const size_t wanted = threads_for(pieces);
  if (wanted <= static_cast<size_t>(there)) return;
  make_lanes(ordinal, wanted - static_cast<size_t>(there));
}

// Under mutex_.
void StagingCopy::make_lanes(uint32_t ordinal, size_t count) {
  const Timer timer(spent_.making_ns);
  use_ordinal_(ordinal);
  const auto memory = std::make_shared<Locked>(device_, count * Lane::kBytes);
  for (size_t i = 0; i < count && memory->data(); ++i) {
    auto lane = std::make_unique<Lane>(device_, ordinal, memory, i * Lane::kBytes);
    if (lane->good()) idle_.push_back(std::move(lane));
  }
}

size_t StagingCopy::threads_for(size_t pieces) const {
  const size_t processors = std::max(1u, std::thread::hardware_concurrency());
  return std::min({most_threads_, processors, pieces});
}

Result<> StagingCopy::run(Run& run) {
  if (run.pieces.empty()) return {};
  std::map<uint32_t, size_t> pieces;
  for (const Piece& piece : run.pieces) ++pieces[piece.ordinal];
  for (const auto& [ordinal, count] : pieces) make_ready(ordinal, count);
  const size_t threads = threads_for(run.pieces.size());
  std::vector<std::thread> helpers;
  try {
    while (helpers.size() + 1 < threads) helpers.emplace_back([this, &run] { work(run); });
  } catch (const std::system_error&) {
    // No thread to be had: those that there are do it.
  }
  work(run);
  for (std::thread& helper : helpers) helper.join();
  if (!run.good) return Error{run.why};
  return {};
}

void StagingCopy::work(Run& run) {
  std::unique_ptr<Lane> mine;
  const auto check = [&](bool fine) {
    if (fine) return;
    const int error = mine->error();
    run.failed(error == 0 ? kDeviceFailed : std::string("what was kept off the device: ") + std::strerror(error));
  };
  for (size_t i; run.good && (i = run.next.fetch_add(1)) < run.pieces.size();) {
    const Piece& piece = run.pieces[i];
    if (!mine || mine->ordinal() != piece.ordinal) {
      if (mine) {
        check(mine->settle());
        if (run.good) give_back(std::move(mine));
      }
      use_ordinal_(piece.ordinal);
      mine = lane(piece.ordinal);
      if (!mine) return run.failed("there is no memory for buffers");
    }
    if (run.made && !run.made->await(piece.device + piece.bytes)) return run.failed("the device has no memory for it");
    check(run.to_plain ? mine->to_plain(piece) : mine->to_device(piece));
  }
  if (!mine || !run.good) return;
  check(mine->settle());
  if (run.good) give_back(std::move(mine));
}

// Null: there is no memory for one.
std::unique_ptr<StagingCopy::Lane> StagingCopy::lane(uint32_t ordinal) {
  const std::lock_guard lock(mutex_);
  const auto find = [&] {
    return std::find_if(idle_.begin(), idle_.end(), [&](const auto& one) { return one->ordinal() == ordinal; });
  };
  if (find() == idle_.end()) make_lanes(ordinal, 1);  // others have them
  const auto found = find();
  if (found == idle_.end()) return nullptr;
  std::unique_ptr<Lane> lane = std::move(*found);
  idle_.erase(found);
  return lane;
}

void StagingCopy::give_back(std::unique_ptr<Lane> lane) {
  const std::lock_guard lock(mutex_);
  const Spent spent = lane->spent();
  spent_.copying_ns += spent.copying_ns;
  spent_.waiting_ns += spent.waiting_ns;
  idle_.push_back(std::move(lane));
}

std::string StagingCopy::text(const Spent& spent) {
  return "of all threads together " + in_ms(spent.copying_ns) + " copying, " + in_ms(spent.waiting_ns) +
         " waiting for the device, " + in_ms(spent.making_ns) + " making buffers";
}

StagingCopy::Spent StagingCopy::spent() {
  const std::lock_guard lock(mutex_);
  return std::exchange(spent_, {});
}

}  // namespace xmig::server
