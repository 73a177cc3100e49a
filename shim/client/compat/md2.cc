#include "client/compat/md2.h"

#include <algorithm>

namespace xmig::client {
namespace {

// A permutation of 0..255 made from the digits of pi (RFC 1319, section 3.2).
constexpr std::array<uint8_t, 256> kPi = {
    41, 46, 67, 201, 162, 216, 124, 1, 61, 54, 84, 161, 236, 240, 6, 19,
    98, 167, 5, 243, 192, 199, 115, 140, 152, 147, 43, 217, 188, 76, 130, 202,
    30, 155, 87, 60, 253, 212, 224, 22, 103, 66, 111, 24, 138, 23, 229, 18,
    190, 78, 196, 214, 218, 158, 222, 73, 160, 251, 245, 142, 187, 47, 238, 122,
    169, 104, 121, 145, 21, 178, 7, 63, 148, 194, 16, 137, 11, 34, 95, 33,
    128, 127, 93, 154, 90, 144, 50, 39, 53, 62, 204, 231, 191, 247, 151, 3,
    255, 25, 48, 179, 72, 165, 181, 209, 215, 94, 146, 42, 172, 86, 170, 198,
    79, 184, 56, 210, 150, 164, 125, 182, 118, 252, 107, 226, 156, 116, 4, 241,
    69, 157, 112, 89, 100, 113, 135, 32, 134, 91, 207, 101, 230, 45, 168, 2,
    27, 96, 37, 173, 174, 176, 185, 246, 28, 70, 97, 105, 52, 64, 126, 15,
    85, 71, 163, 35, 221, 81, 175, 58, 195, 92, 249, 206, 186, 197, 234, 38,
    44, 83, 13, 110, 133, 40, 132, 9, 211, 223, 205, 244, 65, 129, 77, 82,
    106, 220, 55, 200, 108, 193, 171, 250, 36, 225, 123, 8, 12, 189, 177, 74,
    120, 136, 149, 139, 227, 99, 232, 109, 233, 203, 213, 254, 59, 0, 29, 57,
    242, 239, 183, 14, 102, 88, 208, 228, 166, 119, 114, 248, 235, 117, 75, 10,
    49, 68, 80, 180, 143, 237, 31, 26, 219, 153, 141, 51, 159, 17, 131, 20,
};

}  // namespace

void Md2::block(const uint8_t* bytes) {
  uint8_t last = checksum_[15];
  for (size_t i = 0; i < 16; ++i) {
    last = checksum_[i] ^= kPi[bytes[i] ^ last];
    state_[16 + i] = bytes[i];
    state_[32 + i] = state_[i] ^ bytes[i];
  }
  uint8_t mix = 0;
  for (uint8_t round = 0; round < 18; ++round) {
    for (uint8_t& byte : state_) mix = byte ^= kPi[mix];
    mix = static_cast<uint8_t>(mix + round);
  }
}

void Md2::update(std::span<const uint8_t> data) {
  for (const uint8_t byte : data) {
    pending_[pending_bytes_++] = byte;
    if (pending_bytes_ == pending_.size()) {
      block(pending_.data());
      pending_bytes_ = 0;
    }
  }
}

Digest Md2::finish() {
  const auto padding = static_cast<uint8_t>(pending_.size() - pending_bytes_);
  std::fill(pending_.begin() + pending_bytes_, pending_.end(), padding);
  block(pending_.data());
  const std::array<uint8_t, 16> checksum = checksum_;
  block(checksum.data());
  Digest digest;
  std::copy_n(state_.begin(), digest.size(), digest.begin());
  return digest;
}

Digest hmac_md2(std::span<const uint8_t> key, std::span<const uint8_t> message) {
  std::array<uint8_t, 16> inner_key{}, outer_key{};
  if (key.size() > inner_key.size()) {
    Md2 shorten;
    shorten.update(key);
    inner_key = shorten.finish();
  } else {
    std::copy(key.begin(), key.end(), inner_key.begin());
  }
  for (size_t i = 0; i < inner_key.size(); ++i) {
    outer_key[i] = inner_key[i] ^ 0x5c;
    inner_key[i] ^= 0x36;
  }
  Md2 inner, outer;
  inner.update(inner_key);
  inner.update(message);
  const Digest digest = inner.finish();
  outer.update(outer_key);
  outer.update(digest);
  return outer.finish();
}

}  // namespace xmig::client
