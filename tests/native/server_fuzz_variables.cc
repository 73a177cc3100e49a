// The reader of what says where a module's variables are kept. Its checksum would stop nearly everything, so it is put right first.
#include <xxhash.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "server/cuda/objects/variable_directory.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace xmig::server;
  std::vector<std::byte> bytes(size);
  if (size != 0) std::memcpy(bytes.data(), data, size);
  constexpr size_t kHead = 2 * sizeof(uint64_t);  // magic, checksum
  uint64_t place = size;
  if (size >= kHead + 2 * sizeof(uint64_t)) {
    const std::vector<std::byte> good = serialise_variables({}, 64);
    std::memcpy(bytes.data(), good.data(), sizeof(uint64_t));
    std::memcpy(&place, bytes.data() + kHead, sizeof(place));
    std::memcpy(bytes.data() + kHead + sizeof(place), &size, sizeof(size));
    const uint64_t checksum = XXH3_64bits(bytes.data() + kHead, size - kHead);
    std::memcpy(bytes.data() + sizeof(uint64_t), &checksum, sizeof(checksum));
  }
  const auto variables = parse_variables(bytes, place);
  if (!variables) {
    if (variables.why().empty()) std::abort();
    return 0;
  }
  for (const KeptVariable& variable : *variables) {
    if (variable.bytes > place || variable.content > place - variable.bytes || variable.content < size) std::abort();
    if (variable.first != 0 && (variable.first > place - variable.bytes || variable.first < size)) std::abort();
  }
  // What was read means the same when it is written again.
  if (serialise_variables(*variables, place) != bytes) std::abort();
  return 0;
}
