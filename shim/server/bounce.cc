#include "server/bounce.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "journal/layout.h"
#include "journal/mapping.h"

namespace xmig::server {

using journal::kGranule;

namespace {

constexpr size_t kMostThreads = 8;  // more do not make memory faster

}  // namespace

// What one thread has: a stream of one device, and two buffers with an event behind the last use of each.
class Bounce::Lane {
 public:
  Lane(const DriverTable& driver, uint32_t ordinal) : driver_(driver), ordinal_(ordinal) {
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS;
    buffers_ = journal::Mapping(::mmap(nullptr, 2 * kGranule, PROT_READ | PROT_WRITE, kFlags, -1, 0), 2 * kGranule);
    good_ = static_cast<bool>(buffers_) &&
            driver_.cuStreamCreateWithPriority(&stream_, CU_STREAM_NON_BLOCKING, 0) == CUDA_SUCCESS;
    if (!good_) return;
    // Where this fails the copies are slower, and right.
    driver_.cuMemHostRegister_v2(buffers_.data(), buffers_.size(), CU_MEMHOSTREGISTER_PORTABLE);
    for (CUevent& event : events_) good_ &= driver_.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS;
  }
  ~Lane() {
    if (stream_) driver_.cuStreamSynchronize(stream_);
    for (const CUevent event : events_) {
      if (event) driver_.cuEventDestroy_v2(event);
    }
    if (stream_) driver_.cuStreamDestroy_v2(stream_);
    if (buffers_) driver_.cuMemHostUnregister(buffers_.data());
  }
  Lane(const Lane&) = delete;

  bool good() const { return good_; }
  uint32_t ordinal() const { return ordinal_; }

  bool to_plain(const Piece& piece) {
    const size_t mine = next();
    if (driver_.cuMemcpyDtoHAsync_v2(buffer(mine), piece.device, kGranule, stream_) != CUDA_SUCCESS || !mark(mine)) {
      return false;
    }
    // While the device fills this one, the one before it is emptied.
    const bool fine = finish();
    waiting_ = piece.plain;
    waiting_in_ = mine;
    return fine;
  }
  bool to_device(const Piece& piece) {
    const size_t mine = next();
    if (used_[mine] && driver_.cuEventSynchronize(events_[mine]) != CUDA_SUCCESS) return false;
    std::memcpy(buffer(mine), piece.plain, kGranule);
    return driver_.cuMemcpyHtoDAsync_v2(piece.device, buffer(mine), kGranule, stream_) == CUDA_SUCCESS && mark(mine);
  }
  // The last copy is done.
  bool finish() {
    if (!waiting_) return true;
    if (driver_.cuEventSynchronize(events_[waiting_in_]) != CUDA_SUCCESS) return false;
    std::memcpy(std::exchange(waiting_, nullptr), buffer(waiting_in_), kGranule);
    return true;
  }
  bool settle() { return finish() && driver_.cuStreamSynchronize(stream_) == CUDA_SUCCESS; }

 private:
  size_t next() { return turn_++ % 2; }
  std::byte* buffer(size_t i) { return buffers_.data() + i * kGranule; }
  bool mark(size_t i) {
    used_[i] = true;
    return driver_.cuEventRecordWithFlags(events_[i], stream_, 0) == CUDA_SUCCESS;
  }

  const DriverTable& driver_;
  const uint32_t ordinal_;
  journal::Mapping buffers_;
  CUstream stream_ = nullptr;
  std::array<CUevent, 2> events_{};
  std::array<bool, 2> used_{};
  size_t turn_ = 0;
  std::byte* waiting_ = nullptr;  // what the buffer `waiting_in_` is for
  size_t waiting_in_ = 0;
  bool good_ = false;
};

bool Bounce::copy(std::span<const Piece> pieces, bool to_plain) {
  std::atomic<size_t> next{0};
  std::atomic<bool> good{true};
  const auto work = [&] {
    std::unique_ptr<Lane> lane;
    for (size_t i; good && (i = next.fetch_add(1)) < pieces.size();) {
      const Piece& piece = pieces[i];
      use_ordinal_(piece.ordinal);
      if (!lane || lane->ordinal() != piece.ordinal) {
        if (lane && !lane->settle()) good = false;
        lane = std::make_unique<Lane>(driver_, piece.ordinal);
      }
      if (!lane->good() || !(to_plain ? lane->to_plain(piece) : lane->to_device(piece))) good = false;
    }
    if (lane && !lane->settle()) good = false;
  };
  const size_t threads = std::min({kMostThreads, size_t{std::max(1u, std::thread::hardware_concurrency())}, pieces.size() / 4 + 1});
  std::vector<std::thread> helpers;
  try {
    while (helpers.size() + 1 < threads) helpers.emplace_back(work);
  } catch (const std::system_error&) {
    // No thread to be had: those that there are do it.
  }
  work();
  for (std::thread& helper : helpers) helper.join();
  return good;
}

}  // namespace xmig::server
