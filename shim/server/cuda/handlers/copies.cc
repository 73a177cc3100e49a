#include "server/cuda/handlers/copies.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "server/cuda/handlers/await.h"

namespace xmig::server {
namespace {

constexpr uint64_t kMaxRows = 1ull << 40;
constexpr uint64_t kComparedBytes = 1 << 20;
constexpr uint64_t kReadAtCall = 64 << 10;  // seen on an H100, driver 580.159
static_assert(kComparedBytes <= kScratchBytes);

uint64_t address_of(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

}  // namespace

Copies::Copies(const Session& session, Streams& streams, Addresses& addresses, Peers& peers, Intake& intake,
               const OutsideWaits& outside)
    : driver_(session.device.driver()),
      contexts_(session.services.contexts),
      job_(session.services.job),
      memory_(session.memory),
      replies_(session.replies),
      waits_(session.waits),
      working_(session.working),
      current_(session.current),
      schedule_(session.schedule),
      execution_(session.execution),
      streams_(streams),
      addresses_(addresses),
      peers_(peers),
      intake_(intake),
      outside_(outside),
      scratch_(session.device) {}

// Rows in memory: `height` times `width` bytes, `pitch` apart.
struct Copies::Plane {
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

CUresult Copies::to_device(const Plane& to, const Plane& from, CUstream stream) {
  if (to.dense() && from.dense()) {
    return driver_.cuMemcpyHtoDAsync_v2(addresses_.where_the_device_has(to.address),
                                        reinterpret_cast<const void*>(from.address), to.bytes, stream);
  }
  CUDA_MEMCPY2D copy{};
  copy.srcMemoryType = CU_MEMORYTYPE_HOST;
  copy.srcHost = reinterpret_cast<const void*>(from.address);
  copy.srcPitch = from.pitch;
  copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.dstDevice = addresses_.where_the_device_has(to.address);
  copy.dstPitch = to.pitch;
  copy.WidthInBytes = to.width;
  copy.Height = to.height;
  return driver_.cuMemcpy2DAsync_v2(&copy, stream);
}

// From page-locked memory, when the stream has come to it. What is small the driver reads at the call, if the stream has nothing
// to wait for but what blocking streams wait for by themselves: the null stream for them, they for it. In a stream that waits for
// an event it does not.
CUresult Copies::to_device_in_turn(const Plane& to, const Plane& from, uint32_t ordinal, CUstream stream) {
  if (streams_.captures() || from.bytes >= kReadAtCall || ordinal != streams_.ordinal()) return to_device(to, from, stream);
  return streams_.aside(ordinal, stream, [&](CUstream there) { return to_device(to, from, there); });
}

CUresult Copies::to_host(const Plane& to, const Plane& from, CUstream stream) {
  if (to.dense() && from.dense()) {
    return driver_.cuMemcpyDtoHAsync_v2(reinterpret_cast<void*>(to.address), addresses_.where_the_device_has(from.address),
                                        from.bytes, stream);
  }
  CUDA_MEMCPY2D copy{};
  copy.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcDevice = addresses_.where_the_device_has(from.address);
  copy.srcPitch = from.pitch;
  copy.dstMemoryType = CU_MEMORYTYPE_HOST;
  copy.dstHost = reinterpret_cast<void*>(to.address);
  copy.dstPitch = to.pitch;
  copy.WidthInBytes = from.width;
  copy.Height = from.height;
  return driver_.cuMemcpy2DAsync_v2(&copy, stream);
}

CUresult Copies::on_xmCopyFromHost(Record& record) {
  Args_xmCopyFromHost args;
  CUstream stream = nullptr;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!streams_.translate(args.stream, &stream)) return CUDA_ERROR_INVALID_HANDLE;
  Plane to{args.destination, args.pitch, args.width, args.height};
  if (!to.measure() || to.bytes != record.payload().size() || !addresses_.live(to.address, to.extent)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (to.bytes == 0) return CUDA_SUCCESS;
  Plane from{address_of(record.payload().data()), args.width, args.width, args.height};
  from.measure();
  return streams_.where_it_is(to.address, stream, [&](CUstream there) { return to_device(to, from, there); });
}

CUresult Copies::on_device(const Plane& to, const Plane& from, CUstream stream) {
  const CUdeviceptr target = addresses_.where_the_device_has(to.address), source = addresses_.where_the_device_has(from.address);
  if (to.dense() && from.dense()) return driver_.cuMemcpyDtoDAsync_v2(target, source, to.bytes, stream);
  CUDA_MEMCPY2D copy{};
  copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcDevice = source;
  copy.srcPitch = from.pitch;
  copy.dstDevice = target;
  copy.dstPitch = to.pitch;
  copy.WidthInBytes = to.width;
  copy.Height = to.height;
  return driver_.cuMemcpy2DAsync_v2(&copy, stream);
}

// Between any two devices. A device that reaches the other's memory copies it as it does its own. Otherwise the driver is informed
// of both contexts: it has a way in any case, in the last resort through host memory.
CUresult Copies::between(const Plane& to, const Plane& from, CUstream stream) {
  const bool from_device = contexts_.is_open(ordinal_of_device_address(from.address));
  const bool to_device = contexts_.is_open(ordinal_of_device_address(to.address));
  const uint32_t source = streams_.home_of(from_device ? from.address : to.address);
  const uint32_t target = streams_.home_of(to_device ? to.address : from.address);
  const uint32_t at = streams_.ordinal() == target ? target : source;
  return streams_.on_device_of(at, stream, [&](CUstream there) -> CUresult {
    if (source == target) return on_device(to, from, there);
    const uint32_t other = at == source ? target : source;
    // A graph's copies are settled when it is made, and what the driver says of such a node it says only at its launch.
    if (streams_.captures()) {
      if (const CUresult result = peers_.share_for_good(other, at); result != CUDA_SUCCESS) return result;
    }
    return peers_.shares(other, at) ? on_device(to, from, there) : to_peer(to, from, there);
  });
}

CUresult Copies::to_peer(const Plane& to, const Plane& from, CUstream stream) {
  const auto source = static_cast<CUcontext>(contexts_.real(ordinal_of_device_address(from.address)));
  const auto target = static_cast<CUcontext>(contexts_.real(ordinal_of_device_address(to.address)));
  if (to.dense() && from.dense()) {
    return driver_.cuMemcpyPeerAsync(addresses_.where_the_device_has(to.address), target,
                                     addresses_.where_the_device_has(from.address), source, to.bytes, stream);
  }
  CUDA_MEMCPY3D_PEER copy{};
  copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcDevice = addresses_.where_the_device_has(from.address);
  copy.srcContext = source;
  copy.srcPitch = from.pitch;
  copy.dstDevice = addresses_.where_the_device_has(to.address);
  copy.dstContext = target;
  copy.dstPitch = to.pitch;
  copy.WidthInBytes = to.width;
  copy.Height = copy.srcHeight = copy.dstHeight = to.height;
  copy.Depth = 1;
  return driver_.cuMemcpy3DPeerAsync(&copy, stream);
}

// Nothing, if not even a snapshot makes room.
std::optional<uint64_t> Copies::log_space(uint32_t ordinal, uint64_t bytes) {
  const auto take = [&] {
    const std::lock_guard lock(memory_.mutex);
    return memory_.copy_log.take(ordinal, bytes, current_.position);
  };
  std::optional<uint64_t> space = take();
  if (!space && bytes <= journal::kGranule && execution_.take_snapshot("much was copied from page-locked memory")) space = take();
  return space;
}

// In stream order: from here on a replay finds the bytes where the record says.
CUresult Copies::note_copied(Record& record, uint64_t kept, CUstream stream) {
  record.shared()->reply_hash = kept;
  const auto state = static_cast<CUdeviceptr>(reinterpret_cast<uintptr_t>(&record.shared()->state));
  return driver_.cuStreamWriteValue32_v2(stream, state, journal::kCopied, CU_STREAM_WRITE_VALUE_DEFAULT);
}

CUresult Copies::on_xmCopyFromPinned(Record& record) {
  Args_xmCopyFromPinned args;
  CUstream stream = nullptr;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!streams_.translate(args.stream, &stream)) return CUDA_ERROR_INVALID_HANDLE;
  Plane to{args.destination, args.pitch, args.width, args.height};
  Plane from{args.source, args.source_pitch, args.width, args.height};
  if (!to.measure() || !from.measure() || !addresses_.live(to.address, to.extent) || !job_.is_pinned(from.address, from.extent)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (to.bytes == 0) return CUDA_SUCCESS;
  const bool copied = record.state() == journal::kCopied;
  if (copied && !memory_.copy_log.holds(record.header().reply_hash, to.bytes)) return CUDA_ERROR_INVALID_VALUE;
  const uint32_t home = streams_.home_of(to.address);
  const std::optional<uint64_t> space = copied ? record.header().reply_hash : log_space(home, to.bytes);
  return streams_.on_device_of(home, stream, [&](CUstream there) -> CUresult {
    if (!space) {
      schedule_.set_snapshot_now(true);  // before the program can know that the buffer is its own again
      return to_device_in_turn(to, from, home, there);
    }
    Plane kept{*space, args.width, args.width, args.height};
    kept.measure();
    if (!copied) {
      if (const CUresult result = bring(record, home, kept, from, there); result != CUDA_SUCCESS) return result;
    }
    return on_device(to, kept, there);
  });
}

// Into the copy log of this device; ahead of the work before it in the stream, if nothing that is yet to happen can change the
// bytes.
CUresult Copies::bring(Record& record, uint32_t ordinal, const Plane& kept, const Plane& from, CUstream stream) {
  const bool settled = !streams_.captures() && !outside_.any() && !intake_.is_written(from.address, from.extent);
  const CUstream ahead = settled ? intake_.stream(ordinal) : nullptr;
  const CUstream way = ahead ? ahead : stream;
  if (ahead) working_.add(ahead, ordinal);
  CUresult result = ahead ? to_device(kept, from, ahead) : to_device_in_turn(kept, from, ordinal, stream);
  if (result == CUDA_SUCCESS) result = note_copied(record, kept.address, way);
  return result == CUDA_SUCCESS && ahead ? intake_.join(ordinal, stream) : result;
}

CUresult Copies::on_xmCopyToHost(Record& record) {
  Args_xmCopyToHost args;
  CUstream stream = nullptr;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!streams_.translate(args.stream, &stream)) return CUDA_ERROR_INVALID_HANDLE;
  Plane from{args.source, args.pitch, args.width, args.height};
  if (!from.measure() || !addresses_.live(from.address, from.extent)) return CUDA_ERROR_INVALID_VALUE;
  const bool inline_reply = args.staging == ~0ull;
  if (!inline_reply && args.staging > journal::kStagingBytes) return CUDA_ERROR_INVALID_VALUE;
  const uint64_t space = inline_reply ? record.reply_space().size() : journal::kStagingBytes - args.staging;
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
    const CUresult result = streams_.where_it_is(from.address, stream, [&](CUstream there) { return to_host(to, from, there); });
    if (result != CUDA_SUCCESS) return result;
  }
  wait->streams.push_back(stream);
  return await(waits_, streams_, record, std::move(wait));
}

CUresult Copies::on_xmCopyToPinned(Record& record) {
  Args_xmCopyToPinned args;
  CUstream stream = nullptr;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!streams_.translate(args.stream, &stream)) return CUDA_ERROR_INVALID_HANDLE;
  Plane from{args.source, args.pitch, args.width, args.height};
  Plane to{args.destination, args.destination_pitch, args.width, args.height};
  if (!from.measure() || !to.measure() || !addresses_.live(from.address, from.extent) || !job_.is_pinned(to.address, to.extent)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (from.bytes == 0) return CUDA_SUCCESS;
  const uint32_t home = streams_.home_of(from.address);
  if (record.state() == journal::kCopied) {
    return streams_.on_device_of(home, stream, [&](CUstream there) { return compare_with_pinned(record, from, there); });
  }
  intake_.will_write(to.address, to.extent);
  // What is small is kept for comparison: results are; what is large is somebody's checkpoint.
  const uint64_t space = from.bytes <= kComparedBytes ? log_space(home, from.bytes).value_or(0) : 0;
  return streams_.on_device_of(home, stream, [&](CUstream there) -> CUresult {
    Plane source = from;
    if (space) {
      source = {space, args.width, args.width, args.height};
      source.measure();
      if (const CUresult result = on_device(source, from, there); result != CUDA_SUCCESS) return result;
    }
    if (const CUresult result = to_host(to, source, there); result != CUDA_SUCCESS) return result;
    return note_copied(record, space, there);
  });
}

// The program has these bytes, and may have changed them since: the device compares what it has now with what it had.
struct Copies::PinnedWrite {
  Replies& replies;
  Answer answer;
  ScratchPool::Buffer before, now;
  size_t bytes;

