// A job leaves this server: it is handed over to another one, or suspended, so that its state is its shadow, in host memory or in
// files, and nobody else's (docs/decisions/0008, 0009).
//
// Most of the way of a suspension is made while the program runs (relocation.h). The last snapshot copies what has changed since,
// straight to where it stays.
//
// What lies in this folder: departure (the source's side), relocation (the shadow goes elsewhere meanwhile), incoming and arrival
// (the target's side, up to where recovery/ takes over), pace.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "server/channel/interrupts.h"
#include "server/channel/requests.h"
#include "server/execution.h"
#include "server/memory/process_memory.h"
#include "server/migration/relocation.h"
#include "server/services.h"
#include "server/snapshot/snapshots.h"
#include "server/snapshot/staging.h"

namespace xmig::server {

class Departure {
 public:
  Departure(const Services& services, ProcessMemory& memory, Execution& execution, Snapshots& snapshots, Staging& staging,
            Relocation& relocation, Interrupts& interrupts)
      : services_(services),
        memory_(memory),
        execution_(execution),
        snapshots_(snapshots),
        wishes_(staging.wishes),
        relocation_(relocation),
        interrupts_(interrupts) {}

  // The thread that listens to the daemon. From now on, is the whole shadow kept in host memory?
  void keep_on_host(bool host);
  void prepare_suspend(PrepareSuspend prepare);
  void abort_suspend();

  // The executor's thread, between two records, with an idle device: returns when the job goes on here after all. `stopped`: since
  // when execution has waited for the device.
  void hand_over(uint64_t stopped);
  void suspend(uint64_t stopped);
  void fail_suspend(const std::string& why);

 private:
  void back_to_device();
  Result<uint64_t> leave_device();

  const Services services_;
  ProcessMemory& memory_;
  Execution& execution_;
  Snapshots& snapshots_;
  ShadowWishes& wishes_;
  Relocation& relocation_;
  Interrupts& interrupts_;
  std::atomic<Place> suspend_to_{Place::kHost};
};

}  // namespace xmig::server
