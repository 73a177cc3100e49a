#include "server/variable_directory.h"

#include <xxhash.h>

#include <cstring>

#include "server/loading.h"
#include "server/reader.h"

namespace xmig::server {
namespace {

constexpr uint64_t kMagic = 0x3153524156474d58;  // "XMGVARS1"
constexpr uint64_t kAlignment = 16;

struct Header {
  uint64_t magic;
  uint64_t checksum;  // XXH3 of the directory behind this field
  uint64_t bytes;     // of the whole place
  uint64_t directory, count;
};
constexpr size_t kChecksummedFrom = offsetof(Header, bytes);

struct Entry {
  uint64_t bytes, content, first;
  uint32_t name_bytes, written;
};

uint64_t directory_bytes(const std::vector<KeptVariable>& variables) {
  uint64_t bytes = sizeof(Header) + variables.size() * sizeof(Entry);
  for (const KeptVariable& variable : variables) bytes += variable.name.size();
  return bytes;
}

// Does it lie behind the directory and before the end?
bool fits(uint64_t at, uint64_t length, uint64_t directory, uint64_t bytes) {
  return at >= directory && at <= bytes && length <= bytes - at;
}

}  // namespace

uint64_t place_variables(std::vector<KeptVariable>& variables) {
  uint64_t end = directory_bytes(variables);
  if (end > kMaxVariableDirectory) return 0;
  const auto take = [&](uint64_t length, uint64_t& at) {
    at = (end + kAlignment - 1) / kAlignment * kAlignment;
    return !__builtin_add_overflow(at, length, &end) && end <= UINT64_MAX - kAlignment;
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
  Header header{kMagic, 0, bytes, directory_bytes(variables), variables.size()};
  append(out, header);
  for (const KeptVariable& variable : variables) {
    append(out, Entry{variable.bytes, variable.content, variable.first, static_cast<uint32_t>(variable.name.size()),
                      variable.written});
  }
  for (const KeptVariable& variable : variables) {
    const auto* name = reinterpret_cast<const std::byte*>(variable.name.data());
    out.insert(out.end(), name, name + variable.name.size());
  }
  header.checksum = XXH3_64bits(out.data() + kChecksummedFrom, out.size() - kChecksummedFrom);
  std::memcpy(out.data(), &header, sizeof(header));
  return out;
}

uint64_t variable_directory_bytes(std::span<const std::byte> begin, uint64_t bytes) {
  Header header;
  Reader reader(begin);
  const bool sound = reader.get(header) && header.magic == kMagic && header.bytes == bytes &&
                     header.directory >= sizeof(header) && header.directory <= std::min(bytes, kMaxVariableDirectory);
  return sound ? header.directory : 0;
}

std::optional<std::vector<KeptVariable>> parse_variables(std::span<const std::byte> directory, uint64_t bytes,
                                                         std::string& why) {
  const uint64_t length = variable_directory_bytes(directory, bytes);
  if (length == 0 || length != directory.size()) {
    why = "it does not begin with what xMIG has written there";
    return std::nullopt;
  }
  Header header;
  Reader reader(directory);
  reader.get(header);
  if (header.checksum != XXH3_64bits(directory.data() + kChecksummedFrom, directory.size() - kChecksummedFrom)) {
    why = "its checksum is wrong";
    return std::nullopt;
  }
  std::vector<Entry> entries;
  if (!reader.get(entries, header.count)) {
    why = "it says of more variables than it has";
    return std::nullopt;
  }
  std::vector<KeptVariable> variables;
  variables.reserve(entries.size());
  std::span<const std::byte> names = reader.rest();
  for (const Entry& entry : entries) {
    const bool has_first = entry.first != 0;
    if (entry.name_bytes > names.size() || entry.written > 1 || entry.bytes == 0 ||
        !fits(entry.content, entry.bytes, directory.size(), bytes) ||
        (has_first && !fits(entry.first, entry.bytes, directory.size(), bytes))) {
      why = "a variable does not lie in it";
      return std::nullopt;
    }
    variables.push_back({std::string(reinterpret_cast<const char*>(names.data()), entry.name_bytes), entry.bytes,
                         entry.content, entry.first, entry.written != 0});
    names = names.subspan(entry.name_bytes);
  }
  if (!names.empty()) {
    why = "bytes behind the last name";
    return std::nullopt;
  }
  return variables;
}

}  // namespace xmig::server
