// Copies between the program and the device.
//
// The journal is the source of copies from pageable memory: the payload stays where it is until a cut. Bytes from
// pinned memory are kept in the record when the copy executes. Bytes that the program has are never written twice: a
// redo brings them to a scratch buffer, and compares.
#include <algorithm>
#include <cstring>
#include <new>

#include "server/executor.h"

namespace xmig::server {
namespace {

constexpr uint64_t kMaxRows = 1ull << 40;

uint64_t address_of(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

}  // namespace

// Rows in memory: `height` times `width` bytes, `pitch` apart.
struct Executor::Plane {
  uint64_t address;
  uint64_t pitch;
  uint64_t width;
  uint64_t height;
  uint64_t bytes = 0;   // of the rows
  uint64_t extent = 0;  // from the first byte to the last

  bool measure() {
    if (width == 0 || height == 0) return true;
    if (height == 1) pitch = width;
    uint64_t gaps = 0;
    return width <= kMaxRows && height <= kMaxRows && pitch >= width && !__builtin_mul_overflow(width, height, &bytes) &&
           !__builtin_mul_overflow(pitch, height - 1, &gaps) && !__builtin_add_overflow(gaps, width, &extent);
  }
  bool dense() const { return pitch == width || height == 1; }
  // Some of the rows, from `first` on.
  Plane rows(uint64_t first, uint64_t count) const {
    Plane part{address + first * pitch, pitch, width, count};
    part.measure();
    return part;
  }
};

namespace {

// XXH3 of the rows as if they lay tightly packed.
template <typename Plane>
uint64_t hash_rows(const Plane& plane) {
  const auto* row = reinterpret_cast<const std::byte*>(plane.address);
  if (plane.dense()) return XXH3_64bits(row, plane.bytes);
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  for (uint64_t y = 0; y < plane.height; ++y, row += plane.pitch) XXH3_64bits_update(&state, row, plane.width);
  return XXH3_64bits_digest(&state);
}

}  // namespace

CUresult Executor::to_device(const Plane& to, const Plane& from, CUstream stream) {
  if (to.dense() && from.dense()) {
    return driver_.cuMemcpyHtoDAsync_v2(to.address, reinterpret_cast<const void*>(from.address), to.bytes, stream);
  }
  CUDA_MEMCPY2D copy{};
  copy.srcMemoryType = CU_MEMORYTYPE_HOST;
  copy.srcHost = reinterpret_cast<const void*>(from.address);
  copy.srcPitch = from.pitch;
  copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.dstDevice = to.address;
  copy.dstPitch = to.pitch;
  copy.WidthInBytes = to.width;
  copy.Height = to.height;
  return driver_.cuMemcpy2DAsync_v2(&copy, stream);
}

CUresult Executor::to_host(const Plane& to, const Plane& from, CUstream stream) {
  if (to.dense() && from.dense()) {
    return driver_.cuMemcpyDtoHAsync_v2(reinterpret_cast<void*>(to.address), from.address, from.bytes, stream);
  }
  CUDA_MEMCPY2D copy{};
  copy.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcDevice = from.address;
  copy.srcPitch = from.pitch;
  copy.dstMemoryType = CU_MEMORYTYPE_HOST;
  copy.dstHost = reinterpret_cast<void*>(to.address);
  copy.dstPitch = to.pitch;
  copy.WidthInBytes = from.width;
  copy.Height = from.height;
  return driver_.cuMemcpy2DAsync_v2(&copy, stream);
}

CUresult Executor::on_xmCopyFromHost(Record& record) {
  Args_xmCopyFromHost args;
  CUstream stream = nullptr;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!translate(journal::Kind::kStream, args.stream, &stream)) return CUDA_ERROR_INVALID_HANDLE;
  Plane to{args.destination, args.pitch, args.width, args.height};
  if (!to.measure() || to.bytes != record.payload().size() || !live(to.address, to.extent)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (to.bytes == 0) return CUDA_SUCCESS;
  Plane from{address_of(record.payload().data()), args.width, args.width, args.height};
  from.measure();
  return to_device(to, from, stream);
}

// Runs on the device's thread, in stream order: what the program's buffer holds at this moment is what the copy means.
struct Executor::PinnedRead {
  Plane from;
  std::byte* payload;
  journal::RecordHeader* shared;

