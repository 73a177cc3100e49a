#include "server/snapshot/rounding.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace xmig::server {
namespace {

// `Word` has a sign, an exponent, and `kMantissa` bits of mantissa.
template <typename Word, int kMantissa>
struct Format {
  static constexpr int kExponent = 8 * sizeof(Word) - 1 - kMantissa;
  static constexpr Word kSign = static_cast<Word>(Word{1} << (8 * sizeof(Word) - 1));
  static constexpr Word kSmallestNormal = static_cast<Word>(Word{1} << kMantissa);
  static constexpr Word kInfinity = static_cast<Word>(((Word{1} << kExponent) - 1) << kMantissa);

  // Of a normal number without its sign, exactly: no format here has more than a double.
  static double value(Word magnitude) {
    if constexpr (sizeof(Word) == 8) {
      return std::bit_cast<double>(magnitude);
    } else {
      constexpr uint64_t kRebias = 1023 - ((1 << (kExponent - 1)) - 1);
      return std::bit_cast<double>((uint64_t{magnitude} << (52 - kMantissa)) + (kRebias << 52));
    }
  }

  static Word rounded(Word magnitude, int dropped) {
    const Word step = static_cast<Word>(Word{1} << dropped);
    const Word down = static_cast<Word>(magnitude & ~(step - 1));
    const Word odd = static_cast<Word>((magnitude >> dropped) & 1);
    const Word nearest = static_cast<Word>((magnitude + (step / 2 - 1) + odd) & ~(step - 1));
    return nearest >= kInfinity ? down : nearest;
  }

  static void round(std::span<std::byte> content, uint32_t keep_bits, RoundedNumbers& found) {
    found.bytes += content.size();
    if (keep_bits >= kMantissa) return;
    const int dropped = kMantissa - static_cast<int>(keep_bits);
    for (size_t at = 0; at + sizeof(Word) <= content.size(); at += sizeof(Word)) {
      Word word;
      std::memcpy(&word, content.data() + at, sizeof(word));
      const Word magnitude = static_cast<Word>(word & ~kSign);
      if (magnitude < kSmallestNormal || magnitude >= kInfinity) continue;
      const Word now = rounded(magnitude, dropped);
      if (now == magnitude) continue;
      word = static_cast<Word>((word & kSign) | now);
      std::memcpy(content.data() + at, &word, sizeof(word));
      const double before = value(magnitude), after = value(now);
      const double error = after > before ? after - before : before - after;
      ++found.changed;
      found.largest_absolute = std::max(found.largest_absolute, error);
      found.largest_relative = std::max(found.largest_relative, error / before);
    }
  }
};

}  // namespace

void round_numbers(std::span<std::byte> content, journal::NumberType type, uint32_t keep_bits, RoundedNumbers& found) {
  switch (type) {
    case journal::NumberType::kFloat16: return Format<uint16_t, 10>::round(content, keep_bits, found);
    case journal::NumberType::kBfloat16: return Format<uint16_t, 7>::round(content, keep_bits, found);
    case journal::NumberType::kFloat32: return Format<uint32_t, 23>::round(content, keep_bits, found);
    case journal::NumberType::kFloat64: return Format<uint64_t, 52>::round(content, keep_bits, found);
  }
}

}  // namespace xmig::server
