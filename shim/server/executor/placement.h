// On which processor the executor wakes.
//
// To wake a thread on a processor that rests takes long: the other processor has to be interrupted and to come out of its
// rest, in a virtual machine through its host. So the executor sleeps on the processor of the thread that will probably
// ring: there it is woken by a switch of threads. Both are on one processor then, which is right as long as one of them
// waits for the other; where the program goes on instead, the executor moves away. It does so only where waking it elsewhere
// takes long, which is measured: now and then it sleeps anywhere.
//
// Invariants:
//   The executor's thread is bound to one processor only while it sleeps, and while it executes what it is woken for there.
//   It makes no thread so, which would inherit that.
//   Before and after, it may use what it could use before: what its thread, its process or its cpuset is given meanwhile is
//   kept.
//   A second thread, the usher, never runs on that processor. It binds the executor when that sleeps, which therefore never
//   has to run there first, beside a program that computes. And it brings the executor to its own processor: when that asks
//   for it, and when who rang is somewhere else or did not get it to run. So nothing depends on the one processor.
//   The processor's number is the program's to write: it is one of those that this thread may use, or none.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>

#include "journal/layout.h"

namespace xmig::server {

class Placement {
 public:
  Placement() = default;
  ~Placement() { close(); }
  Placement(const Placement&) = delete;

  // The executor's thread. Before it sleeps, instead of setting header.server_sleeping: `processor` as in
  // journal::ThreadSlot, of the thread that will probably ring.
  void settle(journal::JournalHeader& header, uint32_t processor);
  // After that, or after any other sleep. `rung`: not because its time was up.
  void woke(bool rung);
  // It was woken anywhere, after a rest. In ns; `rung_at` is the program's to write.
  void took(uint64_t rung_at, uint64_t heard_at);
  // Is it where who rang is, since it was woken there, and bound to that?
  bool bound() const { return bound_; }
  // What JournalHeader::server_sleeping has to say if it sleeps there again.
  uint32_t where() const { return journal::kAsleepOn + static_cast<uint32_t>(processor_); }
  void free();
  // Does it run on this processor (as in journal::ThreadSlot), from which the usher can fetch it?
  bool at(uint32_t processor) const { return usher_.joinable() && static_cast<uint32_t>(::sched_getcpu()) + 1 == processor; }
  // It has something to do that would keep who rang from its own work: the usher is to fetch it.
  void leave();

  // From any thread. It can be woken anywhere now, for what cannot wait.
  void release();
  // The header goes, and nobody sleeps or settles.
  void close();

 private:
  bool may_settle(int processor, uint32_t late);
  bool learn();
  void open(journal::JournalHeader& header);
  void call_usher();
  void run_usher(uint32_t seen);
  void bind();
  void fetch();
  void set_free();
  void loosen();

  journal::JournalHeader* header_ = nullptr;
  pid_t executor_ = 0, usher_id_ = 0;
  std::thread usher_;
  std::atomic<bool> stopping_{false};

  // The executor's own.
  bool bound_ = false;
  uint32_t late_ = 0;       // what header.late was
  uint32_t settled_for_ = 0;  // sleeps in a row, until somebody was late
  uint32_t failures_ = 0;
  uint32_t anywhere_ = 0;   // so many sleeps to come are spent unsettled
  uint64_t wake_up_ = 0;    // ns: what it takes to be woken anywhere, of late; 0: not known
  cpu_set_t main_{};        // what the process's first thread could use when that was looked at

  std::mutex mutex_;         // over all that follows, and over changes of the executor's mask
  cpu_set_t free_{};         // what the executor's thread may use while it is awake
  bool open_ended_ = false;  // free_ is all that its cpuset has, and follows that
  enum class Wish { kNone, kBind, kFetch } wish_ = Wish::kNone;  // of the executor, to the usher
  int processor_ = -1;       // that the thread is bound to, or is to be
  bool settled_ = false;     // it is
};

}  // namespace xmig::server