  static void CUDA_CB run(void* self) {
    const std::unique_ptr<PinnedRead> read(static_cast<PinnedRead*>(self));
    const auto* row = reinterpret_cast<const std::byte*>(read->from.address);
    std::byte* to = read->payload;
    for (uint64_t y = 0; y < read->from.height; ++y, row += read->from.pitch, to += read->from.width) {
      std::memcpy(to, row, read->from.width);
    }
    read->shared->state.store(journal::kCopied, std::memory_order_release);
  }
};

CUresult Executor::on_xmCopyFromPinned(Record& record) {
  Args_xmCopyFromPinned args;
  CUstream stream = nullptr;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!translate(journal::Kind::kStream, args.stream, &stream)) return CUDA_ERROR_INVALID_HANDLE;
  Plane to{args.destination, args.pitch, args.width, args.height};
  Plane from{args.source, args.source_pitch, args.width, args.height};
  if (!to.measure() || !from.measure() || to.bytes != record.payload().size() || !live(to.address, to.extent) ||
      !job_.is_pinned(from.address, from.extent)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (to.bytes == 0) return CUDA_SUCCESS;
  if (record.state() != journal::kCopied) {
    auto read = std::make_unique<PinnedRead>(PinnedRead{from, record.payload().data(), record.shared()});
    const CUresult result = driver_.cuLaunchHostFunc(stream, &PinnedRead::run, read.get());
    if (result != CUDA_SUCCESS) return result;
    read.release();  // run() owns it now
  }
  Plane kept{address_of(record.payload().data()), args.width, args.width, args.height};
  kept.measure();
  return to_device(to, kept, stream);
}

CUresult Executor::on_xmCopyToHost(Record& record) {
  Args_xmCopyToHost args;
  CUstream stream = nullptr;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!translate(journal::Kind::kStream, args.stream, &stream)) return CUDA_ERROR_INVALID_HANDLE;
  Plane from{args.source, args.pitch, args.width, args.height};
  if (!from.measure() || !live(from.address, from.extent)) return CUDA_ERROR_INVALID_VALUE;
  const bool inline_reply = args.staging == ~0ull;
  const uint64_t space = inline_reply ? record.reply_space().size()
                                      : journal::kStagingBytes - std::min(args.staging, journal::kStagingBytes);
  if (from.bytes > std::min<uint64_t>(space, kScratchBytes)) return CUDA_ERROR_INVALID_VALUE;

  auto wait = std::make_unique<Wait>();
  if (record.replied()) {
    wait->scratch = scratch_.take();
    if (!wait->scratch) return CUDA_ERROR_OUT_OF_MEMORY;
    wait->data = wait->scratch.get();
  } else {
    wait->data = inline_reply ? record.reply_space().data() : job_.staging().data() + args.staging;
  }
  wait->bytes = from.bytes;
  wait->inline_reply = inline_reply;
  if (from.bytes != 0) {
    Plane to{address_of(wait->data), args.width, args.width, args.height};
    to.measure();
    if (const CUresult result = to_host(to, from, stream); result != CUDA_SUCCESS) return result;
  }
  wait->streams.push_back(stream);
  return await(record, std::move(wait));
}

// The other half of a copy to pinned memory, on the device's thread, in stream order.
struct Executor::PinnedWrite {
  Replies& replies;
  Answer answer;
  Plane written;  // the program's buffer
  ScratchPool::Buffer scratch;  // holds one part of the rows after the other
  XXH3_state_t hash;

