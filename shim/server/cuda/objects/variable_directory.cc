#include "server/cuda/objects/variable_directory.h"

#include <xxhash.h>

#include <cstring>

#include "server/cuda/objects/loading.h"
#include "server/records/reader.h"

namespace xmig::server {
namespace {

constexpr uint64_t kDirectoryMagic = 0x3153524156474d58;  // "XMGVARS1"
constexpr uint64_t kContentAlignment = 16;

struct DirectoryHeader {
  uint64_t magic;
  uint64_t checksum;  // XXH3 of the directory behind this field
  uint64_t bytes;     // of the whole place
  uint64_t directory, count;
};
constexpr size_t kDirectoryChecksummedFrom = offsetof(DirectoryHeader, bytes);

struct DirectoryEntry {
  uint64_t bytes, content, first;
  uint32_t name_bytes, written;
};

uint64_t directory_bytes(const std::vector<KeptVariable>& variables) {
  uint64_t bytes = sizeof(DirectoryHeader) + variables.size() * sizeof(DirectoryEntry);
  for (const KeptVariable& variable : variables) bytes += variable.name.size();
  return bytes;
}

// Does it lie behind the directory and before the end?
bool lies_in(uint64_t at, uint64_t length, uint64_t directory, uint64_t bytes) {
  return at >= directory && at <= bytes && length <= bytes - at;
}

}  // namespace

uint64_t place_variables(std::vector<KeptVariable>& variables) {
  uint64_t end = directory_bytes(variables);
  if (end > kMaxVariableDirectory) return 0;
  const auto take = [&](uint64_t length, uint64_t& at) {
    at = (end + kContentAlignment - 1) / kContentAlignment * kContentAlignment;
    return !__builtin_add_overflow(at, length, &end) && end <= UINT64_MAX - kContentAlignment;
  };
  for (KeptVariable& variable : variables) {
    if (!take(variable.bytes, variable.content)) return 0;
    if (variable.first != 0 && !take(variable.bytes, variable.first)) return 0;
  }
  return end;
}

std::vector<std::byte> serialise_variables(const std::vector<KeptVariable>& variables, uint64_t bytes) {
  std::vector<std::byte> out;
  out.reserve(directory_bytes(variables));
  DirectoryHeader header{kDirectoryMagic, 0, bytes, directory_bytes(variables), variables.size()};
  append(out, header);
  for (const KeptVariable& variable : variables) {
    append(out, DirectoryEntry{variable.bytes, variable.content, variable.first, static_cast<uint32_t>(variable.name.size()),
                      variable.written});
  }
  for (const KeptVariable& variable : variables) {
    const auto* name = reinterpret_cast<const std::byte*>(variable.name.data());
    out.insert(out.end(), name, name + variable.name.size());
  }
  header.checksum = XXH3_64bits(out.data() + kDirectoryChecksummedFrom, out.size() - kDirectoryChecksummedFrom);
  std::memcpy(out.data(), &header, sizeof(header));
  return out;
}

uint64_t variable_directory_bytes(std::span<const std::byte> begin, uint64_t bytes) {
  DirectoryHeader header;
  Reader reader(begin);
  const bool sound = reader.get(header) && header.magic == kDirectoryMagic && header.bytes == bytes &&
                     header.directory >= sizeof(header) && header.directory <= std::min(bytes, kMaxVariableDirectory);
  return sound ? header.directory : 0;
}

Result<std::vector<KeptVariable>> parse_variables(std::span<const std::byte> directory, uint64_t bytes) {
  const uint64_t length = variable_directory_bytes(directory, bytes);
  if (length == 0 || length != directory.size()) return Error{"it does not begin with what xMIG has written there"};
  DirectoryHeader header;
  Reader reader(directory);
  reader.get(header);
  if (header.checksum != XXH3_64bits(directory.data() + kDirectoryChecksummedFrom, directory.size() - kDirectoryChecksummedFrom)) {
    return Error{"its checksum is wrong"};
  }
  std::vector<DirectoryEntry> entries;
  if (!reader.get(entries, header.count)) return Error{"it says of more variables than it has"};
  std::vector<KeptVariable> variables;
  variables.reserve(entries.size());
  std::span<const std::byte> names = reader.rest();
  for (const DirectoryEntry& entry : entries) {
    const bool has_first = entry.first != 0;
    if (entry.name_bytes > names.size() || entry.written > 1 || entry.bytes == 0 ||
        !lies_in(entry.content, entry.bytes, directory.size(), bytes) ||
        (has_first && !lies_in(entry.first, entry.bytes, directory.size(), bytes))) {
      return Error{"a variable does not lie in it"};
    }
    variables.push_back({std::string(reinterpret_cast<const char*>(names.data()), entry.name_bytes), entry.bytes,
                         entry.content, entry.first, entry.written != 0});
    names = names.subspan(entry.name_bytes);
  }
  if (!names.empty()) return Error{"bytes behind the last name"};
  return variables;
}

}  // namespace xmig::server
