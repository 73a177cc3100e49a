// The formats of code for NVIDIA's GPUs. What each reader finds it adds to the image; it refuses nothing but what has no
// code for this device.
#pragma once

#include <string_view>

#include "device/elf_view.h"
#include "device/image.h"

namespace xmig::device {

inline constexpr uint32_t kFatMagic = 0xba55ed50;
inline constexpr uint64_t kMaxGlobalBytes = 1ull << 34;

CUresult read_cubin(const ElfView& elf, Image& out);
CUresult read_fat_binary(Bytes image, Image& out);
CUresult read_ptx(std::string_view text, Image& out);
bool is_ptx(Bytes image);

// As read_variables().
bool read_cubin_variables(const ElfView& elf, std::vector<ImageVariable>& out, std::string& error);
bool read_ptx_variables(std::string_view text, std::vector<ImageVariable>& out, std::string& error);
bool read_fat_binary_variables(Bytes image, uint32_t architecture, std::vector<ImageVariable>& out, std::string& error);

// How long a fat binary is that begins so; 0 if it does not say.
size_t fat_binary_extent(Bytes known);

}  // namespace xmig::device
