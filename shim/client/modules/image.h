// Module images: what a program hands to cuModuleLoadData and its kin, and how it gets to the server.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace xmig::client {

// How long is the image at `code`, and where does it begin? Understands the wrapper that nvcc makes around a fat
// binary, bare fat binaries, ELF (cubins, and the cpu device's shared objects) and PTX text. Nothing is decompressed.
// CUDA_ERROR_INVALID_IMAGE for anything else. `limit`: how many bytes there are at most, where that is known.
CUresult measure_image(const void* code, std::span<const std::byte>* image, uint64_t limit = ~uint64_t{0});

// Sends an image under a new number. One that lies in a file which this process has mapped is named, not copied:
// `as_file` says whether that was done (ask not to by setting it to false before).
CUresult send_image(std::span<const std::byte> image, uint64_t* number, bool* as_file);

}  // namespace xmig::client
