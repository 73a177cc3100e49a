// What hash.cu's kernels compute, by the processor: of content that is in host memory, to find what a device's memory had.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace xmig::device::cuda {

// Of a multiple of 16 bytes. tests/native/cuda_hash.cc compares it with the kernel's source.
inline uint64_t hash_content(std::span<const std::byte> content) {
  const auto fold = [](uint64_t a, uint64_t b) {
    const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  };
  uint64_t sum = 0, key = 0;
  for (size_t at = 0; at + 16 <= content.size(); at += 16, key += 0x9e3779b97f4a7c15) {
    uint64_t word[2];
    std::memcpy(word, content.data() + at, sizeof(word));
    sum += fold(word[0] ^ (key + 0xa0761d6478bd642f), word[1] ^ (key ^ 0xe7037ed1a0b428db));
  }
  return fold(sum ^ 0x8ebc6af09c88c6e3, content.size() ^ 0x589965cc75374cc3);
}

}  // namespace xmig::device::cuda
