// What the dynamic linker takes on trust. It maps what the program headers say, follows every pointer of the dynamic
// section and writes wherever a relocation points to; a damaged image would take the server down inside the linker.
// So everything that it will follow is followed here first, with bounds.
//
// This makes loading safe, not the code: a well-formed image may do whatever the job's user may do.

#include <algorithm>
#include <map>

#include "device/elf_view.h"

namespace xmig::device {
namespace {

constexpr uint64_t kMaxSpan = 1ull << 30;  // of address space that one image may take
constexpr uint64_t kPage = 4096;
constexpr uint64_t kMaxAlign = 2ull << 20;

class Checker {
 public:
  explicit Checker(const ElfView& elf) : elf_(elf), segments_(elf.segments()) {}

  std::string run() {
    for (const auto step : {&Checker::check_segments, &Checker::read_dynamic, &Checker::check_strings,
                            &Checker::check_versions, &Checker::check_symbols, &Checker::check_relocations,
                            &Checker::check_functions})
      if (std::string error = (this->*step)(); !error.empty()) return error;
    return "";
  }

 private:
  // Bytes of the file that will lie at this address, or nothing.
  Bytes at(uint64_t address, uint64_t bytes) const {
    for (const Elf64_Phdr& s : segments_)
      if (s.p_type == PT_LOAD && address >= s.p_vaddr && address - s.p_vaddr <= s.p_filesz &&
          bytes <= s.p_filesz - (address - s.p_vaddr))
        return elf_.range(s.p_offset + (address - s.p_vaddr), bytes);
    return {};
  }
  template <typename T>
  bool read(uint64_t address, T& out) const {
    const Bytes bytes = at(address, sizeof(T));
    if (bytes.empty()) return false;
    std::memcpy(&out, bytes.data(), sizeof(T));
    return true;
  }
  bool in_memory(uint64_t address, uint64_t bytes, uint32_t flags) const {
    return std::any_of(segments_.begin(), segments_.end(), [&](const Elf64_Phdr& s) {
      return s.p_type == PT_LOAD && (s.p_flags & flags) == flags && address >= s.p_vaddr &&
             address - s.p_vaddr <= s.p_memsz && bytes <= s.p_memsz - (address - s.p_vaddr);
    });
  }
  bool has(Elf64_Sxword tag) const { return dynamic_.contains(tag); }
  uint64_t value(Elf64_Sxword tag) const {
    const auto found = dynamic_.find(tag);
    return found == dynamic_.end() ? 0 : found->second;
  }

  std::string check_segments();
  std::string read_dynamic();
  std::string check_strings();
  std::string count_symbols();
  std::string check_symbols();
  std::string check_symbols_to(uint64_t count);
  std::string check_versions();
  std::string check_relocations();
  std::string check_table(uint64_t address, uint64_t bytes, uint64_t relative);
  std::string check_compact_relocations();
  std::string check_functions();

