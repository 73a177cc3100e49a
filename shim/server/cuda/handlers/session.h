// What the executor gives to the handlers of records. Each family (handlers.h) takes of it what it needs, by reference: its
// constructor says what that is.
//
// Handlers run on the executor's thread. What here other threads touch, too, says so itself: memory (ProcessMemory::mutex), replies,
// waits, progress.
#pragma once

#include "device/device.h"
#include "ops.h"
#include "server/cuda/objects/objects.h"
#include "server/execution.h"
#include "server/executor/current.h"
#include "server/executor/program_errors.h"
#include "server/executor/progress.h"
#include "server/executor/replies.h"
#include "server/executor/waits.h"
#include "server/executor/working.h"
#include "server/memory/granules.h"
#include "server/memory/process_memory.h"
#include "server/services.h"
#include "server/snapshot/schedule.h"

namespace xmig::server {

struct Session {
  const Services& services;
  device::Device& device;
  ProcessMemory& memory;
  Granules& granules;
  Objects& objects;
  Replies& replies;
  Waits& waits;
  Progress& progress;
  Working& working;
  Current& current;
  ProgramErrors& errors;
  Schedule& schedule;
  Execution& execution;  // to take a snapshot
};

}  // namespace xmig::server
