// Hashing and copying device memory at memory speed, on several threads.
#pragma once

#include <span>

#include "device/device.h"

namespace xmig::device::cpu {

// False if some of the memory is not there.
bool hash_chunks(std::span<const Chunk> chunks, std::span<uint64_t> hashes);
bool copy_bytes(uint64_t destination, uint64_t source, uint64_t bytes);

}  // namespace xmig::device::cpu
