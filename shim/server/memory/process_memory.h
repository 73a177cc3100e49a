// The memory of the process, by what it is for.
//
// The executor's thread changes all of it. Others, too, look at some of it, and make memory for the shadow: so `mutex` is held
// by whoever looks at or changes `hosting`, `shadow`, `images` or `copy_log` (whose space is the shadow's), except the executor's
// thread where it only looks. `live` is that thread's alone.
//
// What lies in this folder: physical (memory with a descriptor that the daemon holds), and by what it is for hosting, shadow,
// copy_log, images and live_set; granules, staging_copy, intake and scratch (copies of it); adoption (of what another server has made).
#pragma once

#include <mutex>

#include "server/memory/copy_log.h"
#include "server/memory/hosting.h"
#include "server/memory/images.h"
#include "server/memory/live_set.h"
#include "server/memory/physical.h"
#include "server/memory/shadow.h"

namespace xmig::server {

struct ProcessMemory {
  explicit ProcessMemory(Physical& physical)
      : physical(physical), hosting(physical), shadow(physical), copy_log(shadow), images(physical) {}
  ProcessMemory(const ProcessMemory&) = delete;

  Physical& physical;
  Hosting hosting;   // behind the program's device addresses
  Shadow shadow;     // where snapshots keep content
  CopyLog copy_log;  // what copies brought since the last snapshot
  Images images;     // of modules and graphs
  std::mutex mutex;
  LiveSet live;      // what of the program's memory is in use
};

}  // namespace xmig::server
