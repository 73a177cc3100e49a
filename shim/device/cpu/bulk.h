// Hashing and copying device memory at memory speed, on several threads.
#pragma once

#include <span>

#include "device/device.h"

namespace xmig::device::cpu {

// Not what others compute for themselves: who compares such hashes with their own finds nothing on any device.
uint64_t hash_content(std::span<const std::byte> content);
// False if some of the memory is not there.
bool hash_chunks(std::span<const Chunk> chunks, std::span<uint64_t> hashes);
bool copy_bytes(uint64_t destination, uint64_t source, uint64_t bytes);

}  // namespace xmig::device::cpu
