// What recovery and migration may ask of the executor: to stand still, and to make the program's objects again. The executor is
// one; all calls are on its thread.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "common/result.h"
#include "server/channel/requests.h"
#include "server/snapshot/snapshot_file.h"

namespace xmig::server {

// Of a server that is lost while it takes a snapshot, with its device's memory.
inline constexpr const char* kStateIsGone = "its device was lost with its memory while a snapshot was being taken, whose state that was";

class Execution {
 public:
  virtual ~Execution() = default;

  // The start of the next record. Everything before it was executed.
  virtual uint64_t position() const = 0;
  // From any thread: there is something to look at between two records.
  virtual void wake() = 0;
  // Is it to end?
  virtual bool stopping() const = 0;
  // Does it execute what a lost server had executed already?
  virtual bool replaying() const = 0;

  // The device finishes what it has; the journal says how far it is.
  virtual void come_to_rest() = 0;
  // Of this position. `stopped`: since when execution has waited for the device; 0: it has not.
  virtual Result<> take_snapshot(const char* reason, uint64_t stopped = 0) = 0;
  // The one that a lost server was taking with the other ranks of its group.
  virtual Result<> take_snapshot_of_round(uint64_t round) = 0;
  // Execute nothing until unpause(). The daemon gets the reason, and so does one that comes back.
  virtual void park(const std::function<void()>& tell) = 0;
  // Nobody else has the job after all.
  virtual void go_on() = 0;

  // A recovery. The job is this server's; it begins at a snapshot, up to which the journal's state is the snapshot's. `executed`: up to where
  // the server before it was.
  virtual void entered() = 0;
  virtual void start_at(const SnapshotContent& content, uint64_t executed) = 0;
  // Memory is there, but not yet its content.
  virtual Result<> make_objects(const SnapshotContent& content) = 0;
  // Its content is, too: variables that the driver has placed become what it says.
  virtual Result<> restore_variables() = 0;
  // Of the records up to this position only what is this process's own: the lost server's device work was done.
  virtual Result<> execute_objects(uint64_t until) = 0;
  // It is known which communicators the process is in: they are made, beside what follows.
  virtual void join_again() = 0;
  virtual void begin_replay(uint64_t executed, std::optional<Delivery> deliver, std::optional<Careful> careful) = 0;
};

}  // namespace xmig::server
