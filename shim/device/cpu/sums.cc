#include "device/cpu/sums.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

namespace xmig::device::cpu {
namespace {

using journal::DataType;
using journal::Reduction;

// A type of fewer than 32 bits: how it becomes a float, and the nearest value of it, ties to even.
struct Half {
  using Bits = uint16_t;
  static float widen(Bits bits) {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
    const uint32_t exponent = (bits >> 10) & 31, fraction = bits & 1023;
    if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | fraction << 13);
    if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
    const float small = static_cast<float>(fraction) * 0x1p-24f;
    return sign ? -small : small;
  }
  static Bits narrow(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const auto sign = static_cast<Bits>(bits >> 16 & 0x8000);
    const uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return sign | 0x7e00;
    if (magnitude >= 0x477ff000) return sign | 0x7c00;  // from halfway past the largest on
    if (magnitude < 0x38800000) {  // below the smallest normal one: the addition rounds
      const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
      return static_cast<Bits>(sign | (std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(0.5f)));
    }
    const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return static_cast<Bits>(sign | ((rounded >> 13) - (112 << 10)));
  }
};

struct Brain {
  using Bits = uint16_t;
  static float widen(Bits bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
  static Bits narrow(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return static_cast<Bits>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
};

// Eight bits: what does not fit becomes the largest finite value, as CUDA's conversions have it.
template <int kExponent, uint8_t kLargest, uint8_t kNan>
struct Eight {
  using Bits = uint8_t;
  static constexpr int kFraction = 7 - kExponent;
  static constexpr int kBias = (1 << (kExponent - 1)) - 1;
  static float widen(Bits bits) {
    const int exponent = bits >> kFraction & ((1 << kExponent) - 1), fraction = bits & ((1 << kFraction) - 1);
    const int magnitude = bits & 0x7f;
    float value = 0;
    if (magnitude > kLargest) {
      const bool infinite = kExponent == 5 && fraction == 0;
      value = infinite ? INFINITY : NAN;
    } else if (exponent == 0) {
      value = std::ldexp(static_cast<float>(fraction), 1 - kBias - kFraction);
    } else {
      value = std::ldexp(static_cast<float>((1 << kFraction) + fraction), exponent - kBias - kFraction);
    }
    return bits & 0x80 ? -value : value;
  }
  static Bits narrow(float value) {
    if (std::isnan(value)) return kNan;
    static const std::array<float, kLargest + 1> values = [] {
      std::array<float, kLargest + 1> all{};
      for (int i = 0; i <= kLargest; ++i) all[static_cast<size_t>(i)] = widen(static_cast<Bits>(i));
      return all;
    }();
    const float magnitude = std::fabs(value);
    const auto above = std::lower_bound(values.begin(), values.end(), magnitude);
    auto code = static_cast<uint32_t>(above == values.end() ? kLargest : above - values.begin());
    if (above != values.end() && above != values.begin() && *above != magnitude) {
      const float up = *above - magnitude, down = magnitude - *(above - 1);
      if (down < up || (down == up && (code & 1) != 0)) --code;
    }
    return static_cast<Bits>(code | (std::signbit(value) ? 0x80 : 0));
  }
};
using Eight43 = Eight<4, 0x7e, 0x7f>;
using Eight52 = Eight<5, 0x7b, 0x7f>;

// A type that computes in itself.
template <typename T>
struct Plain {
  using Bits = T;
  static T widen(T value) { return value; }
  static T narrow(T value) { return value; }
};

template <typename T>
T add(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  } else {
    return a + b;
  }
}
template <typename T>
T multiply(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  } else {
    return a * b;
  }
}
template <typename T>
T larger(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return std::max(a, b);
  } else {
    return std::fmax(a, b);
  }
}
template <typename T>
T smaller(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return std::min(a, b);
  } else {
    return std::fmin(a, b);
  }
}

// Memory of a program need not be aligned.
template <typename Format, typename Operation>
void each(std::byte* to, const std::byte* from, uint64_t count, Operation&& operation) {
  using Bits = typename Format::Bits;
  for (uint64_t i = 0; i < count; ++i) {
    Bits a, b;
    std::memcpy(&a, to + i * sizeof(Bits), sizeof(Bits));
    std::memcpy(&b, from + i * sizeof(Bits), sizeof(Bits));
    const Bits result = Format::narrow(operation(Format::widen(a), Format::widen(b)));
    std::memcpy(to + i * sizeof(Bits), &result, sizeof(Bits));
  }
}

