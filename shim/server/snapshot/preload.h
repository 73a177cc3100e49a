// Code that is loaded before it is needed: by a standby, for the process that it may get, and by the target of a move. A recovery
// finds it instead of loading it (docs/decisions/0010). What code is, and how it is loaded, is a vendor's.
//
// The images come from the daemon, what is to be loaded from a snapshot. Nothing of the job is touched. All calls are made by one thread
// at a time: the control thread's as long as the server waits, the executor's afterwards.
#pragma once

#include <cstdint>

#include "server/channel/daemon.h"
#include "server/channel/hosted.h"
#include "server/snapshot/snapshot_file.h"

namespace xmig::server {

class Preload {
 public:
  // What a standby may take of the device for code; the rest is loaded by the recovery.
  static constexpr uint64_t kMostOfStandby = 256ull << 20;
  // A target gets the job: what it does not load before, it loads while the program stands still.
  static constexpr uint64_t kMostOfTarget = ~0ull;

  virtual ~Preload() = default;

  // An image that the process has; its descriptor stays the caller's.
  virtual void add(const Hosted& image) = 0;
  // It has it no longer.
  virtual void drop(uint64_t id) = 0;
  // Load what this snapshot has, as far as the images are here; unload what it has not.
  virtual void want(const SnapshotContent& content) = 0;
  // Is there something left to do?
  virtual bool pending() const = 0;
  // One piece of it, or nothing, if more than `most` bytes of the device are taken.
  virtual void step(uint64_t most) = 0;
  virtual PreloadReport report() const = 0;
  // Nothing more will be taken.
  virtual void clear() = 0;
};

}  // namespace xmig::server
