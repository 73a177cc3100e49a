// Memory that outlives the server: its descriptor is held by the daemon, under a number that the server chose.
#pragma once

#include <cstdint>
#include <string>

#include "ipc/fd.h"

namespace xmig::server {

enum class HostedKind : uint8_t {
  kDevice,  // physical memory of the program's device range
  kShadow,  // where cuts keep the content of changed chunks
  kImage,   // a module image
};

struct Hosted {
  uint64_t id = 0;
  HostedKind kind = HostedKind::kDevice;
  int ordinal = 0;
  uint64_t address = 0;
  uint64_t bytes = 0;
  std::string name;
  ipc::UniqueFd fd;
};

}  // namespace xmig::server
