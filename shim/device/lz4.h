// LZ4 blocks, as older tools compress the entries of fat binaries.
#pragma once

#include <cstddef>
#include <span>

namespace xmig::device {

// Fills `out` from a block that holds exactly so many bytes. False: the block is damaged.
bool decompress_lz4(std::span<const std::byte> block, std::span<std::byte> out);

}  // namespace xmig::device
