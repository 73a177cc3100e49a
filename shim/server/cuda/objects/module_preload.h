// Preload, of modules and kernels. What is loaded here and never taken is unloaded again.
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
#include "server/cuda/objects/objects.h"
#include "server/snapshot/snapshot_file.h"
#include "server/snapshot/preload.h"

namespace xmig::server {

class ModulePreload final : public Preload {
 public:
  ModulePreload(device::Device& device, Contexts& contexts, Log& log) : device_(device), contexts_(contexts), log_(log) {}
  ModulePreload(const ModulePreload&) = delete;

  void add(const Hosted& image) override;
  void drop(uint64_t id) override;
  void want(const SnapshotContent& content) override;
  bool pending() const override { return !work_.empty(); }
  void step(uint64_t most) override;  // a module, or a kernel
  PreloadReport report() const override { return report_; }
  void clear() override;

  // The module with this number, out of this image, on this device, if it has been loaded; from now on it is the caller's.
  std::optional<Module> take(uint32_t index, uint32_t ordinal, const Hosted& image);

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