template <typename Format>
void reduce_in(Reduction reduction, std::byte* to, const std::byte* from, uint64_t count) {
  using Value = decltype(Format::widen({}));
  switch (reduction) {
    case Reduction::kProduct: return each<Format>(to, from, count, multiply<Value>);
    case Reduction::kMax: return each<Format>(to, from, count, larger<Value>);
    case Reduction::kMin: return each<Format>(to, from, count, smaller<Value>);
    default: return each<Format>(to, from, count, add<Value>);
  }
}

template <typename Format>
void scale_in(uint64_t scalar, std::byte* to, uint64_t count) {
  using Bits = typename Format::Bits;
  Bits factor;
  std::memcpy(&factor, &scalar, sizeof(factor));
  const auto wide = Format::widen(factor);
  for (uint64_t i = 0; i < count; ++i) {
    Bits value;
    std::memcpy(&value, to + i * sizeof(Bits), sizeof(Bits));
    value = Format::narrow(multiply(Format::widen(value), wide));
    std::memcpy(to + i * sizeof(Bits), &value, sizeof(Bits));
  }
}

template <typename Format>
void divide_in(uint32_t ranks, std::byte* to, uint64_t count) {
  using Bits = typename Format::Bits;
  if constexpr (std::is_integral_v<decltype(Format::widen({}))>) {
    for (uint64_t i = 0; i < count; ++i) {
      Bits value;
      std::memcpy(&value, to + i * sizeof(Bits), sizeof(Bits));
      value = static_cast<Bits>(std::is_signed_v<Bits> ? static_cast<int64_t>(value) / static_cast<int64_t>(ranks)
                                                       : static_cast<int64_t>(static_cast<uint64_t>(value) / ranks));
      std::memcpy(to + i * sizeof(Bits), &value, sizeof(Bits));
    }
  }
}

template <typename Work>
void with_format(DataType type, Work&& work) {
  switch (type) {
    case DataType::kInt8: return work(Plain<int8_t>{});
    case DataType::kUint8: return work(Plain<uint8_t>{});
    case DataType::kInt32: return work(Plain<int32_t>{});
    case DataType::kUint32: return work(Plain<uint32_t>{});
    case DataType::kInt64: return work(Plain<int64_t>{});
    case DataType::kUint64: return work(Plain<uint64_t>{});
    case DataType::kFloat16: return work(Half{});
    case DataType::kFloat32: return work(Plain<float>{});
    case DataType::kFloat64: return work(Plain<double>{});
    case DataType::kBfloat16: return work(Brain{});
    case DataType::kFloat8e4m3: return work(Eight43{});
    case DataType::kFloat8e5m2: return work(Eight52{});
    case DataType::kCount: return;
  }
}

}  // namespace

void reduce(DataType type, Reduction reduction, std::byte* to, const std::byte* from, uint64_t count) {
  with_format(type, [&]<typename Format>(Format) { reduce_in<Format>(reduction, to, from, count); });
}

void scale(DataType type, uint64_t scalar, std::byte* to, uint64_t count) {
  with_format(type, [&]<typename Format>(Format) { scale_in<Format>(scalar, to, count); });
}

uint64_t share(DataType type, uint32_t ranks) {
  uint64_t bits = 0;
  with_format(type, [&]<typename Format>(Format) {
    using Value = decltype(Format::widen({}));
    if constexpr (!std::is_integral_v<Value>) {
      const auto value = Format::narrow(static_cast<Value>(1.0 / ranks));
      std::memcpy(&bits, &value, sizeof(value));
    }
  });
  return bits;
}

bool is_floating(DataType type) { return type >= DataType::kFloat16; }

void divide(DataType type, uint32_t ranks, std::byte* to, uint64_t count) {
  with_format(type, [&]<typename Format>(Format) { divide_in<Format>(ranks, to, count); });
}

}  // namespace xmig::device::cpu
