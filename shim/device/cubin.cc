// Cubins: what an ELF file for a GPU says of its kernels and variables.
#include <algorithm>
#include <cstring>

#include "device/image_formats.h"

namespace xmig::device {
namespace {

// .nv.info.<kernel>: entries {u8 format, u8 attribute, u16 value or size}; format 4 is followed by `size` bytes.
void read_kernel_info(const ElfView& elf, Bytes info, ImageKernel& kernel) {
  constexpr uint8_t kSized = 4, kParameter = 0x17, kParameterBytes = 0x19, kLongParameter = 0x45;
  struct [[gnu::packed]] Entry {
    uint8_t format, attribute;
    uint16_t value;
  };
  std::vector<std::pair<uint16_t, journal::ParameterInfo>> found;
  for (size_t at = 0; at + sizeof(Entry) <= info.size();) {
    Entry entry;
    std::memcpy(&entry, info.data() + at, sizeof(entry));
    at += sizeof(entry);
    const size_t bytes = entry.format == kSized ? entry.value : 0;
    if (bytes > info.size() - at) break;
    const std::byte* data = info.data() + at;
    at += bytes;
    if (entry.attribute == kParameterBytes && entry.format != kSized) kernel.parameter_bytes = entry.value;
    if ((entry.attribute != kParameter && entry.attribute != kLongParameter) || bytes < 12) continue;
    uint16_t ordinal, offset;
    uint32_t last;
    std::memcpy(&ordinal, data + 4, 2);
    std::memcpy(&offset, data + 6, 2);
    std::memcpy(&last, data + 8, 4);
    found.push_back({ordinal, {offset, entry.attribute == kParameter ? last >> 18 : last}});
  }
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  for (const auto& [ordinal, parameter] : found) {
    if (ordinal != kernel.parameters.size() || parameter.size > UINT16_MAX) return;  // damaged: keep what is sure
    kernel.parameters.push_back(parameter);
    kernel.parameter_bytes = std::max(kernel.parameter_bytes, parameter.offset + parameter.size);
  }
}

// Variables that a program can ask for by name.
void read_cubin_globals(const ElfView& elf, const std::vector<Elf64_Shdr>& sections, Image& out) {
  for (const Elf64_Shdr& table : sections) {
    if (table.sh_type != SHT_SYMTAB || table.sh_link >= sections.size()) continue;
    const Bytes symbols = elf.range(table.sh_offset, table.sh_size);
    const Bytes names = elf.range(sections[table.sh_link].sh_offset, sections[table.sh_link].sh_size);
    for (size_t at = 0; at + sizeof(Elf64_Sym) <= symbols.size() && out.globals.size() < kMaxKernels; at += sizeof(Elf64_Sym)) {
      Elf64_Sym symbol;
      std::memcpy(&symbol, symbols.data() + at, sizeof(symbol));
      if (ELF64_ST_TYPE(symbol.st_info) != STT_OBJECT || symbol.st_size == 0 || symbol.st_size > kMaxGlobalBytes) continue;
      if (symbol.st_shndx >= sections.size()) continue;
      const auto section = elf.name(sections[symbol.st_shndx], sections);
      const auto name = elf.string(names, symbol.st_name);
      const bool variable = section && (section->starts_with(".nv.global") || *section == ".nv.constant3");
      if (variable && name) out.globals.push_back({std::string(*name), symbol.st_size, 0});
    }
  }
}

}  // namespace

CUresult read_cubin(const ElfView& elf, Image& out) {
  constexpr std::string_view kText = ".text.", kInfo = ".nv.info.";
  const std::vector<Elf64_Shdr> sections = elf.sections();
  auto find = [&out](std::string_view name) {
    return std::find_if(out.kernels.begin(), out.kernels.end(), [&](const ImageKernel& k) { return k.name == name; });
  };
  for (const Elf64_Shdr& section : sections) {
    const auto name = elf.name(section, sections);
    if (name && name->starts_with(kText) && name->size() > kText.size() && out.kernels.size() < kMaxKernels &&
        find(name->substr(kText.size())) == out.kernels.end())
      out.kernels.push_back({.name = std::string(name->substr(kText.size()))});
  }
  for (const Elf64_Shdr& section : sections) {
    const auto name = elf.name(section, sections);
    if (!name || !name->starts_with(kInfo)) continue;
    const auto kernel = find(name->substr(kInfo.size()));
    if (kernel != out.kernels.end() && kernel->parameters.empty())
      read_kernel_info(elf, elf.range(section.sh_offset, section.sh_size), *kernel);
  }
  read_cubin_globals(elf, sections, out);
  return CUDA_SUCCESS;
}

}  // namespace xmig::device
