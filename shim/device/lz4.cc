#include "device/lz4.h"

#include <algorithm>
#include <cstdint>

namespace xmig::device {
namespace {

// A length of 15 goes on in bytes that are added up, until one is not 255. False: the block ends first.
bool extend(std::span<const std::byte> block, size_t& at, size_t& length) {
  if (length != 15) return true;
  for (;;) {
    if (at >= block.size()) return false;
    const auto more = std::to_integer<uint8_t>(block[at++]);
    length += more;
    if (more != 255) return true;
  }
}

}  // namespace

bool decompress_lz4(std::span<const std::byte> block, std::span<std::byte> out) {
  constexpr size_t kShortestMatch = 4;
  size_t at = 0, done = 0;
  while (at < block.size()) {
    const auto token = std::to_integer<uint8_t>(block[at++]);
    size_t literals = token >> 4, match = token & 15;
    if (!extend(block, at, literals) || literals > block.size() - at || literals > out.size() - done) return false;
    std::copy_n(block.begin() + at, literals, out.begin() + done);
    at += literals;
    done += literals;
    if (at == block.size()) break;  // the last sequence has no match

    if (block.size() - at < 2) return false;
    const size_t distance = std::to_integer<size_t>(block[at]) | std::to_integer<size_t>(block[at + 1]) << 8;
    at += 2;
    if (!extend(block, at, match)) return false;
    match += kShortestMatch;
    if (distance == 0 || distance > done || match > out.size() - done) return false;
    // Byte by byte: a match may overlap what it makes.
    for (size_t i = 0; i < match; ++i, ++done) out[done] = out[done - distance];
  }
  return done == out.size();
}

}  // namespace xmig::device
