// The daemon's messages: the first byte says how many descriptors come along.
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "server/channel/requests.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace xmig::server;
  if (size == 0) return 0;
  std::vector<xmig::ipc::UniqueFd> fds;
  for (int i = 0; i < data[0] % 7; ++i) fds.emplace_back(::dup(STDERR_FILENO));
  const auto* const text = reinterpret_cast<const std::byte*>(data + 1);
  const auto request = parse_request({text, size - 1}, std::move(fds));
  if (!request && request.why().empty()) std::abort();
  return 0;
}
