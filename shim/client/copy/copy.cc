#include "client/copy/copy.h"

#include <array>
#include <cstring>
#include <span>

#include "client/copy/copy_pieces.h"
#include "client/journal/append.h"
#include "client/journal/streams.h"
#include "client/memory/memory_map.h"
#include "client/stream/callbacks.h"
#include "journal/layout.h"
#include "local.h"
#include "records.h"

namespace xmig::client {

namespace {

// A record's payload is copied under the journal's lock: long enough for speed, short enough for other threads.
constexpr uint64_t kHostPiece = 256ull << 10;
constexpr uint64_t kPinnedPiece = journal::kGranule;  // what the server can keep in one piece
constexpr size_t kMaxSlices = 256;

static_assert(kHostPiece <= journal::kMaxPayload);

// The bytes are taken at the call, but page-locked memory means what is there when the stream comes to the copy: a host
// function before it may still have to write them. (Copies to such memory wait, so nothing else can.)
CUresult wait_for_writers(const Copy& c) {
  if (!host_functions_are_waiting()) [[likely]] return CUDA_SUCCESS;
  const auto source = memory_map().find(c.source);
  const bool registered = source && source->kind == MemoryKind::kRegistered;
  return registered ? client::cuStreamSynchronize(c.stream) : CUDA_SUCCESS;
}

CUresult copy_from_host(const Copy& c) {
  if (const CUresult error = wait_for_writers(c); error != CUDA_SUCCESS) return error;
  const bool dense = c.height == 1 || c.source_pitch == c.width;
  for (Pieces pieces(c, kHostPiece, dense ? ~0ull : kMaxSlices); !pieces.done();) {
    const Copy piece = pieces.next();
    const Args_xmCopyFromHost args{.destination = piece.destination,
                                   .pitch = piece.destination_pitch,
                                   .width = piece.width,
                                   .height = piece.height,
                                   .stream = number(piece.stream)};
    std::array<Slice, kMaxSlices> slices;
    size_t count = 0;
    if (dense) {
      slices[count++] = {reinterpret_cast<const void*>(piece.source), piece.width * piece.height};
    } else {
      for (; count < piece.height; ++count) {
        slices[count] = {reinterpret_cast<const void*>(piece.source + count * piece.source_pitch), piece.width};
      }
    }
    const CUresult result = append(Op::xmCopyFromHost, &args, sizeof(args), std::span(slices.data(), count));
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

CUresult copy_from_pinned(const Copy& c) {
  for (Pieces pieces(c, kPinnedPiece); !pieces.done();) {
    const Copy piece = pieces.next();
    const Args_xmCopyFromPinned args{.destination = piece.destination,
                                     .pitch = piece.destination_pitch,
                                     .width = piece.width,
                                     .height = piece.height,
                                     .stream = number(piece.stream),
                                     .source = piece.source,
                                     .source_pitch = piece.source_pitch};
    const CUresult result = append(Op::xmCopyFromPinned, &args, sizeof(args));
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

CUresult copy_to_pinned(const Copy& c) {
  const Args_xmCopyToPinned args{.source = c.source,
                                 .pitch = c.source_pitch,
                                 .width = c.width,
                                 .height = c.height,
                                 .stream = number(c.stream),
                                 .destination = c.destination,
                                 .destination_pitch = c.destination_pitch};
  return append(Op::xmCopyToPinned, &args, sizeof(args));
}

CUresult copy_on_device(const Copy& c) {
  if (c.height == 1) return record::cuMemcpyDtoDAsync_v2(c.destination, c.source, c.width, c.stream);
  const Args_xmCopy2D args{.destination = c.destination,
                           .destination_pitch = c.destination_pitch,
                           .source = c.source,
                           .source_pitch = c.source_pitch,
                           .width = c.width,
                           .height = c.height,
                           .stream = number(c.stream)};
  return append(Op::xmCopy2D, &args, sizeof(args));
}

CUresult copy_on_host(const Copy& c) {
  if (const CUresult result = client::cuStreamSynchronize(c.stream); result != CUDA_SUCCESS) return result;
  for (uint64_t row = 0; row < c.height; ++row) {
    std::memmove(reinterpret_cast<void*>(c.destination + row * c.destination_pitch),
                 reinterpret_cast<const void*>(c.source + row * c.source_pitch), c.width);
  }
  return CUDA_SUCCESS;
}

// Rows that follow one another without a gap on both sides are one row. False: the pitches make no sense.
bool normalise(Copy& c) {
  if (c.height == 1) {
    c.source_pitch = c.destination_pitch = c.width;
    return true;
  }
  if (c.source_pitch < c.width || c.destination_pitch < c.width) return false;
  if (c.source_pitch != c.width || c.destination_pitch != c.width) return true;
  uint64_t bytes = 0;
  if (__builtin_mul_overflow(c.width, c.height, &bytes)) return false;
  c.source_pitch = c.destination_pitch = c.width = bytes;
  c.height = 1;
  return true;
}

}  // namespace

CUresult copy(const Copy& request) {
  if (!valid_stream(request.stream)) return CUDA_ERROR_INVALID_HANDLE;
  if (!request.width || !request.height) return CUDA_SUCCESS;
  Copy c = request;
  if (!normalise(c)) return CUDA_ERROR_INVALID_VALUE;
  const Place from = memory_map().place(c.source, c.source_pitch, c.width, c.height);
  const Place to = memory_map().place(c.destination, c.destination_pitch, c.width, c.height);
  if (from == Place::kInvalid || to == Place::kInvalid) return CUDA_ERROR_INVALID_VALUE;
  if (from == Place::kDevice && to == Place::kDevice) return copy_on_device(c);
  if (from != Place::kDevice && to != Place::kDevice) return copy_on_host(c);
  if (from == Place::kPageable) return copy_from_host(c);
  // A small blocking copy is one round trip if this thread puts the bytes in place.
  const bool small = c.height <= journal::kInlineReplyBytes / c.width;
  if (to == Place::kPageable || (to == Place::kPinned && c.blocking && small)) return copy_to_host(c);
  const CUresult result = from == Place::kPinned ? copy_from_pinned(c) : copy_to_pinned(c);
  return result == CUDA_SUCCESS && c.blocking ? client::cuStreamSynchronize(c.stream) : result;
}

}  // namespace xmig::client