  static void CUDA_CB first(void* self) {
    const std::unique_ptr<PinnedWrite> write(static_cast<PinnedWrite*>(self));
    write->answer.shared->reply_hash = hash_rows(write->written);
    write->answer.shared->state.store(journal::kCopied, std::memory_order_release);
  }
};

CUresult Executor::on_xmCopyToPinned(Record& record) {
  Args_xmCopyToPinned args;
  CUstream stream = nullptr;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!translate(journal::Kind::kStream, args.stream, &stream)) return CUDA_ERROR_INVALID_HANDLE;
  Plane from{args.source, args.pitch, args.width, args.height};
  Plane to{args.destination, args.destination_pitch, args.width, args.height};
  if (!from.measure() || !to.measure() || !live(from.address, from.extent) || !job_.is_pinned(to.address, to.extent)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (from.bytes == 0) return CUDA_SUCCESS;
  if (record.state() == journal::kCopied) return compare_with_pinned(record, from, stream);
  if (const CUresult result = to_host(to, from, stream); result != CUDA_SUCCESS) return result;
  auto write = std::make_unique<PinnedWrite>(PinnedWrite{replies_, Answer::to(record), to, {nullptr, {}}, {}});
  const CUresult result = driver_.cuLaunchHostFunc(stream, &PinnedWrite::first, write.get());
  if (result == CUDA_SUCCESS) write.release();
  return result;
}

// The program has these bytes, and may have changed them since: fetch them again, part by part, and compare the hash.
CUresult Executor::compare_with_pinned(Record& record, const Plane& from, CUstream stream) {
  struct Part {
    std::shared_ptr<PinnedWrite> whole;
    uint64_t bytes;
    bool last;

    static void CUDA_CB run(void* self) {
      const std::unique_ptr<Part> part(static_cast<Part*>(self));
      PinnedWrite& whole = *part->whole;
      XXH3_64bits_update(&whole.hash, whole.scratch.get(), part->bytes);
      if (!part->last) return;
      whole.answer.hash = XXH3_64bits_digest(&whole.hash);
      whole.replies.compare(whole.answer, CUDA_SUCCESS, whole.answer.shared->reply_hash);
      whole.replies.met();
    }
  };
  ScratchPool::Buffer scratch = scratch_.take();
  if (!scratch) return CUDA_ERROR_OUT_OF_MEMORY;
  const auto whole =
      std::make_shared<PinnedWrite>(PinnedWrite{replies_, Answer::to(record), from, std::move(scratch), {}});
  XXH3_64bits_reset(&whole->hash);
  replies_.expect();
  const auto compare = [&](const Plane& part, bool last) {
    Plane to{address_of(whole->scratch.get()), part.width, part.width, part.height};
    to.measure();
    CUresult result = to_host(to, part, stream);
    if (result != CUDA_SUCCESS) return result;
    auto call = std::make_unique<Part>(Part{whole, part.bytes, last});
    result = driver_.cuLaunchHostFunc(stream, &Part::run, call.get());
    if (result == CUDA_SUCCESS) call.release();
    return result;
  };
  // Rows that lie close together are one long row; a long row comes in pieces, short ones several at a time.
  Plane rows = from;
  if (rows.dense()) {
    rows = {from.address, from.bytes, from.bytes, 1};
    rows.measure();
  }
  const uint64_t together = std::max<uint64_t>(1, kScratchBytes / rows.width);
  for (uint64_t y = 0; y < rows.height; y += together) {
    const Plane some = rows.rows(y, std::min(together, rows.height - y));
    const bool last_rows = y + together >= rows.height;
    for (uint64_t x = 0; x < some.width; x += kScratchBytes) {
      Plane part{some.address + x, some.pitch, std::min<uint64_t>(some.width - x, kScratchBytes), some.height};
      part.measure();
      const CUresult result = compare(part, last_rows && x + part.width == some.width);
      if (result == CUDA_SUCCESS) continue;
      replies_.met();
      return result;
    }
  }
  return CUDA_SUCCESS;
}

CUresult Executor::on_xmCopy2D(Record& record) {
  Args_xmCopy2D args;
  CUstream stream = nullptr;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!translate(journal::Kind::kStream, args.stream, &stream)) return CUDA_ERROR_INVALID_HANDLE;
  Plane to{args.destination, args.destination_pitch, args.width, args.height};
  Plane from{args.source, args.source_pitch, args.width, args.height};
  if (!to.measure() || !from.measure() || !live(to.address, to.extent) || !live(from.address, from.extent)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (to.bytes == 0) return CUDA_SUCCESS;
  CUDA_MEMCPY2D copy{};
  copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcDevice = from.address;
  copy.srcPitch = from.pitch;
  copy.dstDevice = to.address;
  copy.dstPitch = to.pitch;
  copy.WidthInBytes = to.width;
  copy.Height = to.height;
  return driver_.cuMemcpy2DAsync_v2(&copy, stream);
}

}  // namespace xmig::server
