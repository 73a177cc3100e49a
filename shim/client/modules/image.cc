#include "client/modules/image.h"

#include <elf.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>

#include "client/bootstrap/message.h"
#include "client/journal/append.h"

namespace xmig::client {
namespace {

// --- how long ---------------------------------------------------------------------------------------------------

struct FatBinaryWrapper {
  uint32_t magic;  // kWrapperMagic
  uint32_t version;
  const void* data;
  const void* filename_or_fatbins;
};
constexpr uint32_t kWrapperMagic = 0x466243B1;

struct FatBinaryHeader {
  uint32_t magic;  // kFatBinaryMagic
  uint16_t version;
  uint16_t header_bytes;
  uint64_t bytes;  // after the header
};
constexpr uint32_t kFatBinaryMagic = 0xBA55ED50;

constexpr uint64_t kMaxImageBytes = 4ull << 30;

template <typename T>
T read(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

// The end of what the ELF file's headers speak of; 0 if they make no sense.
uint64_t elf_bytes(const std::byte* elf, uint64_t limit) {
  const auto header = read<Elf64_Ehdr>(elf);
  if (header.e_ident[EI_CLASS] != ELFCLASS64) return 0;
  uint64_t end = sizeof(header);
  const auto covers = [&](uint64_t offset, uint64_t bytes) {
    if (offset > limit || bytes > limit - offset) return false;
    end = std::max(end, offset + bytes);
    return true;
  };
  if (!covers(header.e_shoff, uint64_t{header.e_shnum} * header.e_shentsize) ||
      !covers(header.e_phoff, uint64_t{header.e_phnum} * header.e_phentsize)) {
    return 0;
  }
  for (uint32_t i = 0; i < header.e_shnum && header.e_shentsize >= sizeof(Elf64_Shdr); ++i) {
    const auto section = read<Elf64_Shdr>(elf + header.e_shoff + i * header.e_shentsize);
    if (section.sh_type != SHT_NOBITS && !covers(section.sh_offset, section.sh_size)) return 0;
  }
  for (uint32_t i = 0; i < header.e_phnum && header.e_phentsize >= sizeof(Elf64_Phdr); ++i) {
    const auto segment = read<Elf64_Phdr>(elf + header.e_phoff + i * header.e_phentsize);
    if (!covers(segment.p_offset, segment.p_filesz)) return 0;
  }
  return end;
}

bool looks_like_ptx(const char* text) {
  for (int i = 0; i < 16 && text[i]; ++i) {
    if (!std::isprint(static_cast<unsigned char>(text[i])) && !std::isspace(static_cast<unsigned char>(text[i]))) {
      return false;
    }
  }
  return std::strstr(text, ".version") != nullptr;
}

// --- in a file? -------------------------------------------------------------------------------------------------

struct InFile {
  std::string path;
  uint64_t offset;
};

// Shorter images are not worth a file that must stay as it is.
constexpr size_t kFileThreshold = 1 << 20;

std::optional<InFile> find_file(std::span<const std::byte> image) {
  const auto start = reinterpret_cast<uint64_t>(image.data());
  FILE* const maps = std::fopen("/proc/self/maps", "re");
  if (!maps) return std::nullopt;
  std::optional<InFile> found;
  char line[4096 + 128];
  while (!found && std::fgets(line, sizeof(line), maps)) {
    uint64_t low = 0, high = 0, offset = 0, inode = 0;
    unsigned int major_number = 0, minor_number = 0;
    char mode[8] = "";
    int path_at = 0;
    if (std::sscanf(line, "%lx-%lx %7s %lx %x:%x %lu %n", &low, &high, mode, &offset, &major_number, &minor_number,
                    &inode, &path_at) < 7) {
      continue;
    }
    if (start < low || start + image.size() > high || start >= high) continue;
    std::string path(line + path_at);
    if (!path.empty() && path.back() == '\n') path.pop_back();
    // Memory that can be written may differ from the file; and the name may by now be another file's.
    struct stat status {};
    if (mode[1] == 'w' || path.empty() || path[0] != '/' || ::stat(path.c_str(), &status) != 0 ||
        !S_ISREG(status.st_mode) || status.st_ino != inode) {
      break;
    }
    found = InFile{std::move(path), offset + (start - low)};
  }
  std::fclose(maps);
  return found;
}

CUresult measure(const void* code, std::span<const std::byte>* image, uint64_t limit) {
  const auto* data = static_cast<const std::byte*>(code);
  if (read<uint32_t>(data) == kWrapperMagic) {
    // Version 2 carries the parts of a relocatable link besides; `data` is the linked result in both.
    const auto wrapper = read<FatBinaryWrapper>(data);
    if (!wrapper.data) return CUDA_ERROR_INVALID_IMAGE;
    data = static_cast<const std::byte*>(wrapper.data);
  }
  uint64_t bytes = 0;
  if (read<uint32_t>(data) == kFatBinaryMagic) {
    const auto header = read<FatBinaryHeader>(data);
    if (header.header_bytes < sizeof(header) || header.bytes > limit) return CUDA_ERROR_INVALID_IMAGE;
    bytes = header.header_bytes + header.bytes;
  } else if (std::memcmp(data, ELFMAG, SELFMAG) == 0) {
    bytes = elf_bytes(data, limit);
  } else if (looks_like_ptx(reinterpret_cast<const char*>(data))) {
    bytes = std::strlen(reinterpret_cast<const char*>(data)) + 1;
  }
  if (bytes == 0 || bytes > limit) return CUDA_ERROR_INVALID_IMAGE;
  *image = {data, bytes};
  return CUDA_SUCCESS;
}

}  // namespace

CUresult measure_image(const void* code, std::span<const std::byte>* image, uint64_t limit) {
  if (!code) return CUDA_ERROR_INVALID_VALUE;
  const CUresult result = measure(code, image, std::min(limit, kMaxImageBytes));
  if (result != CUDA_SUCCESS) {
    complain("a module cannot be loaded: it is no fat binary, no cubin and no PTX, or damaged: CUDA error %d", result);
  }
  return result;
}

CUresult send_image(std::span<const std::byte> image, uint64_t* number, bool* as_file) {
  static constinit std::atomic<uint64_t> next{1};
  *number = next.fetch_add(1);
  const std::optional<InFile> file = *as_file && image.size() > kFileThreshold ? find_file(image) : std::nullopt;
  *as_file = file.has_value();
  if (file) {
    const Args_xmImageFile args{.image = *number, .total = image.size(), .offset = file->offset};
    const Slice path{file->path.data(), file->path.size()};
    return append(Op::xmImageFile, &args, sizeof(args), {&path, 1});
  }
  for (size_t offset = 0; offset < image.size();) {
    const auto piece = image.subspan(offset, std::min<size_t>(image.size() - offset, journal::kMaxPayload));
    const Args_xmImage args{.image = *number, .total = image.size(), .offset = offset};
    const Slice slice{piece.data(), piece.size()};
    const CUresult error = append(Op::xmImage, &args, sizeof(args), {&slice, 1});
    if (error != CUDA_SUCCESS) return error;
    offset += piece.size();
  }
  return CUDA_SUCCESS;
}

}  // namespace xmig::client
