// The MD2 message digest (RFC 1319), and HMAC (RFC 2104) with it. Of no use for security; see integrity.h.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace xmig::client {

using Digest = std::array<uint8_t, 16>;

class Md2 {
 public:
  void update(std::span<const uint8_t> data);
  Digest finish();

 private:
  void block(const uint8_t* bytes);

  std::array<uint8_t, 48> state_{};
  std::array<uint8_t, 16> checksum_{};
  std::array<uint8_t, 16> pending_{};
  size_t pending_bytes_ = 0;
};

Digest hmac_md2(std::span<const uint8_t> key, std::span<const uint8_t> message);

}  // namespace xmig::client
