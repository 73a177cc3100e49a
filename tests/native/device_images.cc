// Images for GPUs, as the null device reads them: what a cubin and PTX say of kernels' parameters and of variables.
#include <elf.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "device/image.h"
#include "device_harness.h"

namespace {

device::Bytes bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

template <typename T>
void put(std::string& to, const T& value) {
  to.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

// An ELF file with the sections given, their names, and a symbol table.
class Cubin {
 public:
  struct Section {
    std::string name;
    std::string content;
    uint32_t type = SHT_PROGBITS;
    uint32_t link = 0;
  };

  Cubin& add(std::string name, std::string content = {}) {
    sections_.push_back({std::move(name), std::move(content)});
    return *this;
  }
  // A variable of a section that was added, counted from 0.
  Cubin& symbol(std::string_view name, uint16_t section, uint64_t bytes, unsigned char type = STT_OBJECT) {
    Elf64_Sym symbol{};
    symbol.st_name = static_cast<Elf64_Word>(strings_.size());
    symbol.st_info = static_cast<unsigned char>(ELF64_ST_INFO(STB_GLOBAL, type));
    symbol.st_shndx = static_cast<Elf64_Section>(section + 1);
    symbol.st_size = bytes;
    put(symbols_, symbol);
    strings_.append(name).push_back('\0');
    return *this;
  }
  std::string file(uint16_t machine = 190) const {
    std::vector<Section> all = sections_;
    const auto strings = static_cast<uint32_t>(all.size() + 1);
    all.push_back({".strtab", strings_, SHT_STRTAB});
    all.push_back({".symtab", symbols_, SHT_SYMTAB, strings});
    all.push_back({".shstrtab", {}, SHT_STRTAB});
    std::string names(1, '\0'), body;
    std::vector<Elf64_Shdr> headers(1);
    for (Section& section : all) {
      Elf64_Shdr header{};
      header.sh_name = static_cast<Elf64_Word>(names.size());
      names.append(section.name).push_back('\0');
      if (section.name == ".shstrtab") section.content = names;
      header.sh_type = section.type;
      header.sh_link = section.link;
      header.sh_offset = sizeof(Elf64_Ehdr) + body.size();
      header.sh_size = section.content.size();
      headers.push_back(header);
      body += section.content;
    }
    Elf64_Ehdr elf{};
    std::memcpy(elf.e_ident, ELFMAG, SELFMAG);
    elf.e_ident[EI_CLASS] = ELFCLASS64;
    elf.e_ident[EI_DATA] = ELFDATA2LSB;
    elf.e_ident[EI_VERSION] = EV_CURRENT;
    elf.e_type = ET_EXEC;
    elf.e_machine = machine;
    elf.e_ehsize = sizeof(elf);
    elf.e_shoff = sizeof(elf) + body.size();
    elf.e_shentsize = sizeof(Elf64_Shdr);
    elf.e_shnum = static_cast<Elf64_Half>(headers.size());
    elf.e_shstrndx = static_cast<Elf64_Half>(headers.size() - 1);
    std::string out;
    put(out, elf);
    out += body;
    for (const Elf64_Shdr& header : headers) put(out, header);
    return out;
  }

 private:
  std::vector<Section> sections_;
  std::string symbols_ = std::string(sizeof(Elf64_Sym), '\0');
  std::string strings_ = std::string(1, '\0');
};

// Entries of .nv.info.<kernel>.
std::string plain(uint8_t format, uint8_t attribute, uint16_t value) {
  std::string entry;
  put(entry, format);
  put(entry, attribute);
  put(entry, value);
  return entry;
}
std::string sized(uint8_t attribute, const std::string& data) {
  return plain(4, attribute, static_cast<uint16_t>(data.size())) + data;
}
std::string parameter(uint16_t ordinal, uint16_t offset, uint32_t bytes, bool long_form = false) {
  std::string data;
  put(data, uint32_t{0});
  put(data, ordinal);
  put(data, offset);
  put(data, long_form ? bytes : bytes << 18 | 0x1f000);
  return sized(long_form ? 0x45 : 0x17, data);
}
std::string total(uint16_t bytes) { return plain(3, 0x19, bytes); }

// What a compiler has made of images/variables.cu.
std::string built(const char* name) {
  const std::filesystem::path path = std::filesystem::path(XMIG_IMAGES) / name;
  std::ifstream file(path, std::ios::binary);
  std::string content((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  CHECK(!content.empty());
  return content;
}

// The variables that kernels can write, in order, each with & if there are addresses in it; what a compiler has put around the
// names of those of one file is left out.
std::string variables(const std::string& file, uint32_t architecture = 90, bool good = true) {
  std::vector<device::ImageVariable> found;
  std::string text;
  const Result<> read = device::read_variables(bytes_of(file), architecture, found);
  CHECK(static_cast<bool>(read) == good && (good || !read.why().empty()));
  std::vector<std::string> names;
  for (const device::ImageVariable& variable : found) {
    std::string name = variable.name;
    if (name.ends_with("6hiddenE")) name = "hidden";
    if (name.starts_with("__nv_static")) name = name.substr(name.find("counter_") + 8);
    names.push_back((variable.has_addresses ? "&" : "") + name);
  }
  std::sort(names.begin(), names.end());
  for (const std::string& name : names) text += (text.empty() ? "" : " ") + name;
  return text;
}

device::Image read(const std::string& file, CUresult expected = CUDA_SUCCESS) {
  const Result<device::Image> image = device::read_any(bytes_of(file));
  CHECK_RESULT(expected, image ? CUDA_SUCCESS : device::result_of(image.error()));
  return image ? *image : device::Image{};
}

// The layout of the kernel "k" with this description.
device::ImageKernel kernel(const std::string& info) {
  const device::Image image = read(Cubin().add(".text.k", "code").add(".nv.info.k", info).file());
  CHECK(image.kernels.size() == 1 && image.kernels[0].name == "k");
  return image.kernels[0];
}

std::string layout(const device::ImageKernel& kernel) {
  std::string text;
  for (const auto& p : kernel.parameters) text += std::to_string(p.offset) + "+" + std::to_string(p.size) + " ";
  return text + "of " + std::to_string(kernel.parameter_bytes);
}

}  // namespace

TEST(cubin_parameters) {
  CHECK(layout(kernel("")) == "of 0");
  // In the order in which compilers write them, the last first; among other entries.
  const std::string before = sized(0x04, "12345678") + plain(2, 0x36, 0) + plain(1, 0x2f, 7);
  const std::string all = before + total(56) + parameter(3, 44, 12) + parameter(2, 40, 1) + parameter(1, 8, 32) +
                          parameter(0, 0, 8) + plain(3, 0x1b, 255);
  CHECK(layout(kernel(all)) == "0+8 8+32 40+1 44+12 of 56");
  // The total counts what follows the last parameter, and is not needed.
  CHECK(layout(kernel(total(64) + parameter(0, 0, 8))) == "0+8 of 64");
  CHECK(layout(kernel(parameter(1, 16, 4000) + parameter(0, 0, 16))) == "0+16 16+4000 of 4016");
  // More than 4 KiB of them: the long form.
  CHECK(layout(kernel(total(32764) + parameter(1, 8192, 24572, true) + parameter(0, 0, 8192, true))) ==
        "0+8192 8192+24572 of 32764");
  // What does not make sense: as much as is sure.
  CHECK(layout(kernel(parameter(0, 0, 8) + parameter(2, 16, 8))) == "0+8 of 8");
  CHECK(layout(kernel(parameter(0, 0, 8) + parameter(0, 8, 8))) == "0+8 of 8");
  CHECK(layout(kernel(parameter(1, 0, 8))) == "of 0");
  CHECK(layout(kernel(parameter(0, 0, 70'000, true))) == "of 0");
  CHECK(layout(kernel(parameter(0, 0, 8) + sized(0x17, "short"))) == "0+8 of 8");
  CHECK(layout(kernel(parameter(0, 0, 8) + plain(4, 0x17, 500) + "less than that")) == "0+8 of 8");
  CHECK(layout(kernel(parameter(0, 0, 8) + "\x04\x17")) == "0+8 of 8");
}

TEST(cubin_kernels_and_variables) {
  const std::string file = Cubin()
                               .add(".text.first", "code")
                               .add(".text.second", "code")
                               .add(".nv.info", "of the module")
                               .add(".nv.info.second", parameter(0, 0, 4))
                               .add(".nv.info.third", parameter(0, 0, 4))  // of nobody
                               .add(".text.first", "again")
                               .add(".text.", "nameless")
                               .add(".nv.global.init", std::string(64, 'x'))
                               .add(".nv.constant3", std::string(16, 'x'))
                               .add(".nv.constant0.first", std::string(16, 'x'))
                               .symbol("table", 7, 48)
                               .symbol("scale", 8, 16)
                               .symbol("parameters", 9, 16)
                               .symbol("empty", 7, 0)
                               .symbol("code", 0, 4)
                               .symbol("first", 0, 4, STT_FUNC)
                               .symbol("nowhere", 500, 4)
                               .symbol("huge", 7, ~0ull)
                               .file();
  const device::Image image = read(file);
  CHECK(image.kernels.size() == 2 && image.kernels[0].name == "first" && image.kernels[1].name == "second");
  CHECK(layout(image.kernels[0]) == "of 0" && layout(image.kernels[1]) == "0+4 of 4");
  CHECK(image.globals.size() == 2 && image.globals[0].name == "table" && image.globals[0].bytes == 48);
  CHECK(image.globals[1].name == "scale" && image.globals[1].bytes == 16);
  CHECK(device::image_extent(bytes_of(file).first(64)) == file.size());
  // For another machine it is no cubin, and no shared object of this one.
  read(Cubin().add(".text.k").file(EM_RISCV), CUDA_ERROR_NO_BINARY_FOR_GPU);
  // Snapshot short anywhere, and with any bit turned: nothing is read outside, and what is found fits.
  std::mt19937 random(7);
  for (size_t i = 0; i < file.size() + 4000; ++i) {
    std::string damaged = file.substr(0, i < file.size() ? i : file.size());
    if (i >= file.size()) damaged[random() % damaged.size()] ^= static_cast<char>(1 << random() % 8);
    const Result<device::Image> part = device::read_any(bytes_of(std::string(damaged)));
    if (!part) continue;
    for (const auto& k : part->kernels) {
      for (const auto& p : k.parameters) CHECK(uint64_t{p.offset} + p.size <= k.parameter_bytes);
    }
  }
}

TEST(ptx_parameters) {
  const auto of = [](const std::string& list, CUresult expected = CUDA_SUCCESS) {
    const device::Image image = read(".version 8.0\n.target sm_90\n.visible .entry k" + list + " { ret; }", expected);
    return image.kernels.empty() ? std::string("none") : layout(image.kernels[0]);
  };
  CHECK(of("") == "of 0" && of("()") == "of 0");
  // Each at a multiple of its size, or of what it asks for.
  CHECK(of("(.param .u8 a, .param .u16 b, .param .u8 c, .param .u32 d, .param .u8 e, .param .u64 f)") ==
        "0+1 2+2 4+1 8+4 12+1 16+8 of 24");
  CHECK(of("(.param .u8 a, .param .align 16 .b8 b[3], .param .align 64 .b8 c[128])") == "0+1 16+3 64+128 of 192");
  CHECK(of("(.param .align 4 .b32 a[2][3], .param .b128 b)") == "0+24 32+16 of 48");
  CHECK(of("(.param .u64 .ptr .global .align 256 a, .param .pred_is_no_type .u32 b)") == "0+8 8+4 of 12");
  CHECK(of("(.param .b8 a[32764])") == "0+32764 of 32764");
  for (const char* bad : {"(.param .b8 a[32765])", "(.param .b8 a[32760], .param .u64 b)", "(.param .b8 a[0x10])",
                          "(.param .b64 a[2305843009213693952])", "(.param .align 3 .b8 a[4])", "(.param .u32)",
                          "(.param a)", "(.u32 a)", "(.param .b8 a[4)", "(.param .b8 a[])", "(.param .u32 a"}) {
    CHECK(of(bad, CUDA_ERROR_INVALID_PTX) == "none");
  }
}

TEST(image_variables) {
  const std::string plain = " _Z5valueIfE _Z5valueIiE _ZZ4bumpvE5calls counter";
  // Function pointers of a program that is compiled as a whole are no addresses, but numbers.
  const std::string cubin = "&nodes &where" + plain + " functions hidden odd table";
  const std::string others = "&functions &nodes &where" + plain + " hidden odd table";
  CHECK(variables(built("variables.cubin")) == cubin);
  CHECK(variables(built("linked.cubin")) == others);
  CHECK(variables(built("variables.ptx")) == others);
  // Of a fat binary what this device takes: a cubin of its generation, else PTX.
  const std::string fat = built("variables.fatbin");
  for (const uint32_t architecture : {80, 86, 89, 90}) CHECK(variables(fat, architecture) == cubin);
  CHECK(variables(fat, 100) == others);
  CHECK(variables(fat, 75, false).empty());
  CHECK(variables("what is this", 90, false).empty());
  CHECK(variables(Cubin().add(".text.k").file(EM_RISCV), 90, false).empty());
}

TEST(ptx_variables) {
  const auto of = [](const std::string& text) { return variables(".version 8.0\n.target sm_90\n" + text); };
  CHECK(of("").empty());
  CHECK(of(".visible .global .align 8 .b8 a[16]; .weak .global .u32 b = 0x10; .global .f32 c[2] = {0f3F800000, -1.0};") ==
        "a b c");
  CHECK(of(".global .u32 a, b[2] = {1, 2}, c; .global .v4 .f32 d;") == "a b c d");
  CHECK(of(".global .u64 a = generic(c), b[2] = {f(1, c), 2}, c = 5;") == "&a &b c");
  CHECK(of(".global .u64 a[2] = {0, b + 8}; .global .u64 c[] = {generic(a)}; .global .u8 d = 0xff(a);") == "&a &c &d");
  CHECK(of(".global .attribute(.unified(1, 2)) .align 4 .u32 a; .const .u32 b; .extern .global .u32 c; .shared .u32 d;") == "a");
  CHECK(of(".global .texref t; .global .surfref s; .global .samplerref p; .global .u32 a;") == "a");
  CHECK(of(".visible .func (.param .u32 r) f(.param .u64 .ptr .global p) { .reg .u32 x; ld.global.u32 x, [a]; }\n"
           ".visible .entry k(.param .u64 .ptr .global .align 4 p) .maxntid 32 { ret; }\n.global .u32 a;") == "a");
  variables(".version 8.0\n.global .u32 a", 90, false);
}

TEST(damaged_images_with_variables) {
  std::mt19937 random(5);
  for (const char* name : {"variables.cubin", "linked.cubin", "variables.ptx", "variables.fatbin"}) {
    const std::string file = built(name);
    for (size_t i = 0; i < 3000; ++i) {
      std::string damaged = file.substr(0, i % 3 == 0 ? random() % file.size() : file.size());
      for (size_t k = i % 3; k > 0 && !damaged.empty(); --k) damaged[random() % damaged.size()] ^= static_cast<char>(1 << random() % 8);
      std::vector<device::ImageVariable> found;
      const Result<> read = device::read_variables(bytes_of(damaged), 90, found);
      CHECK((read || !read.why().empty()) && found.size() <= device::kMaxVariables);
    }
  }
  // More than is believed.
  Cubin many;
  many.add(".nv.global", std::string(16, 'x'));
  for (size_t i = 0; i <= device::kMaxVariables; ++i) many.symbol("v" + std::to_string(i), 0, 4);
  std::vector<device::ImageVariable> found;
  const Result<> read = device::read_variables(bytes_of(many.file()), 90, found);
  CHECK(!read && !read.why().empty());
  variables(Cubin().add(".nv.global").symbol(std::string(device::kMaxVariableName, 'n'), 0, 4).file(), 90, false);
}
