// Communicators that are made before they are needed, with the other ranks' servers that do the same: by a standby, so that a recovery
// does not have to make them; and by servers that have a process, when one of them is about to move (docs/decisions/0046).
//
// One thread makes them, in the order in which the daemon wants them, which is the same for all ranks: two libraries that each wait for
// the other's first operation would wait for ever. Each is an attempt, with a number of the daemon's; only the daemon knows whether all ranks
// have succeeded, so none is used that it has not named.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "common/result.h"
#include "device/collectives.h"
#include "device/device.h"
#include "server/channel/daemon.h"
#include "server/channel/meetings.h"
#include "server/contexts.h"
#include "server/snapshot/snapshot_file.h"

namespace xmig::server {

class PreparedCommunicators {
 public:
  PreparedCommunicators(device::Device& device, Contexts& contexts, Meetings& meetings, Daemon& daemon, Log& log)
      : device_(device), contexts_(contexts), meetings_(meetings), daemon_(daemon), log_(log) {}
  PreparedCommunicators(const PreparedCommunicators&) = delete;
  ~PreparedCommunicators();

  // The control thread. The communicator with this name, as the snapshot has it.
  void prepare(uint64_t attempt, const std::string& name, const SnapshotContent& content);
  void forget(uint64_t attempt);
  // Any thread. The other ranks use the same: one that has not made all of these ends, for with any other communicator it would wait for
  // them for ever. Others may be wanted already for what comes next: they stay.
  void use(std::span<const uint64_t> attempts);
  // The control thread. Of all that use() has not named: whoever wanted it does not any more, or is no more.
  void forget_all();
  // Any thread: what use() named and nobody has taken.
  void drop_unused();
  // Any thread: what use() named, once. `failed`: as of device::Collectives::join().
  std::unique_ptr<device::Communicator> take(const std::string& name, uint32_t rank, std::function<void()> failed);

 private:
  // Who hears of a failure changes when the communicator is taken.
  struct Failure {
    std::mutex mutex;
    bool happened = false;       // guarded by mutex
    std::function<void()> hears;  // guarded by mutex
  };
  struct Rank {
    device::Place place;
    uint32_t ordinal = 0;
    std::chrono::milliseconds join_time{};
    std::shared_ptr<Failure> failure = std::make_shared<Failure>();
    std::unique_ptr<device::Communicator> real;
  };
  // All ranks of a communicator that are this process's.
  struct Attempt {
    uint64_t number = 0;
    std::string name, meeting;
    std::vector<Rank> ranks;
  };

  void run();
  Result<> make(Attempt& attempt);
  Result<> join(Attempt& attempt, Rank& rank);
  Result<> warm(Attempt& attempt);
  bool given_up(uint64_t attempt);
  uint64_t free_bytes(const Attempt& attempt);

  device::Device& device_;
  Contexts& contexts_;
  Meetings& meetings_;
  Daemon& daemon_;
  Log& log_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Attempt> wanted_;            // guarded by mutex_, as is all that follows
  std::map<uint64_t, Attempt> ready_;     // by number
  std::map<std::string, Attempt> usable_;  // by name
  uint64_t making_ = 0;                   // the one that is being made
  std::atomic<bool> forgotten_{false};    // it is not wanted any more; Meetings asks without the lock
  bool closed_ = false;
  bool running_ = false;
  std::thread thread_;
};

}  // namespace xmig::server
