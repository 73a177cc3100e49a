// What addresses in a record mean: may its work touch them, and where does the device have them? The executor's thread alone.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "server/channel/job.h"
#include "server/cuda/handlers/intake.h"
#include "server/cuda/handlers/variables.h"
#include "server/memory/live_set.h"
#include "server/snapshot/schedule.h"

namespace xmig::server {

class Addresses {
 public:
  Addresses(const LiveSet& live, const Job& job, const Variables& variables, Schedule& schedule, Intake& intake)
      : live_(live), job_(job), variables_(variables), schedule_(schedule), intake_(intake) {}

  bool live(uint64_t address, uint64_t bytes) const { return live_.contains(address, bytes); }
  // May a record's work touch this? Device memory that is allocated; the program's page-locked memory too, which a
  // replay would write once more than the program expects, so that a snapshot follows.
  bool reachable(uint64_t address, uint64_t bytes) {
    if (live(address, bytes)) return true;
    if (!job_.is_pinned(address, bytes)) return false;
    uses_pinned();
    return true;
  }
  // Work of the device reads or writes page-locked memory by itself.
  void uses_pinned() {
    schedule_.set_snapshot_now(true);
    intake_.may_write_all();
  }
  // What the program knows at an address of its own memory may be a variable, which the driver has placed somewhere else.
  CUdeviceptr where_the_device_has(uint64_t address) const { return variables_.at(address); }

 private:
  const LiveSet& live_;
  const Job& job_;
  const Variables& variables_;
  Schedule& schedule_;
  Intake& intake_;
};

}  // namespace xmig::server
