// Communicators of the program, and the collectives that run in them.
//
// A communicator is made on a thread of its own, which waits for the other ranks; the record is answered when it is there. Until then,
// and while collectives are in streams, work of the device waits for others (OutsideWaits).
//
// The ranks of a communicator are snapshotted and recovered together (snapshot/group_snapshot.h). So it is counted here how far each
// communicator is, from the last snapshot on, at which all ranks were as far. A recovery makes communicators again, on their threads, from
// what the snapshot kept, or by executing the record that made them; whoever needs one that is not there yet waits for it. Where a server
// was lost while it took a snapshot with the others, the others may have taken it: what this rank made and ended before it is made by
// nobody, and how a communicator was split is in the answer that the program got.
//
// A communicator that fails (another rank is gone) is reported to the daemon. Mostly this server is lost then, too, and recovered with the
// others; the program learns of it only if the daemon says that nobody recovers it.
//
// The executor's thread, but for the threads that make communicators: each has a Making of its own, and says in it that it is done;
// and lost(), which is any thread's.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device/collectives.h"
#include "server/channel/membership.h"
#include "server/channel/meetings.h"
#include "server/cuda/handlers/addresses.h"
#include "server/cuda/handlers/outside_waits.h"
#include "server/cuda/handlers/session.h"
#include "server/cuda/handlers/streams.h"
#include "server/cuda/objects/prepared_communicators.h"

namespace xmig::server {

class Collectives {
 public:
  Collectives(const Session& session, PreparedCommunicators& prepared, Streams& streams, Addresses& addresses, OutsideWaits& outside);
  Collectives(const Collectives&) = delete;
  ~Collectives();

  CUresult on_xmCommInit(Record& record);
  CUresult on_xmCommSplit(Record& record);
  CUresult on_xmCommEnd(Record& record);
  CUresult on_xmCommGroup(Record& record);

  // Between two batches: what was made is answered, what has ended is dropped. True if there was any. A collective that can never be
  // done is the communicator's error, and if the program does not end that, the end of the job.
  bool poll();
  // Does the process depend on other ranks, or would it at a recovery from the last snapshot?
  bool grouped() const { return !communicators_.empty() || !making_.empty() || !ended_.empty(); }
  // Has it done anything with other ranks since the last snapshot? Until then it can take one alone: the others' last ones still fit.
  bool entangled() const;
  // Is a communicator being made?
  bool making() const { return !making_.empty(); }
  // How far the communicators are, since the last snapshot.
  GroupCounts counts() const;
  // As far as that, or further?
  bool reached(const GroupCounts& targets) const;
  // Before a recovery: these lack ranks for good, and are not made again.
  void forget(const std::vector<std::string>& names) { gone_.insert(names.begin(), names.end()); }
  // The same of recoveries from the snapshot that is about to be taken: other ranks have ended these. Or it is not taken after all.
  void incomplete(const std::vector<std::string>& names, uint64_t round);
  // Those of a round that a lost server was taking.
  void incomplete_as_in(uint64_t round);
  void complete_again();
  // What a recovery has found is made, on threads. Not before all is known that the program had ended meanwhile: the other ranks do
  // not make that again.
  void join_again();
  // A recovery begins at a snapshot that all ranks have taken.
  void snapshot_taken();
  // A rank goes on in another server: what these attempts have prepared takes the place of the communicators that it is in.
  void renew(std::span<const uint64_t> attempts);
  // From any thread: a communicator that has failed is not recovered.
  void lost(const std::string& name);
  // Nobody waits for another rank any more: the process ends.
  void abort_all();
  void destroy_all();

 private:
  struct One {
    std::unique_ptr<device::Communicator> real;  // none, if it could not be made again
    std::optional<Error> failure;                // why, then
    std::string name;
    device::Place place;
    uint32_t ordinal = 0;
    std::chrono::milliseconds join_time{};
    uint32_t splits = 0;      // of it, which all its ranks count alike
    bool split = false;       // since the last snapshot
    bool incomplete = false;  // it lacks ranks
    bool postponed = false;   // until join_again()
    uint64_t failed_at = 0, reported_at = 0, lost_at = 0;  // 0: not
    uint64_t collectives = 0;  // since the last snapshot
    std::map<std::pair<uint32_t, uint32_t>, uint64_t> sends;  // likewise, from one rank to another
    uint64_t sequence = 0;  // of the record that made it
    std::vector<std::byte> header;  // of that record
    StoredRecords::Kept creation;

    std::optional<Error> failed() const { return real ? real->failure() : failure; }
    std::string why() const { return failed().value_or(Error{}).text; }
  };
  struct Making;

  void failure();
  bool may_be_made(uint64_t communicator);
  One one_of(const Record& record);
  Making* begin(Record& record, uint64_t communicator);
  void take_ahead(Making& making);
  void postpone(uint64_t communicator, One one, device::Place place);
  journal::CommunicatorReply reply_of(const Record& record);
  std::optional<journal::CommunicatorReply> was_made(const Record& record);
  bool has_verdict(Making& making, uint64_t now);
  void lack(uint64_t handle, One& one);
  void run(Making& making);
  void report_joining();
  void settle(uint64_t communicator);
  void keep(uint64_t handle, One& one);
  One* usable(uint64_t communicator);
  void await_verdict(One& one);
  void add_counts(const One& one, GroupCounts& counts) const;
  void count(const journal::CollectiveOperation& operation);
  Result<std::unique_ptr<device::Communicator>> join(Making& making);
  Result<> choose_members(Making& making);
  void answer(Making& making);
  CUresult begin_group(std::span<journal::CollectiveOperation> operations);
  CUresult check(const journal::CollectiveOperation& operation, const One& one);
  bool look_for_failures();
  void look_at(uint64_t handle, One& one, uint64_t now);
  bool unfinished();

  device::Device& device_;
  const DriverTable& driver_;
  Contexts& contexts_;
  Job& job_;
  Log& log_;
  Meetings& meetings_;
  Daemon& daemon_;
  Membership& membership_;
  Objects& objects_;
  Replies& replies_;
  Current& current_;
  Execution& execution_;
  Streams& streams_;
  Addresses& addresses_;
  OutsideWaits& outside_;
  PreparedCommunicators& prepared_;

  std::map<uint64_t, One> communicators_;  // by handle
  std::vector<std::unique_ptr<device::Communicator>> leaving_;  // ended by the program, with work that is not done
  std::map<std::string, GroupCounts> ended_;  // since the last snapshot, by name: how far they were
  std::list<Making> making_;
  bool joining_ = false;  // as the daemon knows it
  std::set<std::string> gone_;  // communicators that lack ranks for good; written before any is made
  std::vector<uint64_t> incomplete_;  // as of the snapshot that is about to be taken
  uint64_t polled_at_ = 0;
  uint64_t looked_at_ = 0;  // for failures
  std::atomic<bool> failed_{false};  // a communicator says so, from a thread of its own
  std::mutex lost_mutex_;
  std::set<std::string> lost_;  // guarded by lost_mutex_
};

}  // namespace xmig::server
