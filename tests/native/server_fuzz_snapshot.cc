// The reader of a snapshot's file. The checksum would stop nearly everything, so it is put right first.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "server/records/record.h"
#include "server/snapshot/snapshot_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace xmig::server;
  std::vector<std::byte> bytes(size);
  if (size != 0) std::memcpy(bytes.data(), data, size);
  constexpr size_t kHead = 3 * sizeof(uint64_t);  // magic, length, checksum
  if (size >= kHead) {
    const std::vector<std::byte> good = serialise({});
    std::memcpy(bytes.data(), good.data(), sizeof(uint64_t));
    const uint64_t length = size, checksum = XXH3_64bits(bytes.data() + kHead, size - kHead);
    std::memcpy(bytes.data() + 8, &length, sizeof(length));
    std::memcpy(bytes.data() + 16, &checksum, sizeof(checksum));
  }
  const auto content = parse_snapshot(bytes);
  if (!content) {
    if (content.why().empty()) std::abort();
    return 0;
  }
  // What was read means the same when it is written again.
  if (serialise(*content) != bytes) std::abort();
  for (const std::span<const std::byte> stored : content->objects) {
    Record record;
    record.load_stored(stored);
  }
  return 0;
}
