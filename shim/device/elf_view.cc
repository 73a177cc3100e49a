#include "device/elf_view.h"

#include <algorithm>

namespace xmig::device {
namespace {

constexpr size_t kMaxSegments = 64;

template <typename T>
std::vector<T> table(const ElfView& elf, uint64_t offset, size_t count, size_t entry_bytes) {
  if (entry_bytes != sizeof(T) || !elf.contains(offset, count * sizeof(T))) return {};
  std::vector<T> out(count);
  if (count != 0) std::memcpy(out.data(), elf.image().data() + offset, count * sizeof(T));
  return out;
}

}  // namespace

bool ElfView::open(Bytes image, ElfView& out) {
  out.image_ = image;
  if (!out.read(0, out.header_)) return false;
  const unsigned char* ident = out.header_.e_ident;
  return std::memcmp(ident, ELFMAG, SELFMAG) == 0 && ident[EI_CLASS] == ELFCLASS64 && ident[EI_DATA] == ELFDATA2LSB &&
         ident[EI_VERSION] == EV_CURRENT && out.header_.e_ehsize >= sizeof(Elf64_Ehdr);
}

std::optional<std::string_view> ElfView::string(Bytes table, uint64_t offset) const {
  if (offset >= table.size()) return std::nullopt;
  const Bytes rest = table.subspan(offset);
  const auto end = std::find(rest.begin(), rest.end(), std::byte{0});
  if (end == rest.end()) return std::nullopt;
  return std::string_view(reinterpret_cast<const char*>(rest.data()), static_cast<size_t>(end - rest.begin()));
}

std::vector<Elf64_Phdr> ElfView::segments() const {
  if (header_.e_phnum > kMaxSegments) return {};
  return table<Elf64_Phdr>(*this, header_.e_phoff, header_.e_phnum, header_.e_phentsize);
}

std::vector<Elf64_Shdr> ElfView::sections() const {
  return table<Elf64_Shdr>(*this, header_.e_shoff, header_.e_shnum, header_.e_shentsize);
}

std::optional<std::string_view> ElfView::name(const Elf64_Shdr& section,
                                              const std::vector<Elf64_Shdr>& sections) const {
  if (header_.e_shstrndx >= sections.size()) return std::nullopt;
  const Elf64_Shdr& names = sections[header_.e_shstrndx];
  return string(range(names.sh_offset, names.sh_size), section.sh_name);
}

}  // namespace xmig::device
