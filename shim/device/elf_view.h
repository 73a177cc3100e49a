// A 64-bit little-endian ELF file in memory, read with every access checked.
#pragma once

#include <elf.h>

#include <cstring>
#include <optional>
#include <string_view>

#include "device/image.h"

namespace xmig::device {

class ElfView {
 public:
  // False if this is not an ELF file of this class, or its header does not fit.
  static bool open(Bytes image, ElfView& out);

  const Elf64_Ehdr& header() const { return header_; }
  Bytes image() const { return image_; }

  template <typename T>
  bool read(uint64_t offset, T& out) const {
    if (offset > image_.size() || sizeof(T) > image_.size() - offset) return false;
    std::memcpy(&out, image_.data() + offset, sizeof(T));
    return true;
  }
  bool contains(uint64_t offset, uint64_t bytes) const {
    return offset <= image_.size() && bytes <= image_.size() - offset;
  }
  Bytes range(uint64_t offset, uint64_t bytes) const {
    return contains(offset, bytes) ? image_.subspan(offset, bytes) : Bytes{};
  }
  // The zero-terminated string at `offset` of a string table; nullopt if it does not end inside it.
  std::optional<std::string_view> string(Bytes table, uint64_t offset) const;

  // The headers' tables, copied; empty if they do not lie in the image.
  std::vector<Elf64_Phdr> segments() const;
  std::vector<Elf64_Shdr> sections() const;
  // Its name's string table is the file's own.
  std::optional<std::string_view> name(const Elf64_Shdr& section, const std::vector<Elf64_Shdr>& sections) const;

 private:
  Bytes image_;
  Elf64_Ehdr header_{};
};

}  // namespace xmig::device
