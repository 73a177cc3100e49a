// What every part of a server works with. The server makes them before it has a job, and they outlive all that belongs to one.
#pragma once

#include "device/runtime.h"
#include "server/channel/daemon.h"
#include "server/channel/job.h"
#include "server/channel/membership.h"
#include "server/channel/meetings.h"
#include "server/channel/replica_sources.h"
#include "server/channel/standby_memory.h"
#include "server/contexts.h"
#include "server/faults/faults.h"
#include "server/faults/injector.h"
#include "server/profiling/profiling.h"
#include "server/sharing/sharing.h"

namespace xmig::server {

struct Services {
  device::Runtime& device;
  Contexts& contexts;
  Daemon& daemon;
  Log& log;
  Faults& faults;
  Injector& injector;
  Job& job;
  Meetings& meetings;
  Membership& membership;
  ReplicaSources& replica_sources;
  StandbyMemory& standby_memory;
  Profiling& profiling;
  Sharing& sharing;
};

}  // namespace xmig::server
