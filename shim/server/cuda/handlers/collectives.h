// Communicators of the program, and the collectives that run in them.
//
// A communicator is made on a thread of its own, which waits for the other ranks; the record is answered when it is there. Until then,
// and while collectives are in streams, work of the device waits for others: no snapshot begins (OutsideWaits).
//
// A process that has a communicator cannot be replayed alone: the other ranks would not do their part again. So the record that makes
// one is refused at a recovery, and with it the recovery. What was made and ended before the last snapshot is in nobody's way.
//
// The executor's thread, but for the threads that make communicators: each has a Making of its own, and says in it that it is done.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "device/collectives.h"
#include "server/channel/meetings.h"
#include "server/cuda/handlers/addresses.h"
#include "server/cuda/handlers/outside_waits.h"
#include "server/cuda/handlers/session.h"
#include "server/cuda/handlers/streams.h"

namespace xmig::server {

class Collectives {
 public:
  Collectives(const Session& session, Streams& streams, Addresses& addresses, OutsideWaits& outside);
  Collectives(const Collectives&) = delete;
  ~Collectives();

  CUresult on_xmCommInit(Record& record);
  CUresult on_xmCommSplit(Record& record);
  CUresult on_xmCommEnd(Record& record);
  CUresult on_xmCommGroup(Record& record);

  // Between two batches: what was made is answered, what has ended is dropped. True if there was any. A collective that can never be
  // done is the communicator's error, and if the program does not end that, the end of the job.
  bool poll();
  // Does the process have a communicator, or is it about to?
  bool any() const { return !communicators_.empty() || !making_.empty(); }
  // Nobody waits for another rank any more: the process ends.
  void abort_all();
  void destroy_all();

 private:
  struct One {
    std::unique_ptr<device::Communicator> real;
    device::Place place;
    uint32_t ordinal = 0;
    std::chrono::milliseconds join_time{};
    uint64_t splits = 0;     // of it, which all its ranks count alike
    uint64_t failed_at = 0;  // 0: it has not
    StoredRecords::Kept creation;
  };
  struct Making;

  Making* begin(Record& record, uint64_t communicator);
  void run(Making& making);
  Result<std::unique_ptr<device::Communicator>> join(Making& making);
  Result<> choose_members(Making& making);
  void answer(Making& making);
  CUresult refuse(Record& record);
  CUresult begin_group(std::span<journal::CollectiveOperation> operations);
  CUresult check(const journal::CollectiveOperation& operation, const One& one);
  bool look_for_failures();
  bool unfinished();

  device::Device& device_;
  const DriverTable& driver_;
  Contexts& contexts_;
  Job& job_;
  Log& log_;
  Meetings& meetings_;
  Objects& objects_;
  Replies& replies_;
  Current& current_;
  Execution& execution_;
  Streams& streams_;
  Addresses& addresses_;
  OutsideWaits& outside_;

  std::map<uint64_t, One> communicators_;  // by handle
  std::vector<std::unique_ptr<device::Communicator>> leaving_;  // ended by the program, with work that is not done
  std::list<Making> making_;
  uint64_t polled_at_ = 0;
  uint64_t looked_at_ = 0;  // for failures
  std::atomic<bool> failed_{false};  // a communicator says so, from a thread of its own
};

}  // namespace xmig::server