  const ElfView& elf_;
  const std::vector<Elf64_Phdr> segments_;
  std::map<Elf64_Sxword, uint64_t> dynamic_;
  std::vector<uint64_t> needed_;
  Bytes strings_;
  uint32_t highest_version_ = 1;
  uint64_t hashed_ = 0;   // symbols that the hash tables reach
  uint64_t checked_ = 0;  // symbols that have been checked
};

std::string Checker::check_segments() {
  uint64_t end = 0;
  size_t loads = 0, dynamics = 0;
  bool has_stack = false;
  for (const Elf64_Phdr& s : segments_) {
    if (s.p_type == PT_LOAD) {
      const uint64_t align = std::max(s.p_align, kPage);
      if (!elf_.contains(s.p_offset, s.p_filesz) || s.p_filesz > s.p_memsz || s.p_memsz > kMaxSpan ||
          s.p_vaddr > kMaxSpan || s.p_vaddr < end || (align & (align - 1)) != 0 || align > kMaxAlign ||
          s.p_vaddr % align != s.p_offset % align)
        return "a segment does not fit";
      // The linker refuses nothing here and would map two segments onto one page.
      end = (s.p_vaddr + s.p_memsz + kPage - 1) / kPage * kPage;
      if (loads++ == 0 && s.p_vaddr != 0) return "its first segment is not at address 0";
    } else if (s.p_type == PT_DYNAMIC) {
      ++dynamics;
    } else if (s.p_type == PT_INTERP) {
      return "it is a program";
    } else if (s.p_type == PT_GNU_STACK) {
      has_stack = !(s.p_flags & PF_X);
    }
  }
  if (loads == 0 || dynamics != 1) return "it has no segments to load, or no dynamic section";
  if (!has_stack) return "it asks for an executable stack";  // or says nothing, which means the same
  for (const Elf64_Phdr& s : segments_) {
    if (s.p_type == PT_TLS) {
      if ((s.p_align & (s.p_align - 1)) != 0 || s.p_align > kPage || s.p_filesz > s.p_memsz || s.p_memsz > (1u << 20) ||
          (s.p_filesz != 0 && at(s.p_vaddr, s.p_filesz).empty()))
        return "its thread-local segment does not fit";
    } else if (s.p_type == PT_PHDR) {
      const Bytes table = at(s.p_vaddr, segments_.size() * sizeof(Elf64_Phdr));
      if (table.empty() || table.data() != elf_.image().data() + elf_.header().e_phoff)
        return "its program headers do not fit";
    } else if (s.p_type == PT_GNU_RELRO) {
      // Rounded up to pages by the static linker, past the end of the segment.
      if (!in_memory(s.p_vaddr, 0, PF_R | PF_W) || s.p_memsz > kMaxSpan || s.p_vaddr + s.p_memsz > end)
        return "a segment does not fit";
    } else if (s.p_type == PT_NOTE || s.p_type == PT_GNU_PROPERTY) {
      if (s.p_memsz != s.p_filesz || !elf_.contains(s.p_offset, s.p_filesz) ||
          (s.p_filesz != 0 && at(s.p_vaddr, s.p_filesz).empty()))
        return "a note does not fit";
    }
  }
  return "";
}

std::string Checker::read_dynamic() {
  const auto segment =
      std::find_if(segments_.begin(), segments_.end(), [](const Elf64_Phdr& s) { return s.p_type == PT_DYNAMIC; });
  const uint64_t count = segment->p_filesz / sizeof(Elf64_Dyn);
  if (segment->p_memsz < segment->p_filesz || segment->p_vaddr % 8 != 0 ||
      !in_memory(segment->p_vaddr, segment->p_memsz, PF_R | PF_W))
    return "its dynamic section does not fit";
  for (uint64_t i = 0; i < count; ++i) {
    Elf64_Dyn entry;
    if (!read(segment->p_vaddr + i * sizeof(entry), entry)) return "its dynamic section does not fit";
    if (entry.d_tag == DT_NULL) return "";
    if (entry.d_tag == DT_NEEDED) {
      needed_.push_back(entry.d_un.d_val);
    } else if (!dynamic_.emplace(entry.d_tag, entry.d_un.d_val).second) {
      return "its dynamic section says something twice";
    }
    for (const Elf64_Sxword refused : {DT_REL, DT_TEXTREL, DT_FILTER, DT_AUXILIARY, DT_CONFIG, DT_DEPAUDIT, DT_AUDIT,
                                       DT_PREINIT_ARRAY, DT_SYMINFO, DT_GNU_CONFLICT, DT_GNU_LIBLIST})
      if (entry.d_tag == refused) return "its dynamic section holds something that is not supported";
  }
  return "its dynamic section has no end";
}

std::string Checker::check_strings() {
  strings_ = at(value(DT_STRTAB), value(DT_STRSZ));
  if (strings_.empty() || strings_.back() != std::byte{0}) return "its string table does not fit";
  for (const Elf64_Sxword tag : {DT_SONAME, DT_RPATH, DT_RUNPATH})
    if (has(tag) && value(tag) >= strings_.size()) return "a name does not fit";
  for (const uint64_t name : needed_) {
    const auto library = elf_.string(strings_, name);
    if (!library || library->empty() || library->find('/') != library->npos) return "it needs a library with a path";
  }
  if (has(DT_RPATH) || has(DT_RUNPATH)) return "it says where to look for libraries (RPATH): link without it";
  return "";
}

std::string Checker::check_versions() {
  if (!has(DT_VERSYM)) return has(DT_VERNEED) || has(DT_VERDEF) ? "its symbol versions do not fit" : "";
  uint64_t address = value(DT_VERNEED);
  for (uint64_t i = 0; has(DT_VERNEED); ++i) {
    Elf64_Verneed need;
    if (i >= value(DT_VERNEEDNUM) || address % 4 != 0 || !read(address, need) || need.vn_file >= strings_.size())
      return "its symbol versions do not fit";
    // The linker looks the file up among those that are loaded, and asserts that it finds it.
    const auto file = elf_.string(strings_, need.vn_file);
    if (std::none_of(needed_.begin(), needed_.end(), [&](uint64_t n) { return elf_.string(strings_, n) == file; }))
      return "it wants versions of a library that it does not need";
    uint64_t entry = address + need.vn_aux;
    for (uint32_t k = 0;; ++k) {
      Elf64_Vernaux aux;
      if (k >= need.vn_cnt || entry % 4 != 0 || !read(entry, aux) || aux.vna_name >= strings_.size())
        return "its symbol versions do not fit";
      highest_version_ = std::max<uint32_t>(highest_version_, aux.vna_other & 0x7fff);
      if (aux.vna_next == 0) break;
      entry += aux.vna_next;
    }
    if (need.vn_next == 0) break;
    address += need.vn_next;
  }
  address = value(DT_VERDEF);
  for (uint64_t i = 0; has(DT_VERDEF); ++i) {
    Elf64_Verdef definition;
    Elf64_Verdaux aux;
    if (i >= value(DT_VERDEFNUM) || address % 4 != 0 || !read(address, definition) ||
        !read(address + definition.vd_aux, aux) || aux.vda_name >= strings_.size())
      return "its symbol versions do not fit";
    highest_version_ = std::max<uint32_t>(highest_version_, definition.vd_ndx & 0x7fff);
    if (definition.vd_next == 0) break;
    address += definition.vd_next;
  }
  return value(DT_VERSYM) % 2 == 0 ? "" : "its symbol versions do not fit";
}

// The hash tables say which symbols can be looked up. Both are walked as the linker will.
std::string Checker::count_symbols() {
  if (!has(DT_HASH) && !has(DT_GNU_HASH)) return "it has no symbol hash table";
  if (has(DT_HASH)) {
    uint32_t header[2];
    if (!read(value(DT_HASH), header)) return "its hash table does not fit";
    const auto [buckets, chains] = header;
    const uint64_t words = uint64_t{buckets} + chains;
    const Bytes table = at(value(DT_HASH) + sizeof(header), words * 4);
    if (buckets == 0 || table.empty()) return "its hash table does not fit";
    std::vector<uint32_t> index(words);
    std::memcpy(index.data(), table.data(), words * 4);
    for (size_t i = 0; i < words; ++i) {
      if (index[i] >= chains && index[i] != 0) return "its hash table points outside";
      // Chains that go back could go in circles; linkers write them downwards or upwards, never both.
      if (i >= buckets && index[i] != 0 && index[i] >= i - buckets) return "its hash table has an unusual order";
    }
    hashed_ = chains;
  }
  if (has(DT_GNU_HASH)) {
    struct {
      uint32_t buckets, first, bloom_words, shift;
    } header;
    const uint64_t base = value(DT_GNU_HASH);
    if (!read(base, header) || header.buckets == 0 || header.bloom_words == 0 ||
        (header.bloom_words & (header.bloom_words - 1)) != 0 || header.shift >= 64)
      return "its hash table does not fit";
    const uint64_t buckets_at = base + sizeof(header) + uint64_t{header.bloom_words} * 8;
    const uint64_t chains_at = buckets_at + uint64_t{header.buckets} * 4;
    const Bytes buckets = at(buckets_at, uint64_t{header.buckets} * 4);
    if (at(base, chains_at - base).empty() || buckets.empty()) return "its hash table does not fit";
    uint64_t count = header.first;
    for (uint64_t i = 0; i < header.buckets; ++i) {
      uint32_t symbol;
      std::memcpy(&symbol, buckets.data() + i * 4, 4);
      if (symbol == 0) continue;
      if (symbol < header.first) return "its hash table points outside";
      for (uint32_t hash = 0; (hash & 1) == 0; ++symbol)
        if (symbol == UINT32_MAX || !read(chains_at + uint64_t{symbol - header.first} * 4, hash))
          return "its hash table has no end";
      count = std::max<uint64_t>(count, symbol);
    }
    hashed_ = std::max(hashed_, count);
  }
  return "";
}

std::string Checker::check_symbols() {
  if (std::string error = count_symbols(); !error.empty()) return error;
  if (value(DT_SYMENT) != sizeof(Elf64_Sym) || value(DT_SYMTAB) % 8 != 0) return "its symbol table does not fit";
  return check_symbols_to(std::max<uint64_t>(hashed_, 1));
}

// The number of symbols is written down nowhere: those are checked that are hashed or named by a relocation.
std::string Checker::check_symbols_to(uint64_t count) {
  for (; checked_ < count; ++checked_) {
    Elf64_Sym symbol;
    if (!read(value(DT_SYMTAB) + checked_ * sizeof(symbol), symbol) || symbol.st_name >= strings_.size())
      return "its symbol table does not fit";
    uint16_t version = 0;
    if (has(DT_VERSYM) && !read(value(DT_VERSYM) + checked_ * sizeof(version), version))
      return "its symbol versions do not fit";
    if ((version & 0x7fff) > highest_version_) return "a symbol has a version that does not exist";
    if (symbol.st_shndx == SHN_UNDEF || symbol.st_shndx == SHN_ABS) continue;
    // The linker calls an indirect function while it relocates.
    const auto type = ELF64_ST_TYPE(symbol.st_info);
    if (type == STT_GNU_IFUNC) return "it has indirect functions, which are not supported";
    if (type != STT_TLS && !in_memory(symbol.st_value, 0, PF_R)) return "a symbol lies outside";
  }
  return "";
}

std::string Checker::check_table(uint64_t address, uint64_t bytes, uint64_t relative) {
  if (bytes == 0) return "";
  if (bytes % sizeof(Elf64_Rela) != 0 || address % 8 != 0 || at(address, bytes).empty())
    return "its relocations do not fit";
  for (uint64_t i = 0; i < bytes; i += sizeof(Elf64_Rela)) {
    Elf64_Rela relocation;
    if (!read(address + i, relocation)) return "its relocations do not fit";
    const auto type = ELF64_R_TYPE(relocation.r_info);
    const bool counted = i / sizeof(relocation) < relative;  // done by the linker without a look at the type
#if defined(__x86_64__)
    if (counted && type != R_X86_64_RELATIVE) return "its relocations do not fit";
    if (type == R_X86_64_NONE) continue;
    const bool known = type == R_X86_64_RELATIVE || type == R_X86_64_64 || type == R_X86_64_GLOB_DAT ||
                       type == R_X86_64_JUMP_SLOT || type == R_X86_64_DTPMOD64 || type == R_X86_64_DTPOFF64 ||
                       type == R_X86_64_TPOFF64;
#else
    if (counted && type != R_AARCH64_RELATIVE) return "its relocations do not fit";
    if (type == R_AARCH64_NONE) continue;
    const bool known = type == R_AARCH64_RELATIVE || type == R_AARCH64_ABS64 || type == R_AARCH64_GLOB_DAT ||
                       type == R_AARCH64_JUMP_SLOT;
#endif
    if (!known) return "it has relocations of a kind that is not supported";
    if (!in_memory(relocation.r_offset, 8, PF_W)) return "a relocation writes outside";
    if (std::string error = check_symbols_to(ELF64_R_SYM(relocation.r_info) + 1); !error.empty()) return error;
  }
  return "";
}

std::string Checker::check_compact_relocations() {
  if (!has(DT_RELR)) return "";
  const uint64_t bytes = value(DT_RELRSZ);
  if (value(DT_RELRENT) != 8 || bytes % 8 != 0 || value(DT_RELR) % 8 != 0) return "its relocations do not fit";
  uint64_t next = 0;
  for (uint64_t i = 0; i < bytes; i += 8) {
    uint64_t entry;
    if (!read(value(DT_RELR) + i, entry)) return "its relocations do not fit";
    if ((entry & 1) == 0) {
      if (!in_memory(entry, 8, PF_W)) return "a relocation writes outside";
      next = entry + 8;
      continue;
    }
    for (uint64_t bits = entry >> 1, where = next; bits != 0; bits >>= 1, where += 8)
      if ((bits & 1) && !in_memory(where, 8, PF_W)) return "a relocation writes outside";
    next += 63 * 8;
  }
  return "";
}

std::string Checker::check_relocations() {
  if (has(DT_RELA) && value(DT_RELAENT) != sizeof(Elf64_Rela)) return "its relocations do not fit";
  if (has(DT_RELACOUNT) && value(DT_RELACOUNT) > value(DT_RELASZ) / sizeof(Elf64_Rela))
    return "its relocations do not fit";
  if (has(DT_JMPREL) && value(DT_PLTREL) != DT_RELA) return "its relocations do not fit";
  // The linker writes its own two words here.
  if (has(DT_PLTGOT) && !in_memory(value(DT_PLTGOT), 24, PF_R | PF_W)) return "its offset table does not fit";
  if (std::string error = check_table(value(DT_RELA), has(DT_RELA) ? value(DT_RELASZ) : 0, value(DT_RELACOUNT));
      !error.empty())
    return error;
  if (std::string error = check_table(value(DT_JMPREL), has(DT_JMPREL) ? value(DT_PLTRELSZ) : 0, 0); !error.empty())
    return error;
  return check_compact_relocations();
}

std::string Checker::check_functions() {
  for (const Elf64_Sxword tag : {DT_INIT, DT_FINI})
    if (has(tag) && !in_memory(value(tag), 1, PF_X)) return "its initialiser lies outside";
  for (const auto& [array, size] : {std::pair{DT_INIT_ARRAY, DT_INIT_ARRAYSZ}, {DT_FINI_ARRAY, DT_FINI_ARRAYSZ}})
    if (has(array) && (value(size) % 8 != 0 || value(array) % 8 != 0 || !in_memory(value(array), value(size), PF_R)))
      return "its list of initialisers does not fit";
  return "";
}

}  // namespace

Result<> check_loadable(Bytes image) {
  ElfView elf;
  if (!ElfView::open(image, elf)) return refused("it is not a 64-bit ELF file");
  if (std::string error = Checker(elf).run(); !error.empty()) return refused(std::move(error));
  return {};
}

}  // namespace xmig::device
