// Cubins: what an ELF file for a GPU says of its kernels and variables.
#include <algorithm>
#include <cstring>
#include <optional>

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

// Where relocations write into those sections that have an entry here, in order. False: that are too many to be true.
using Offsets = std::vector<std::optional<std::vector<uint64_t>>>;  // by section
bool find_relocated(const ElfView& elf, const std::vector<Elf64_Shdr>& sections, Offsets& offsets) {
  constexpr size_t kMost = 1 << 22;
  size_t count = 0;
  for (const Elf64_Shdr& table : sections) {
    const bool with_addends = table.sh_type == SHT_RELA;
    if ((!with_addends && table.sh_type != SHT_REL) || table.sh_info >= sections.size() || !offsets[table.sh_info]) continue;
    const size_t entry_bytes = with_addends ? sizeof(Elf64_Rela) : sizeof(Elf64_Rel);
    const Bytes entries = elf.range(table.sh_offset, table.sh_size);
    for (size_t at = 0; at + entry_bytes <= entries.size(); at += entry_bytes) {
      if (++count > kMost) return false;
      uint64_t offset;  // of either kind it comes first
      std::memcpy(&offset, entries.data() + at, sizeof(offset));
      offsets[table.sh_info]->push_back(offset);
    }
  }
  for (auto& here : offsets) {
    if (here) std::sort(here->begin(), here->end());
  }
  return true;
}

}  // namespace

// Compilers give most variables local symbols, also such as the program asks for: the driver knows them by name all the same.
Result<> read_cubin_variables(const ElfView& elf, std::vector<ImageVariable>& out) {
  constexpr std::string_view kGlobal = ".nv.global";  // and .nv.global.init
  const std::vector<Elf64_Shdr> sections = elf.sections();
  Offsets written(sections.size());
  for (size_t i = 0; i < sections.size(); ++i) {
    const auto name = elf.name(sections[i], sections);
    if (name && name->starts_with(kGlobal)) written[i].emplace();
  }
  if (!find_relocated(elf, sections, written)) return refused("a cubin has too many relocations");
  for (const Elf64_Shdr& table : sections) {
    if (table.sh_type != SHT_SYMTAB || table.sh_link >= sections.size()) continue;
    const Bytes symbols = elf.range(table.sh_offset, table.sh_size);
    const Bytes names = elf.range(sections[table.sh_link].sh_offset, sections[table.sh_link].sh_size);
    for (size_t at = 0; at + sizeof(Elf64_Sym) <= symbols.size(); at += sizeof(Elf64_Sym)) {
      Elf64_Sym symbol;
      std::memcpy(&symbol, symbols.data() + at, sizeof(symbol));
      if (ELF64_ST_TYPE(symbol.st_info) != STT_OBJECT || symbol.st_size == 0) continue;
      if (symbol.st_shndx >= sections.size() || !written[symbol.st_shndx]) continue;
      const Bytes here = symbol.st_name < names.size() ? names.subspan(symbol.st_name) : Bytes{};
      const auto name = elf.string(here.first(std::min(here.size(), kMaxVariableName)), 0);
      if (!name || name->empty()) return refused("a variable of a cubin has no name, or too long a one");
      if (out.size() >= kMaxVariables) {
        return refused("a cubin has more variables than " + std::to_string(kMaxVariables));
      }
      const std::vector<uint64_t>& offsets = *written[symbol.st_shndx];
      const uint64_t start = symbol.st_value - sections[symbol.st_shndx].sh_addr;
      const auto first = std::lower_bound(offsets.begin(), offsets.end(), start);
      out.push_back({std::string(*name), first != offsets.end() && *first - start < symbol.st_size});
    }
    return {};  // a file has one such table
  }
  return {};
}

Image read_cubin(const ElfView& elf) {
  Image out;
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
  return out;
}

}  // namespace xmig::device
