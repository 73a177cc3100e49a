#include "device/image.h"

#include <zstd.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <set>

#include "device/elf_view.h"
#include "xmig/kernel.h"

namespace xmig::device {
namespace {

constexpr Elf64_Half kCudaMachine = 190;
constexpr uint32_t kMaxStaticShared = 232448;  // what an H200's block can have
constexpr uint64_t kMaxGlobalBytes = 1ull << 34;

#if defined(__x86_64__)
constexpr Elf64_Half kNativeMachine = EM_X86_64;
#elif defined(__aarch64__)
constexpr Elf64_Half kNativeMachine = EM_AARCH64;
#else
#error "say here which machine this is"
#endif

// A descriptor as it lies in the file: its pointers are not relocated yet.
std::string check_descriptor(const xmig_descriptor& d, std::string_view name) {
  if (d.abi != XMIG_ABI) return "was built with another version of xmig/kernel.h";
  if (name.empty()) return "has no name";
  if (d.kind == XMIG_DESCRIBES_GLOBAL)
    return d.bytes == 0 || d.bytes > kMaxGlobalBytes ? "is a global of an impossible size" : "";
  if (d.kind != XMIG_DESCRIBES_KERNEL) return "is neither a kernel nor a global";
  if (d.parameter_count > XMIG_MAX_PARAMETERS || d.parameter_bytes > XMIG_MAX_PARAMETER_BYTES)
    return "has too many parameters";
  if (d.max_threads == 0 || d.max_threads > XMIG_MAX_THREADS || d.static_shared_bytes > kMaxStaticShared)
    return "has impossible limits";
  uint64_t end = 0;
  for (uint32_t i = 0; i < d.parameter_count; ++i) {
    const xmig_parameter& p = d.parameters[i];
    if (p.offset < end || p.size == 0) return "has overlapping or empty parameters";
    end = uint64_t{p.offset} + p.size;
    if (end > d.parameter_bytes) return "has parameters that do not fit";
  }
  return "";
}

// Does the section lie, as it says, inside a segment that is loaded from the file?
bool is_loaded(const ElfView& elf, const Elf64_Shdr& section) {
  for (const Elf64_Phdr& segment : elf.segments())
    if (segment.p_type == PT_LOAD && section.sh_offset >= segment.p_offset && section.sh_size <= segment.p_filesz &&
        section.sh_offset - segment.p_offset <= segment.p_filesz - section.sh_size &&
        section.sh_addr - segment.p_vaddr == section.sh_offset - segment.p_offset)
      return true;
  return false;
}

CUresult read_descriptors(const ElfView& elf, const Elf64_Shdr& section, Image& out) {
  const Bytes bytes = elf.range(section.sh_offset, section.sh_size);
  const size_t count = bytes.size() / sizeof(xmig_descriptor);
  if (bytes.size() % sizeof(xmig_descriptor) != 0 || count == 0 || count > kMaxKernels || !is_loaded(elf, section)) {
    out.error = "its section \"xmig\" is damaged";
    return CUDA_ERROR_INVALID_IMAGE;
  }
  std::set<std::string, std::less<>> seen;
  for (size_t i = 0; i < count; ++i) {
    xmig_descriptor d;
    std::memcpy(&d, bytes.data() + i * sizeof(d), sizeof(d));
    const std::string name(d.name, strnlen(d.name, sizeof(d.name)));
    std::string error = name.size() == sizeof(d.name) ? "has a name without an end" : check_descriptor(d, name);
    if (error.empty() && !seen.insert(name).second) error = "is described twice";
    if (!error.empty()) {
      out.error = "entry " + std::to_string(i) + " of section \"xmig\" " + error;
      return CUDA_ERROR_INVALID_IMAGE;
    }
    const uint64_t address = section.sh_addr + i * sizeof(d);
    if (d.kind == XMIG_DESCRIBES_GLOBAL) {
      out.globals.push_back({name, d.bytes, address});
      continue;
    }
    ImageKernel kernel{name, d.parameter_bytes, d.max_threads, d.static_shared_bytes, {}, address};
    for (uint32_t p = 0; p < d.parameter_count; ++p)
      kernel.parameters.push_back({d.parameters[p].offset, d.parameters[p].size});
    out.kernels.push_back(std::move(kernel));
  }
  return CUDA_SUCCESS;
}

bool starts_with(Bytes image, uint32_t magic) {
  return image.size() >= sizeof(magic) && std::memcmp(image.data(), &magic, sizeof(magic)) == 0;
}

bool is_gpu_image(Bytes image) {
  constexpr std::string_view kPtx = ".version";
  const std::string_view text(reinterpret_cast<const char*>(image.data()), std::min<size_t>(image.size(), 4096));
  return starts_with(image, 0xba55ed50) || starts_with(image, 0x466243b1) || text.find(kPtx) != text.npos;
}

// --- cubins --------------------------------------------------------------------------------------------------

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

// --- fat binaries --------------------------------------------------------------------------------------------

struct FatHeader {
  uint32_t magic;
  uint16_t version, header_bytes;
  uint64_t bytes;
};
struct FatEntry {
  uint16_t kind, unknown;
  uint32_t header_bytes;
  uint64_t bytes;
  uint32_t compressed_bytes, unknown2;
  uint16_t minor, major;
  uint32_t architecture;
  uint32_t name_offset, name_bytes;
  uint64_t flags;
};
constexpr uint32_t kFatMagic = 0xba55ed50;
constexpr uint16_t kFatElf = 2;
constexpr uint64_t kFatOldCompression = 0x2000;
constexpr uint64_t kFatZstd = 0x8000;
constexpr uint32_t kArchitecture = 90;  // what the null device says it is
constexpr unsigned long long kMaxCubin = 1ull << 30;

// Nothing, if it cannot be read.
std::vector<std::byte> decompress(Bytes frame) {
  const unsigned long long bytes = ZSTD_getFrameContentSize(frame.data(), frame.size());
  if (bytes == ZSTD_CONTENTSIZE_ERROR || bytes == ZSTD_CONTENTSIZE_UNKNOWN || bytes > kMaxCubin) return {};
  std::vector<std::byte> content(bytes);
  const size_t got = ZSTD_decompress(content.data(), content.size(), frame.data(), frame.size());
  if (ZSTD_isError(got)) return {};
  content.resize(got);
  return content;
}

// The cubin for the newest architecture that the device can run.
CUresult read_fat_binary(Bytes image, Image& out) {
  FatHeader header;
  if (image.size() < sizeof(header)) return CUDA_ERROR_INVALID_IMAGE;
  std::memcpy(&header, image.data(), sizeof(header));
  uint64_t at = header.header_bytes;
  const uint64_t end = std::min<uint64_t>(image.size(), at + std::min<uint64_t>(header.bytes, image.size()));
  FatEntry entry, best{};
  Bytes chosen;
  while (at < end && end - at >= sizeof(entry)) {
    std::memcpy(&entry, image.data() + at, sizeof(entry));
    if (entry.header_bytes < sizeof(entry) || entry.header_bytes > end - at ||
        entry.bytes > end - at - entry.header_bytes)
      break;
    if (entry.kind == kFatElf && !(entry.flags & kFatOldCompression) && entry.architecture <= kArchitecture &&
        entry.architecture > best.architecture) {
      best = entry;
      chosen = image.subspan(at + entry.header_bytes, entry.bytes);
    }
    at += entry.header_bytes + entry.bytes;
  }
  std::vector<std::byte> content;
  if (best.flags & kFatZstd) {
    content = decompress(chosen.first(std::min<size_t>(chosen.size(), best.compressed_bytes)));
    chosen = content;
  }
  ElfView elf;
  if (!chosen.empty() && ElfView::open(chosen, elf)) read_cubin(elf, out);
  return CUDA_SUCCESS;
}

}  // namespace

CUresult read_shared_object(Bytes image, Image& out) {
  ElfView elf;
  if (!ElfView::open(image, elf)) {
    const bool gpu = is_gpu_image(image);
    out.error = gpu ? "it holds code for a GPU, not a shared object for the cpu device" : "it is not a 64-bit ELF file";
    return gpu ? CUDA_ERROR_NO_BINARY_FOR_GPU : CUDA_ERROR_INVALID_IMAGE;
  }
  if (elf.header().e_machine != kNativeMachine) {
    out.error = "it is made for another machine (ELF e_machine " + std::to_string(elf.header().e_machine) + ")";
    return CUDA_ERROR_NO_BINARY_FOR_GPU;
  }
  if (elf.header().e_type != ET_DYN) {
    out.error = "it is not a shared object";
    return CUDA_ERROR_INVALID_IMAGE;
  }
  const std::vector<Elf64_Shdr> sections = elf.sections();
  for (const Elf64_Shdr& section : sections)
    if (elf.name(section, sections) == "xmig" && section.sh_type == SHT_PROGBITS && (section.sh_flags & SHF_ALLOC))
      return read_descriptors(elf, section, out);
  out.error = "it has no section \"xmig\": it declares no kernels (see docs/kernels.md)";
  return CUDA_ERROR_INVALID_IMAGE;
}

CUresult read_any(Bytes image, Image& out) {
  ElfView elf;
  if (ElfView::open(image, elf)) {
    if (elf.header().e_machine == kCudaMachine) return read_cubin(elf, out);
    return read_shared_object(image, out);
  }
  if (starts_with(image, kFatMagic)) return read_fat_binary(image, out);
  return image.empty() ? CUDA_ERROR_INVALID_IMAGE : CUDA_SUCCESS;
}

size_t image_extent(Bytes known) {
  if (starts_with(known, kFatMagic)) {
    FatHeader header;
    if (known.size() < sizeof(header)) return 0;
    std::memcpy(&header, known.data(), sizeof(header));
    return header.bytes > SIZE_MAX / 2 ? 0 : header.header_bytes + header.bytes;
  }
  ElfView elf;
  if (!ElfView::open(known, elf)) return 0;
  // The section headers end a shared object; a cubin may have its program headers there.
  const Elf64_Ehdr& h = elf.header();
  uint64_t sections, segments;
  if (__builtin_add_overflow(h.e_shoff, uint64_t{h.e_shnum} * h.e_shentsize, &sections) ||
      __builtin_add_overflow(h.e_phoff, uint64_t{h.e_phnum} * h.e_phentsize, &segments))
    return 0;
  return std::max({sections, segments, uint64_t{sizeof(h)}});
}

}  // namespace xmig::device
