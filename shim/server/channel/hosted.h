// Memory that outlives the server: its descriptor is held by the daemon, under a number that the server chose.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "ipc/fd.h"
#include "journal/layout.h"

namespace xmig::server {

enum class HostedKind : uint8_t {
  kDevice,  // physical memory of the program's device range
  kShadow,  // where snapshots keep the content of changed chunks
  kImage,   // a module image
};

// Where a shadow is. What is not on a device can stay without a server.
enum class Place : uint8_t { kDevice, kHost, kFile };

inline constexpr uint64_t kPage = 4096;

// How much of a shadow without an address is in one descriptor: one thread at a time writes to it.
inline constexpr uint64_t kPlainBytes = 32 * journal::kGranule;
// Names of what is in host memory: with an address that the device reaches, or with none here.
inline constexpr const char* kLockedName = "host";
inline constexpr const char* kPlainName = "memfd";

// A chunk of device memory whose content is looked for: its address, and the hash of what it is to contain.
using ChunkHash = std::pair<uint64_t, uint64_t>;
inline constexpr size_t kMostChunks = 512;   // that one message requests
inline constexpr size_t kChunksAtOnce = 16;  // whose content comes with one

struct Hosted {
  uint64_t id = 0;
  HostedKind kind = HostedKind::kDevice;
  int ordinal = 0;
  uint64_t address = 0;
  uint64_t bytes = 0;
  std::string name;
  ipc::UniqueFd fd;
  bool mapped = false;   // it is plain, and at its address all the same, for the processor only
  bool sealed = false;   // a checkpoint has it, too: it is read, and never written
  bool foreign = false;  // shadow of the device that the job was on before: it goes with this server's first own snapshot

  // The daemon gives it back by name: one of these, or `file:` and the file's name.
  Place place() const {
    return name.empty() ? Place::kDevice : name == kLockedName || name == kPlainName ? Place::kHost : Place::kFile;
  }
  // Has it no address that the device reaches? Then it is read and written by the processor (StagingCopy).
  bool plain() const { return name == kPlainName || place() == Place::kFile; }
};

}  // namespace xmig::server
