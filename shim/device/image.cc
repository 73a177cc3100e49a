#include "device/image.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <tuple>

#include "device/elf_view.h"
#include "device/image_formats.h"
#include "xmig/kernel.h"

namespace xmig::device {
namespace {

constexpr Elf64_Half kCudaMachine = 190;
constexpr uint32_t kMaxStaticShared = 232448;  // what an H200's block can have

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

Result<Image> read_descriptors(const ElfView& elf, const Elf64_Shdr& section) {
  const Bytes bytes = elf.range(section.sh_offset, section.sh_size);
  const size_t count = bytes.size() / sizeof(xmig_descriptor);
  if (bytes.size() % sizeof(xmig_descriptor) != 0 || count == 0 || count > kMaxKernels || !is_loaded(elf, section)) {
    return refused("its section \"xmig\" is damaged");
  }
  Image out;
  std::set<std::string, std::less<>> seen;
  for (size_t i = 0; i < count; ++i) {
    xmig_descriptor d;
    std::memcpy(&d, bytes.data() + i * sizeof(d), sizeof(d));
    const std::string name(d.name, strnlen(d.name, sizeof(d.name)));
    std::string error = name.size() == sizeof(d.name) ? "has a name without an end" : check_descriptor(d, name);
    if (error.empty() && !seen.insert(name).second) error = "is described twice";
    if (!error.empty()) return refused("entry " + std::to_string(i) + " of section \"xmig\" " + error);
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
  return out;
}

bool starts_with(Bytes image, uint32_t magic) {
  return image.size() >= sizeof(magic) && std::memcmp(image.data(), &magic, sizeof(magic)) == 0;
}

bool is_gpu_image(Bytes image) {
  return starts_with(image, kFatMagic) || starts_with(image, 0x466243b1) || is_ptx(image);
}

}  // namespace

Result<Image> read_shared_object(Bytes image) {
  ElfView elf;
  if (!ElfView::open(image, elf)) {
    if (!is_gpu_image(image)) return refused("it is not a 64-bit ELF file");
    return refused("it holds code for a GPU, not a shared object for the cpu device", CUDA_ERROR_NO_BINARY_FOR_GPU);
  }
  if (elf.header().e_machine != kNativeMachine) {
    return refused("it is made for another machine (ELF e_machine " + std::to_string(elf.header().e_machine) + ")",
                   CUDA_ERROR_NO_BINARY_FOR_GPU);
  }
  if (elf.header().e_type != ET_DYN) return refused("it is not a shared object");
  const std::vector<Elf64_Shdr> sections = elf.sections();
  for (const Elf64_Shdr& section : sections)
    if (elf.name(section, sections) == "xmig" && section.sh_type == SHT_PROGBITS && (section.sh_flags & SHF_ALLOC))
      return read_descriptors(elf, section);
  return refused("it has no section \"xmig\": it declares no kernels (see docs/kernels.md)");
}

Result<Image> read_any(Bytes image) {
  ElfView elf;
  if (ElfView::open(image, elf)) {
    if (elf.header().e_machine == kCudaMachine) return read_cubin(elf);
    return read_shared_object(image);
  }
  if (starts_with(image, kFatMagic)) return read_fat_binary(image);
  if (is_ptx(image)) return read_ptx({reinterpret_cast<const char*>(image.data()), image.size()});
  return refused("it is neither an ELF file, nor a fat binary, nor PTX");
}

Result<> read_variables(Bytes image, uint32_t architecture, std::vector<ImageVariable>& out) {
  ElfView elf;
  Result<> read;
  if (ElfView::open(image, elf)) {
    if (elf.header().e_machine != kCudaMachine) return refused("it is an ELF file for another machine");
    read = read_cubin_variables(elf, out);
  } else if (starts_with(image, kFatMagic)) {
    read = read_fat_binary_variables(image, architecture, out);
  } else if (is_ptx(image)) {
    read = read_ptx_variables({reinterpret_cast<const char*>(image.data()), image.size()}, out);
  } else {
    return refused("it is neither an ELF file, nor a fat binary, nor PTX");
  }
  // Of one name there is one for who asks: the driver's.
  const auto by_name = [](const ImageVariable& a, const ImageVariable& b) {
    return std::tie(a.name, b.has_addresses) < std::tie(b.name, a.has_addresses);
  };
  std::sort(out.begin(), out.end(), by_name);
  const auto same = [](const ImageVariable& a, const ImageVariable& b) { return a.name == b.name; };
  out.erase(std::unique(out.begin(), out.end(), same), out.end());
  return read;
}

size_t image_extent(Bytes known) {
  if (starts_with(known, kFatMagic)) return fat_binary_extent(known);
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
