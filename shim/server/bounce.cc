#include "server/bounce.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "journal/layout.h"
#include "journal/mapping.h"
#include "server/clock.h"

namespace xmig::server {

using journal::kGranule;

namespace {

constexpr const char* kDeviceFailed = "the device could not copy";

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
int transfer(auto&& call, int fd, std::byte* buffer, uint64_t offset) {
  for (uint64_t done = 0; done < kGranule;) {
    const ssize_t now = call(fd, buffer + done, kGranule - done, static_cast<off_t>(offset + done));
    if (now < 0 && errno == EINTR) continue;
    if (now <= 0) return now < 0 ? errno : EIO;  // shorter than it was
    done += static_cast<uint64_t>(now);
  }
  return 0;
}

}  // namespace

// What one thread has: a stream of one device, and two buffers with an event behind the last use of each.
class Bounce::Lane {
 public:
  Lane(const DriverTable& driver, uint32_t ordinal) : driver_(driver), ordinal_(ordinal) {
    const Timer timer(spent_.making_ns);
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS;
    buffers_ = journal::Mapping(::mmap(nullptr, 2 * kGranule, PROT_READ | PROT_WRITE, kFlags, -1, 0), 2 * kGranule);
    if (!buffers_) return;
    // Where these fail, as on a device without memory, the copies are slower, and right.
    if (driver_.cuStreamCreateWithPriority(&stream_, CU_STREAM_NON_BLOCKING, 0) != CUDA_SUCCESS) stream_ = nullptr;
    driver_.cuMemHostRegister_v2(buffers_.data(), buffers_.size(), CU_MEMHOSTREGISTER_PORTABLE);
    good_ = true;
    for (CUevent& event : events_) good_ &= driver_.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS;
  }
  ~Lane() {
    driver_.cuStreamSynchronize(stream_);
    for (const CUevent event : events_) {
      if (event) driver_.cuEventDestroy_v2(event);
    }
    if (stream_) driver_.cuStreamDestroy_v2(stream_);
    if (buffers_) driver_.cuMemHostUnregister(buffers_.data());
  }
  Lane(const Lane&) = delete;

  bool good() const { return good_; }
  uint32_t ordinal() const { return ordinal_; }
  Spent spent() { return std::exchange(spent_, {}); }
  int error() const { return error_; }  // errno of the last failure; 0: it was the device's

  bool to_plain(const Piece& piece) {
    const size_t mine = next();
    if (driver_.cuMemcpyDtoHAsync_v2(buffer(mine), piece.device, kGranule, stream_) != CUDA_SUCCESS || !mark(mine)) {
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
      error_ = transfer(::pread, piece.fd, buffer(mine), piece.offset);
    }
    if (error_ != 0) return false;
    return driver_.cuMemcpyHtoDAsync_v2(piece.device, buffer(mine), kGranule, stream_) == CUDA_SUCCESS && mark(mine);
  }
  // All copies are done.
  bool settle() {
    if (!finish()) return false;
    const Timer timer(spent_.waiting_ns);
    return driver_.cuStreamSynchronize(stream_) == CUDA_SUCCESS;
  }

 private:
  size_t next() { return turn_++ % 2; }
  std::byte* buffer(size_t i) { return buffers_.data() + i * kGranule; }
  bool mark(size_t i) {
    used_[i] = true;
    return driver_.cuEventRecordWithFlags(events_[i], stream_, 0) == CUDA_SUCCESS;
  }
  bool wait(size_t i) {
    const Timer timer(spent_.waiting_ns);
    return driver_.cuEventSynchronize(events_[i]) == CUDA_SUCCESS;
  }
  bool finish() {
    if (!waiting_) return true;
    if (!wait(waiting_in_)) return false;
    const Piece piece = *std::exchange(waiting_, std::nullopt);
    const Timer timer(spent_.copying_ns);
    error_ = transfer(::pwrite, piece.fd, buffer(waiting_in_), piece.offset);
    return error_ == 0;
  }

