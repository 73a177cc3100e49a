// What reductions do to the elements of two ranks, in each type. The order is the caller's.
#pragma once

#include <cstddef>
#include <cstdint>

#include "journal/collectives.h"

namespace xmig::device::cpu {

// `to[i] = to[i] (op) from[i]`. Each step has its type's precision: sixteen bits and eight are computed in single precision and
// rounded to the nearest value, ties to even. Integers wrap.
void reduce(journal::DataType type, journal::Reduction reduction, std::byte* to, const std::byte* from, uint64_t count);
// `to[i] = to[i] * scalar`, which are the bits of a value of the type.
void scale(journal::DataType type, uint64_t scalar, std::byte* to, uint64_t count);
// Of an average: the bits of 1 / ranks in a floating-point type, by which each rank's input is multiplied first.
uint64_t share(journal::DataType type, uint32_t ranks);
bool is_floating(journal::DataType type);
// Of an average of integers: `to[i] = to[i] / ranks`, towards zero.
void divide(journal::DataType type, uint32_t ranks, std::byte* to, uint64_t count);

}  // namespace xmig::device::cpu
