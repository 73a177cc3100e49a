#include "server/snapshot/snapshot_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <cerrno>
#include <cstring>
#include <type_traits>

#include "ipc/whole.h"
#include "server/records/reader.h"

namespace xmig::server {
namespace {

constexpr uint64_t kSnapshotMagic = 0x3254554347494d58;  // "XMIGCUT2"
constexpr uint64_t kMaxSnapshotBytes = 8ull << 30;

struct SnapshotHeader {
  uint64_t magic;
  uint64_t bytes;     // of the whole file's content
  uint64_t checksum;  // XXH3 of everything after this field
  uint64_t number, position, sequence;
  uint64_t memory, live, chunks, images, events, objects, variables;  // how many
  std::array<Failure, journal::kMaxDevices> failures;
};
constexpr size_t kChecksummedFrom = offsetof(SnapshotHeader, number);

class Writer {
 public:
  template <typename T>
  void put(std::span<const T> values) {
    static_assert(std::is_trivially_copyable_v<T>);
    const auto bytes = std::as_bytes(values);
    data_.insert(data_.end(), bytes.begin(), bytes.end());
  }
  template <typename T>
  void put(const std::vector<T>& values) {
    put(std::span<const T>(values));
  }
  std::vector<std::byte>& data() { return data_; }

 private:
  std::vector<std::byte> data_;
};

// Before a variable's name.
using AboutVariable = std::array<uint64_t, 3>;

}  // namespace

std::vector<std::byte> serialise(const SnapshotContent& content) {
  SnapshotHeader header{};
  header.magic = kSnapshotMagic;
  header.number = content.number;
  header.position = content.position;
  header.sequence = content.sequence;
  header.memory = content.memory.size();
  header.live = content.live.size();
  header.chunks = content.chunks.size();
  header.images = content.images.size();
  header.events = content.events.size();
  header.objects = content.objects.size();
  header.variables = content.variables.size();
  header.failures = content.failures;
  Writer writer;
  writer.data().reserve(serialised_bytes(content));
  writer.put(std::span<const SnapshotHeader>(&header, 1));
  writer.put(content.memory);
  writer.put(content.live);
  writer.put(content.chunks);
  writer.put(content.images);
  writer.put(content.events);
  writer.put(content.objects.bytes());
  for (const Variable& variable : content.variables) {
    const AboutVariable about = {variable.module, variable.address, variable.name.size()};
    writer.put(std::span<const uint64_t>(about));
    writer.put(std::span<const char>(variable.name));
  }
  std::vector<std::byte> data = std::move(writer.data());
  header.bytes = data.size();
  header.checksum = XXH3_64bits(data.data() + kChecksummedFrom, data.size() - kChecksummedFrom);
  std::memcpy(data.data(), &header, sizeof(header));
  return data;
}

uint64_t serialised_bytes(const SnapshotContent& content) {
  uint64_t bytes = sizeof(SnapshotHeader) + sizeof(Extent) * content.memory.size() + sizeof(LiveRange) * content.live.size() +
                   sizeof(ChunkState) * content.chunks.size() + sizeof(Images::State) * content.images.size() +
                   sizeof(RecordedEvent) * content.events.size() + content.objects.bytes().size();
  for (const Variable& variable : content.variables) bytes += sizeof(AboutVariable) + variable.name.size();
  return bytes;
}

Result<SnapshotContent> parse_snapshot(std::span<const std::byte> bytes) {
  const auto bad = [](const char* text) { return Error{text}; };
  SnapshotHeader header;
  Reader reader(bytes);
  if (!reader.get(header) || header.magic != kSnapshotMagic) return bad("not a snapshot");
  if (header.bytes != bytes.size()) return bad("the snapshot is cut off");
  if (header.checksum != XXH3_64bits(bytes.data() + kChecksummedFrom, bytes.size() - kChecksummedFrom)) {
    return bad("the snapshot's checksum is wrong");
  }
  SnapshotContent content;
  content.number = header.number;
  content.position = header.position;
  content.sequence = header.sequence;
  content.failures = header.failures;
  if (!reader.get(content.memory, header.memory) || !reader.get(content.live, header.live) ||
      !reader.get(content.chunks, header.chunks) || !reader.get(content.images, header.images) ||
      !reader.get(content.events, header.events)) {
    return bad("the snapshot's parts are longer than the whole");
  }
  auto objects = RecordList::take(header.objects, reader.rest());
  if (!objects) return bad("an object record is cut off");
  content.objects = std::move(*objects);
  for (uint64_t i = 0; i < header.variables; ++i) {
    AboutVariable about;
    std::vector<char> name;
    Variable variable;
    if (!reader.get(about) || !reader.get(name, about[2])) return bad("a variable is cut off");
    if (about[0] > UINT32_MAX) return bad("a variable's module has no such number");
    variable.module = static_cast<uint32_t>(about[0]);
    variable.address = about[1];
    variable.name.assign(name.begin(), name.end());
    content.variables.push_back(std::move(variable));
  }
  if (!reader.empty()) return bad("bytes behind the last variable");
  return content;
}

bool reserve_snapshot_file(int fd, uint64_t bytes) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) return false;
  if (static_cast<uint64_t>(status.st_size) > bytes && ::ftruncate(fd, static_cast<off_t>(bytes)) != 0) return false;
  constexpr uint64_t kPage = 4096, kBlock = 512;
  const uint64_t all = (bytes + kPage - 1) / kPage * kPage;
  if (static_cast<uint64_t>(status.st_size) >= bytes && static_cast<uint64_t>(status.st_blocks) * kBlock >= all) return true;
  int result;
  do {
    result = ::fallocate(fd, 0, 0, static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  return result == 0;
}

Result<SnapshotContent> read_snapshot_file(int fd) {
  struct stat status {};
  if (::fstat(fd, &status) != 0 || status.st_size < 0 || static_cast<uint64_t>(status.st_size) > kMaxSnapshotBytes) {
    return Error{"the snapshot's file cannot be read, or is too long"};
  }
  std::vector<std::byte> bytes(static_cast<size_t>(status.st_size));
  if (!ipc::read_all(fd, bytes)) {
    return Error{std::string("the snapshot's file cannot be read: ") + std::strerror(errno)};
  }
  return parse_snapshot(bytes);
}

std::optional<SnapshotContent> newest_of(std::span<const ipc::UniqueFd> files) {
  std::optional<SnapshotContent> newest;
  for (const ipc::UniqueFd& fd : files) {
    Result<SnapshotContent> content = read_snapshot_file(fd.get());
    if (content && (!newest || content->number > newest->number)) newest = std::move(*content);
  }
  return newest;
}

}  // namespace xmig::server
