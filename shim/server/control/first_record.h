// The journal of a process whose devices are not open yet, and the moment in which they have to be: when there is a record, or when
// the daemon requests what only open devices do. Natively, too, a process takes device memory when it makes its first context.
//
// The program begins with xmOpen, which it waits for. Where the devices cannot be opened that is what it gets, as it does natively,
// and it may try again. Who takes the journal over finds refused requests in it, and goes on after them.
#pragma once

#include <atomic>
#include <cstdint>

#include "journal/layout.h"
#include "server/channel/job.h"

namespace xmig::server {

class FirstRecord {
 public:
  explicit FirstRecord(Job& job) : job_(job) {}

  // Until the devices have to be open. False: give_up() was called. One thread waits, and refuses.
  bool wait();
  // A bit for each device that the record which ended the wait is about; 0: there is no record.
  uint64_t devices();
  // Everybody who waited for this device when wait() returned gets this error, but nobody behind who waits for another one; whoever came
  // later has not been tried for. False: there is
  // a record that does more than wait.
  bool refuse(int error);

  // From any thread.
  void request() { wake(kRequested); }
  void give_up() { wake(kGivenUp); }

 private:
  enum Why : uint32_t { kRequested = 1, kGivenUp = 2 };

  // The first record that was not refused, or whatever else is in its place. Null: there is nothing.
  journal::RecordHeader* first();
  void wake(Why why);

  Job& job_;
  uint64_t position_ = 0;  // what is before it was refused
  uint64_t seen_ = 0;      // the tail when wait() returned
  std::atomic<uint32_t> wanted_{0};
};

}  // namespace xmig::server