  static void CUDA_CB compare(void* self) {
    const std::unique_ptr<PinnedWrite> write(static_cast<PinnedWrite*>(self));
    write->answer.hash = XXH3_64bits(write->now.get(), write->bytes);
    write->replies.compare(write->answer, CUDA_SUCCESS, XXH3_64bits(write->before.get(), write->bytes));
    write->replies.met();
  }
};

CUresult Copies::compare_with_pinned(Record& record, const Plane& from, CUstream stream) {
  const uint64_t kept = record.header().reply_hash;
  if (kept == 0) return CUDA_SUCCESS;
  if (from.bytes > kComparedBytes || !memory_.copy_log.holds(kept, from.bytes)) return CUDA_ERROR_INVALID_VALUE;
  ScratchPool::Buffer before = scratch_.take(), now = scratch_.take();
  if (!before || !now) return CUDA_ERROR_OUT_OF_MEMORY;
  Plane had{kept, from.width, from.width, from.height};
  Plane to_before{address_of(before.get()), from.width, from.width, from.height};
  Plane to_now{address_of(now.get()), from.width, from.width, from.height};
  had.measure();
  to_before.measure();
  to_now.measure();
  CUresult result = to_host(to_before, had, stream);
  if (result == CUDA_SUCCESS) result = to_host(to_now, from, stream);
  if (result != CUDA_SUCCESS) return result;
  auto write = std::make_unique<PinnedWrite>(
      PinnedWrite{replies_, Answer::to(record), std::move(before), std::move(now), from.bytes});
  replies_.expect();
  result = driver_.cuLaunchHostFunc(stream, &PinnedWrite::compare, write.get());
  if (result == CUDA_SUCCESS) {
    write.release();
  } else {
    replies_.met();
  }
  return result;
}

CUresult Copies::on_xmCopy2D(Record& record) {
  Args_xmCopy2D args;
  CUstream stream = nullptr;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!streams_.translate(args.stream, &stream)) return CUDA_ERROR_INVALID_HANDLE;
  Plane to{args.destination, args.destination_pitch, args.width, args.height};
  Plane from{args.source, args.source_pitch, args.width, args.height};
  if (!to.measure() || !from.measure() || !addresses_.live(to.address, to.extent) || !addresses_.live(from.address, from.extent)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (to.bytes == 0) return CUDA_SUCCESS;
  return between(to, from, stream);
}

CUresult Copies::on_cuMemcpyDtoDAsync_v2(Record& record) {
  Args_cuMemcpyDtoDAsync_v2 args;
  CUstream stream = nullptr;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!streams_.translate(args.hStream, &stream)) return CUDA_ERROR_INVALID_HANDLE;
  if (!addresses_.reachable(args.dstDevice, args.ByteCount) || !addresses_.reachable(args.srcDevice, args.ByteCount)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  Plane to{args.dstDevice, args.ByteCount, args.ByteCount, 1};
  Plane from{args.srcDevice, args.ByteCount, args.ByteCount, 1};
  if (!to.measure() || !from.measure()) return CUDA_ERROR_INVALID_VALUE;
  return to.bytes == 0 ? CUDA_SUCCESS : between(to, from, stream);
}

}  // namespace xmig::server
