// Reads what somebody else has written, piece by piece: nothing beyond its end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "journal/layout.h"

namespace xmig::server {

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <typename T>
  bool get(T& value) {
    if (bytes_.size() < sizeof(T)) return false;
    std::memcpy(&value, bytes_.data(), sizeof(T));
    bytes_ = bytes_.subspan(sizeof(T));
    return true;
  }
  template <typename T>
  bool get(std::vector<T>& values, uint64_t count) {
    if (count > bytes_.size() / sizeof(T)) return false;
    values.resize(count);
    if (count != 0) std::memcpy(values.data(), bytes_.data(), count * sizeof(T));
    bytes_ = bytes_.subspan(count * sizeof(T));
    return true;
  }
  // `count` bytes and what fills them up to a multiple of 8.
  bool get(std::span<const std::byte>& part, uint32_t count) {
    if (journal::align8(count) > bytes_.size()) return false;
    part = bytes_.first(count);
    bytes_ = bytes_.subspan(journal::align8(count));
    return true;
  }

  bool empty() const { return bytes_.empty(); }
  std::span<const std::byte>& rest() { return bytes_; }

 private:
  std::span<const std::byte> bytes_;
};

}  // namespace xmig::server
