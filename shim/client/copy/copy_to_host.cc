// Copies from the device to memory that only this process sees. Small ones come back in the record, larger ones in
// pieces through the staging slots, several at once: the server fills one while this thread empties another.
#include <array>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <optional>

#include "client/copy/copy.h"
#include "client/copy/copy_pieces.h"
#include "client/journal/append.h"
#include "journal/layout.h"

namespace xmig::client {

namespace {

using journal::kInlineReplyBytes;
using journal::kStagingSlots;

// What goes through a slot at once: less than the slot, so that it is still in the cache when it is taken out.
constexpr uint64_t kPiece = 1ull << 20;
constexpr uint64_t kInReply = ~0ull;
static_assert(kPiece <= journal::kStagingSlotBytes);

// The slots are shared by the threads. A thread sleeps for one only while it has none, so nobody waits in a circle.
class Slots {
 public:
  uint32_t acquire() {
    std::unique_lock guard(lock_);
    freed_.wait(guard, [this] { return free_ != 0; });
    return take();
  }
  std::optional<uint32_t> try_acquire() {
    const std::lock_guard guard(lock_);
    if (!free_) return std::nullopt;
    return take();
  }
  void release(uint32_t slot) {
    {
      const std::lock_guard guard(lock_);
      free_ |= 1u << slot;
    }
    freed_.notify_one();
  }

 private:
  uint32_t take() {
    const auto slot = static_cast<uint32_t>(__builtin_ctz(free_));
    free_ &= free_ - 1;
    return slot;
  }
  std::mutex lock_;
  std::condition_variable freed_;
  uint32_t free_ = (1u << kStagingSlots) - 1;
};
Slots& slots() {
  static auto& all = *new Slots;
  return all;
}

void scatter(const Copy& c, const std::byte* packed) {
  for (uint64_t row = 0; row < c.height; ++row) {
    std::memcpy(reinterpret_cast<void*>(c.destination + row * c.destination_pitch), packed + row * c.width, c.width);
  }
}

Args_xmCopyToHost arguments(const Copy& c, uint64_t staging) {
  return {.source = c.source,
          .pitch = c.source_pitch,
          .width = c.width,
          .height = c.height,
          .stream = reinterpret_cast<uint64_t>(c.stream),
          .staging = staging};
}

CUresult copy_in_reply(const Copy& c) {
  const uint64_t bytes = c.width * c.height;
  std::array<std::byte, kInlineReplyBytes> packed;
  const Args_xmCopyToHost args = arguments(c, kInReply);
  Pending pending = start(Op::xmCopyToHost, &args, sizeof(args), {}, bytes);
  size_t used = 0;
  const CUresult result = finish(pending, packed.data(), bytes, &used);
  if (result != CUDA_SUCCESS) return result;
  if (used != bytes) return CUDA_ERROR_UNKNOWN;  // the server broke its word
  scatter(c, packed.data());
  return CUDA_SUCCESS;
}

struct InFlight {
  Pending pending;
  Copy piece;
  uint32_t slot = 0;
};

CUresult copy_through_slots(const Copy& c) {
  Pieces pieces(c, kPiece);
  std::array<InFlight, kStagingSlots> ring;
  size_t first = 0;
  size_t count = 0;
  CUresult error = CUDA_SUCCESS;
  while (count || (!pieces.done() && error == CUDA_SUCCESS)) {
    while (error == CUDA_SUCCESS && !pieces.done() && count < ring.size()) {
      const auto slot = count ? slots().try_acquire() : slots().acquire();
      if (!slot) break;
      InFlight& flight = ring[(first + count++) % ring.size()];
      flight.piece = pieces.next();
      flight.slot = *slot;
      const Args_xmCopyToHost args = arguments(flight.piece, *slot * journal::kStagingSlotBytes);
      flight.pending = start(Op::xmCopyToHost, &args, sizeof(args), {}, 0);
    }
    InFlight& oldest = ring[first];
    const CUresult result = finish(oldest.pending, nullptr, 0);
    if (error == CUDA_SUCCESS) error = result;
    if (error == CUDA_SUCCESS) scatter(oldest.piece, staging() + oldest.slot * journal::kStagingSlotBytes);
    slots().release(oldest.slot);
    first = (first + 1) % ring.size();
    --count;
  }
  return error;
}

}  // namespace

CUresult copy_to_host(const Copy& checked) {
  const bool small = checked.height <= kInlineReplyBytes / checked.width;
  return small ? copy_in_reply(checked) : copy_through_slots(checked);
}

}  // namespace xmig::client
