// Modules and kernels that are loaded before they are needed: by a standby, for the process that it may get, and by the
// target of a move. A recovery finds them instead of loading them (docs/decisions/0010).
//
// The images come from the daemon, what is to be loaded from a snapshot. Nothing of the job is touched; what is loaded here
// and never taken is unloaded again. All calls are made by one thread at a time: the control thread's as long as the
// server waits, the executor's afterwards.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <deque>
#include <map>
#include <optional>

#include "device/device.h"
#include "journal/mapping.h"
#include "server/channel/daemon.h"
#include "server/channel/hosted.h"
#include "server/contexts.h"
#include "server/objects/objects.h"
#include "server/snapshot/snapshot_file.h"

namespace xmig::server {

class Preload {
 public:
  // What a standby may take of the device for code; the rest is loaded by the recovery.
  static constexpr uint64_t kMostOfStandby = 256ull << 20;
  // A target gets the job: what it does not load before, it loads while the program stands still.
  static constexpr uint64_t kMostOfTarget = ~0ull;

  Preload(device::Device& device, Contexts& contexts, Log& log) : device_(device), contexts_(contexts), log_(log) {}
  Preload(const Preload&) = delete;

  // An image that the process has; its descriptor stays the caller's.
  void add(const Hosted& image);
  // It has it no longer.
  void drop(uint64_t id);
  // Load what this snapshot has, as far as the images are here; unload what it has not.
  void want(const SnapshotContent& content);
  // Is there something left to do?
  bool pending() const { return !work_.empty(); }
  // One piece of it, a module or a kernel; or nothing, if more than `most` bytes of the device are taken.
  void step(uint64_t most);

  PreloadReport report() const { return report_; }

  // The module with this number, out of this image, on this device, if it has been loaded; from now on it is the caller's.
  std::optional<Module> take(uint32_t index, uint32_t ordinal, const Hosted& image);
  // Nothing more will be taken.
  void clear();

 private:
  // A file's piece that cannot be mistaken for another: an image's bytes do not change once it is complete.
  struct Identity {
    dev_t device = 0;
    ino_t inode = 0;
    uint64_t offset = 0, bytes = 0;
    bool operator==(const Identity&) const = default;
  };
  struct Image {
    uint64_t id = 0;
    Identity identity;
    journal::Mapping mapping;
    size_t skipped = 0;  // bytes of the mapping before the image
  };
  struct Entry {
    uint64_t image = 0;
    uint32_t ordinal = 0;
    Identity identity;
    Module module;  // real: null until it is loaded
  };
  struct Work {
    uint32_t module;
    std::optional<uint32_t> kernel;
  };

  static std::optional<Identity> identify(const Hosted& image);
  void load(Entry& entry);
  void unload(const Entry& entry);

  device::Device& device_;
  Contexts& contexts_;
  Log& log_;
  std::map<uint64_t, Image> images_;   // by number
  std::map<uint32_t, Entry> modules_;  // by number
  std::deque<Work> work_;
  PreloadReport report_;
};

}  // namespace xmig::server
