// Fat binaries: the same code for several architectures, as cubins and as PTX, each compressed or not.
#include <lz4.h>
#include <zstd.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "device/image_formats.h"

namespace xmig::device {
namespace {

struct Header {
  uint32_t magic;
  uint16_t version, header_bytes;
  uint64_t bytes;
};
struct Entry {
  uint16_t kind, unknown;
  uint32_t header_bytes;
  uint64_t bytes;
  uint32_t compressed_bytes, unknown2;
  uint16_t minor, major;
  uint32_t architecture;
  uint32_t name_offset, name_bytes;
  uint64_t flags;
  uint64_t unknown3;
  uint64_t content_bytes;  // if it is compressed
};
constexpr uint16_t kPtx = 1, kElf = 2;
constexpr uint64_t kLz4 = 0x2000, kZstd = 0x8000;
constexpr uint32_t kArchitecture = 90;  // what the null device says it is
constexpr size_t kMaxAlternatives = 8;
constexpr unsigned long long kMaxContent = 1ull << 30;
constexpr uint64_t kMaxRatio = 256;  // LZ4 reaches 255: a claim beyond it is not believed with memory

// A cubin runs on its own generation, PTX on every later one.
bool runs_on(uint32_t architecture, const Entry& entry) {
  if (entry.architecture > architecture) return false;
  return entry.kind == kPtx || (entry.kind == kElf && entry.architecture / 10 == architecture / 10);
}

// Cubins before PTX, and of either the newest.
bool better(const Entry& a, const Entry& b) {
  return a.kind != b.kind ? a.kind > b.kind : a.architecture > b.architecture;
}

// Nothing, if it cannot be read.
std::vector<std::byte> content_of(const Entry& entry, Bytes stored) {
  if (!(entry.flags & (kLz4 | kZstd))) return {stored.begin(), stored.end()};
  stored = stored.first(std::min<size_t>(stored.size(), entry.compressed_bytes));
  if (entry.flags & kLz4) {
    if (stored.size() > kMaxContent || entry.content_bytes > kMaxContent) return {};
    if (entry.content_bytes / kMaxRatio > stored.size()) return {};
    std::vector<std::byte> content(entry.content_bytes);
    const int got =
        LZ4_decompress_safe(reinterpret_cast<const char*>(stored.data()), reinterpret_cast<char*>(content.data()),
                            static_cast<int>(stored.size()), static_cast<int>(content.size()));
    if (got < 0 || static_cast<size_t>(got) != content.size()) return {};
    return content;
  }
  const unsigned long long bytes = ZSTD_getFrameContentSize(stored.data(), stored.size());
  if (bytes == ZSTD_CONTENTSIZE_ERROR || bytes == ZSTD_CONTENTSIZE_UNKNOWN || bytes > kMaxContent) return {};
  std::vector<std::byte> content(bytes);
  const size_t got = ZSTD_decompress(content.data(), content.size(), stored.data(), stored.size());
  if (ZSTD_isError(got)) return {};
  content.resize(got);
  return content;
}

// f(const Entry&, Bytes stored) for each, as far as they fit.
template <typename F>
void for_each_entry(Bytes image, F&& f) {
  Header header;
  std::memcpy(&header, image.data(), sizeof(header));
  uint64_t at = header.header_bytes;
  const uint64_t end = std::min<uint64_t>(image.size(), at + std::min<uint64_t>(header.bytes, image.size()));
  while (at < end && end - at >= sizeof(Entry)) {
    Entry entry;
    std::memcpy(&entry, image.data() + at, sizeof(entry));
    if (entry.header_bytes < sizeof(entry) || entry.header_bytes > end - at ||
        entry.bytes > end - at - entry.header_bytes)
      break;
    f(entry, image.subspan(at + entry.header_bytes, entry.bytes));
    at += entry.header_bytes + entry.bytes;
  }
}

}  // namespace

size_t fat_binary_extent(Bytes known) {
  Header header;
  if (known.size() < sizeof(header)) return 0;
  std::memcpy(&header, known.data(), sizeof(header));
  return header.bytes > SIZE_MAX / 2 ? 0 : header.header_bytes + header.bytes;
}

Result<Image> read_fat_binary(Bytes image) {
  if (image.size() < sizeof(Header)) return refused("it is a fat binary without a header");
  std::optional<Entry> chosen;
  Bytes stored;
  for_each_entry(image, [&](const Entry& entry, Bytes content) {
    if (!runs_on(kArchitecture, entry) || (chosen && !better(entry, *chosen))) return;
    chosen = entry;
    stored = content;
  });
  if (!chosen) {
    return refused("it is a fat binary without code for compute capability 9.0", CUDA_ERROR_NO_BINARY_FOR_GPU);
  }
  const std::vector<std::byte> content = content_of(*chosen, stored);
  ElfView elf;
  if (chosen->kind == kPtx && is_ptx(content)) {
    return read_ptx({reinterpret_cast<const char*>(content.data()), content.size()});
  }
  if (chosen->kind == kElf && ElfView::open(content, elf)) return read_cubin(elf);
  return refused("it is a fat binary whose code for this device is damaged");
}

// Which of several for the same architecture the driver takes is not known (there are such for features of one architecture):
// the variables of all of them.
Result<> read_fat_binary_variables(Bytes image, uint32_t architecture, std::vector<ImageVariable>& out) {
  if (image.size() < sizeof(Header)) return refused("it is a fat binary without a header");
  std::vector<std::pair<Entry, Bytes>> chosen;
  for_each_entry(image, [&](const Entry& entry, Bytes content) {
    if (!runs_on(architecture, entry)) return;
    if (!chosen.empty() && better(chosen[0].first, entry)) return;
    if (!chosen.empty() && better(entry, chosen[0].first)) chosen.clear();
    if (chosen.size() < kMaxAlternatives) chosen.emplace_back(entry, content);
  });
  for (const auto& [entry, stored] : chosen) {
    const std::vector<std::byte> content = content_of(entry, stored);
    ElfView elf;
    Result<> read = refused("it is a fat binary whose code for this device cannot be read");
    if (entry.kind == kPtx && is_ptx(content)) {
      read = read_ptx_variables({reinterpret_cast<const char*>(content.data()), content.size()}, out);
    } else if (entry.kind == kElf && ElfView::open(content, elf)) {
      read = read_cubin_variables(elf, out);
    }
    if (!read) return read;
  }
  if (chosen.empty()) return refused("it is a fat binary without code for this device");
  return {};
}

}  // namespace xmig::device