  const DriverTable& driver_;
  const uint32_t ordinal_;
  journal::Mapping buffers_;
  CUstream stream_ = nullptr;
  std::array<CUevent, 2> events_{};
  std::array<bool, 2> used_{};
  size_t turn_ = 0;
  std::optional<Piece> waiting_;  // what the buffer `waiting_in_` is for
  size_t waiting_in_ = 0;
  Spent spent_;
  int error_ = 0;
  bool good_ = false;
};

// The pieces that one thread takes at a time, one after another, lie from one bound to the next.
struct Bounce::Run {
  bool to_plain;
  std::vector<Piece> pieces;
  std::vector<size_t> bounds{0};
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

Bounce::Bounce(const DriverTable& driver, std::function<void(uint32_t)> use_ordinal, size_t most_threads)
    : driver_(driver), use_ordinal_(std::move(use_ordinal)), most_threads_(most_threads) {}

Bounce::~Bounce() {
  for (std::unique_ptr<Lane>& lane : idle_) {
    use_ordinal_(lane->ordinal());
    lane.reset();
  }
}

// One descriptor's pieces are written by one thread: the kernel lets no two in at once.
bool Bounce::to_plain(std::span<const Piece> pieces, std::string& why) {
  Run all{.to_plain = true, .pieces{pieces.begin(), pieces.end()}};
  std::stable_sort(all.pieces.begin(), all.pieces.end(), [](const Piece& a, const Piece& b) { return a.fd < b.fd; });
  for (size_t i = 1; i < all.pieces.size(); ++i) {
    if (all.pieces[i].fd != all.pieces[i - 1].fd) all.bounds.push_back(i);
  }
  return run(all, why);
}

bool Bounce::to_device(std::span<const Piece> pieces, std::string& why) {
  constexpr size_t kAtOnce = 4;
  Run all{.to_plain = false, .pieces{pieces.begin(), pieces.end()}};
  for (size_t i = kAtOnce; i < all.pieces.size(); i += kAtOnce) all.bounds.push_back(i);
  return run(all, why);
}

bool Bounce::run(Run& run, std::string& why) {
  if (run.pieces.empty()) return true;
  const size_t groups = run.bounds.size();
  run.bounds.push_back(run.pieces.size());
  const size_t threads = std::min({most_threads_, size_t{std::max(1u, std::thread::hardware_concurrency())}, groups});
  std::vector<std::thread> helpers;
  try {
    while (helpers.size() + 1 < threads) helpers.emplace_back([this, &run] { work(run); });
  } catch (const std::system_error&) {
    // No thread to be had: those that there are do it.
  }
  work(run);
  for (std::thread& helper : helpers) helper.join();
  why = run.why;
  return run.good;
}

void Bounce::work(Run& run) {
  std::unique_ptr<Lane> mine;
  const auto check = [&](bool fine) {
    if (fine) return;
    const int error = mine->error();
    run.failed(error == 0 ? kDeviceFailed : std::string("what was kept off the device: ") + std::strerror(error));
  };
  for (size_t group; run.good && (group = run.next.fetch_add(1)) + 1 < run.bounds.size();) {
    for (size_t i = run.bounds[group]; run.good && i < run.bounds[group + 1]; ++i) {
      const Piece& piece = run.pieces[i];
      if (!mine || mine->ordinal() != piece.ordinal) {
        if (mine) {
          check(mine->settle());
          if (run.good) give_back(std::move(mine));
        }
        use_ordinal_(piece.ordinal);
        mine = lane(piece.ordinal);
        if (!mine->good()) return run.failed("there is no memory for buffers");
      }
      check(run.to_plain ? mine->to_plain(piece) : mine->to_device(piece));
    }
  }
  if (!mine || !run.good) return;
  check(mine->settle());
  if (run.good) give_back(std::move(mine));
}

std::unique_ptr<Bounce::Lane> Bounce::lane(uint32_t ordinal) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(idle_.begin(), idle_.end(), [&](const auto& one) { return one->ordinal() == ordinal; });
    if (found != idle_.end()) {
      std::unique_ptr<Lane> lane = std::move(*found);
      idle_.erase(found);
      return lane;
    }
  }
  return std::make_unique<Lane>(driver_, ordinal);
}

void Bounce::give_back(std::unique_ptr<Lane> lane) {
  const std::lock_guard lock(mutex_);
  const Spent spent = lane->spent();
  spent_.copying_ns += spent.copying_ns;
  spent_.waiting_ns += spent.waiting_ns;
  spent_.making_ns += spent.making_ns;
  idle_.push_back(std::move(lane));
}

std::string Bounce::text(const Spent& spent) {
  return "of all threads together " + in_ms(spent.copying_ns) + " in the kernel, " + in_ms(spent.waiting_ns) +
         " waiting for the device, " + in_ms(spent.making_ns) + " making buffers";
}

Bounce::Spent Bounce::spent() {
  const std::lock_guard lock(mutex_);
  return std::exchange(spent_, {});
}

}  // namespace xmig::server
