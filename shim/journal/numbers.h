// Numbers of optimizer state that the program's framework has named in device memory (xmNameNumbers): a lossy checkpoint may round
// them, and nothing else (docs/decisions/0096).
#pragma once

#include <cstddef>
#include <cstdint>

namespace xmig::journal {

enum class NumberType : uint32_t { kFloat16, kBfloat16, kFloat32, kFloat64 };
inline constexpr uint32_t kNumberTypes = 4;
inline constexpr size_t kMostNamed = 1u << 20;  // ranges of a process

constexpr uint64_t number_bytes(NumberType type) {
  switch (type) {
    case NumberType::kFloat32: return 4;
    case NumberType::kFloat64: return 8;
    default: return 2;
  }
}

// The arguments of the record, and where a snapshot's file has it, too.
struct NamedNumbers {
  uint64_t address, bytes;
  uint32_t type, reserved;

  NumberType number_type() const { return static_cast<NumberType>(type); }
  // Whole numbers, each where its type can be: so none of them lies in two granules.
  bool sound() const {
    if (type >= kNumberTypes || bytes == 0 || address + bytes < address) return false;
    return (address | bytes) % number_bytes(number_type()) == 0;
  }
};

}  // namespace xmig::journal
