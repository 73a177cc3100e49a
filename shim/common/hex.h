// Bytes as text: two lower-case hexadecimal digits each.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace xmig {

inline constexpr std::string_view kHexDigits = "0123456789abcdef";

inline std::string to_hex(std::span<const std::byte> bytes) {
  std::string text;
  for (const std::byte byte : bytes) {
    text += kHexDigits[std::to_integer<size_t>(byte) >> 4];
    text += kHexDigits[std::to_integer<size_t>(byte) & 15];
  }
  return text;
}

// False if the text is not of exactly these bytes, as to_hex() writes them; their content is undefined then.
[[nodiscard]] inline bool from_hex(std::string_view text, std::span<std::byte> bytes) {
  if (text.size() != 2 * bytes.size()) return false;
  for (size_t i = 0; i < bytes.size(); ++i) {
    const size_t high = kHexDigits.find(text[2 * i]), low = kHexDigits.find(text[2 * i + 1]);
    if (high == kHexDigits.npos || low == kHexDigits.npos) return false;
    bytes[i] = static_cast<std::byte>(high << 4 | low);
  }
  return true;
}

}  // namespace xmig
