// The bytes of numbers as planes, and back (docs/formats.md, checkpoints): the first bytes of all, then the second ones, and so on. For
// the daemon, which is Python: there it takes thirty times as long, and no other thread can do anything meanwhile.
#include <cstddef>
#include <cstdint>

namespace {

// Where each plane begins: the first `bytes % width` of them have one byte more.
template <size_t width, typename Byte>
struct Planes {
  Planes(Byte* planes, size_t bytes) : whole(bytes / width), rest(bytes % width) {
    for (size_t i = 0; i < width; ++i) {
      at[i] = planes;
      planes += whole + (i < rest);
    }
  }
  const size_t whole, rest;
  Byte* at[width];
};

template <size_t width>
void split(const uint8_t* __restrict content, size_t bytes, uint8_t* __restrict planes) {
  const Planes<width, uint8_t> to(planes, bytes);
  for (size_t i = 0; i < width; ++i) {
    uint8_t* __restrict const plane = to.at[i];
    for (size_t n = 0; n < to.whole; ++n) plane[n] = content[n * width + i];
  }
  for (size_t i = 0; i < to.rest; ++i) to.at[i][to.whole] = content[to.whole * width + i];
}

template <size_t width>
void join(const uint8_t* __restrict planes, size_t bytes, uint8_t* __restrict content) {
  const Planes<width, const uint8_t> from(planes, bytes);
  for (size_t n = 0; n < from.whole; ++n) {
    for (size_t i = 0; i < width; ++i) content[n * width + i] = from.at[i][n];
  }
  for (size_t i = 0; i < from.rest; ++i) content[from.whole * width + i] = from.at[i][from.whole];
}

}  // namespace

// Both buffers have `bytes` bytes and do not overlap.
extern "C" {
void xmig_split_2(const uint8_t* content, size_t bytes, uint8_t* planes) { split<2>(content, bytes, planes); }
void xmig_split_4(const uint8_t* content, size_t bytes, uint8_t* planes) { split<4>(content, bytes, planes); }
void xmig_join_2(const uint8_t* planes, size_t bytes, uint8_t* content) { join<2>(planes, bytes, content); }
void xmig_join_4(const uint8_t* planes, size_t bytes, uint8_t* content) { join<4>(planes, bytes, content); }
}
