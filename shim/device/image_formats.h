// The formats of code for NVIDIA's GPUs. A reader refuses nothing but what has no code for this device.
#pragma once

#include <string_view>

#include "device/elf_view.h"
#include "device/image.h"

namespace xmig::device {

inline constexpr uint32_t kFatMagic = 0xba55ed50;
inline constexpr uint64_t kMaxGlobalBytes = 1ull << 34;

Image read_cubin(const ElfView& elf);
Result<Image> read_fat_binary(Bytes image);
Result<Image> read_ptx(std::string_view text);
bool is_ptx(Bytes image);

// As read_variables().
Result<> read_cubin_variables(const ElfView& elf, std::vector<ImageVariable>& out);
Result<> read_ptx_variables(std::string_view text, std::vector<ImageVariable>& out);
Result<> read_fat_binary_variables(Bytes image, uint32_t architecture, std::vector<ImageVariable>& out);

// How long a fat binary is that begins so; 0 if it does not say.
size_t fat_binary_extent(Bytes known);

}  // namespace xmig::device
