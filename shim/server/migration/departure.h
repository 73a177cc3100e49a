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
#include <deque>
#include <mutex>
#include <string>
#include <variant>

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

  // From now on, is the whole shadow kept in host memory?
  struct KeepOnHost {
    bool host;
  };
  using Step = std::variant<KeepOnHost, PrepareSuspend, AbortSuspend>;

  // The thread that listens to the daemon. Who waits for a thread that copies would wait for a snapshot that is prepared, too, and that for
  // the daemon: so the executor does it.
  void request(Step step);

  // The executor's thread, while no snapshot waits for its decision: what was requested.
  void act();
  // Likewise, between two records, with an idle device: returns when the job goes on here after all. `stopped`: since
  // when execution has waited for the device.
  void hand_over(uint64_t stopped);
  void suspend(uint64_t stopped);
  void fail_suspend(const std::string& why);
  // The same with all ranks of a group, whose snapshot is the last one: it is to go where the shadow stays; it is not taken after all; it
  // was taken.
  void choose_place();
  void stay() { back_to_device(); }
  void suspend_with_the_group(uint64_t stopped);

 private:
  void make(KeepOnHost step);
  void make(PrepareSuspend step);
  void make(AbortSuspend step);
  void back_to_device();
  void rest(uint64_t bytes, uint64_t stopped);
  Result<uint64_t> leave_device();
  Result<uint64_t> has_left();

  const Services services_;
  ProcessMemory& memory_;
  Execution& execution_;
  Snapshots& snapshots_;
  ShadowWishes& wishes_;
  Relocation& relocation_;
  Interrupts& interrupts_;
  Place suspend_to_ = Place::kHost;
  std::mutex mutex_;
  std::deque<Step> steps_;  // guarded by mutex_
  std::atomic<bool> requested_{false};
};

}  // namespace xmig::server
