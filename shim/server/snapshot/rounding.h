// Numbers with fewer bits of mantissa, for a lossy checkpoint (docs/decisions/0096).
//
// To nearest, ties to even. Zeros, infinities, NaN and subnormal numbers stay as they are to the last bit; no number changes its sign, and
// none becomes zero, subnormal or infinite.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "journal/numbers.h"
#include "server/channel/daemon.h"

namespace xmig::server {

// In place, `keep_bits` of each mantissa without its implicit one; all of it, if the type has no more. Adds to `found` what that has changed,
// not the ranges. The content is whole numbers.
void round_numbers(std::span<std::byte> content, journal::NumberType type, uint32_t keep_bits, RoundedNumbers& found);

}  // namespace xmig::server
